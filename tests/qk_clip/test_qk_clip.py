"""QK-clip on one device: the formula head by head, names of many models, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshmuon import ConfigError, Muon
from meshmuon.qk_clip.clip import QKClip
from meshmuon.qk_clip.logits import logits_text
from meshmuon.qk_clip.projections import find_projections, read_clip_config
from tests.support.bounds import sum_error
from tests.support.clip_reference import clipped, parameters

CONFIG = {"head_dim": 4, "threshold": 10.0}
MLA = {"threshold": 10.0, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def apply(
    config: dict[str, Any], tensors: dict[str, Tensor], logits: dict[Any, Any], **options: Any
) -> dict[str, Tensor]:
    """The tensors after one clip; the given ones stay."""
    done = {name: nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}
    clip, params = QKClip(config), parameters(done, **options)
    clip.check(params, logits)
    for name, tensor in tensors.items():  # check() has written nothing
        same(done[name].detach(), tensor)
    clip.apply(params, logits)
    return {name: tensor.detach() for name, tensor in done.items()}


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def pair(heads: int = 4, key_heads: int = 4, layer: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        f"model.layers.{layer}.self_attn.q_proj.weight": random(4 * heads, 6, seed=2 * layer, dtype=dtype),
        f"model.layers.{layer}.self_attn.k_proj.weight": random(4 * key_heads, 6, seed=2 * layer + 1, dtype=dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_of_heads_beyond_the_threshold_are_scaled(dtype: torch.dtype) -> None:
    tensors = {**pair(dtype=dtype), **pair(layer=1, dtype=dtype), "model.norm.weight": random(6)}
    logits = {0: torch.tensor([5.0, 40.0, 10.0, 10.5]), 1: torch.tensor([1000.0, 3.0, 0.0, -7.0])}
    found = apply(CONFIG, tensors, logits)
    for name, tensor in tensors.items():
        if "proj" in name:
            heads = [[one] for one in logits[int(name.split(".")[2])].tolist()]
            same(found[name], clipped(tensor, heads, 10.0, 4))
        else:
            same(found[name], tensor)


def test_logits_at_the_threshold_or_below_change_no_bit() -> None:
    tensors = pair()
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = -0.0
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 1] = math.nan
    for threshold in (10.0, 0.3, 7e-3, 1e30):
        logits = torch.tensor([threshold, math.nextafter(threshold, 0), 0.0, -math.inf])
        found = apply({**CONFIG, "threshold": threshold}, tensors, {0: logits})
        for name, tensor in tensors.items():
            same(found[name], tensor)
            assert torch.equal(torch.signbit(found[name]), torch.signbit(tensor))


@pytest.mark.parametrize("key_dtype", [torch.float32, torch.float64])
def test_logits_that_are_not_finite_leave_their_head_alone_and_are_counted_once(key_dtype: torch.dtype) -> None:
    """Also for weights of two dtypes, which are scaled separately."""
    tensors = {name: one.to(key_dtype) if "k_proj" in name else one for name, one in pair().items()}
    clip = QKClip(CONFIG)
    params = parameters({name: nn.Parameter(tensor.clone()) for name, tensor in tensors.items()})
    clip.apply(params, {0: torch.tensor([math.nan, math.inf, 40.0, -math.inf])})
    for one in params:
        same(one.param.detach(), clipped(tensors[one.name], [[], [], [40.0], []], 10.0, 4))
    assert clip.nonfinite_logits == 2
    clip.apply(params, {0: torch.tensor([1.0, math.inf, 1.0, 1.0])})
    assert clip.nonfinite_logits == 3


FOUR, TWO = [[20.0], [80.0], [5.0], [11.0]], [[20.0, 80.0], [5.0, 11.0]]


@pytest.mark.parametrize(
    ("indices", "values", "q_heads", "k_heads"),
    [
        ({}, [20.0, 80.0, 5.0, 11.0], FOUR, TWO),
        ({"k_indices": [0, 0, 1, 1]}, [20.0, 80.0, 5.0, 11.0], FOUR, TWO),
        ({"q_indices": [1, 3]}, [20.0, 80.0], [[], [20.0], [], [80.0]], [[20.0], [80.0]]),
        (
            {"q_indices": [3, 1, 3], "k_indices": (1, 0, 0)},
            [20.0, 80.0, 30.0],
            [[], [80.0], [], [30.0]],
            [[80.0, 30.0], [20.0]],
        ),
    ],
)
def test_a_head_takes_the_largest_of_its_logits(indices: Any, values: Any, q_heads: Any, k_heads: Any) -> None:
    """Query heads share key heads equally, unless indices say which heads logits belong to."""
    tensors = pair(heads=4, key_heads=2)
    found = apply({**CONFIG, **indices}, tensors, {0: torch.tensor(values)})
    for name, heads in zip(tensors, (q_heads, k_heads), strict=True):
        same(found[name], clipped(tensors[name], heads, 10.0, 4))


def test_mla_logits_shrink_by_gamma() -> None:
    """Heads of nope and rope parts with one rope key for all of them: every logit of a head becomes γ times what it
    was.
    """
    heads, nope, rope, value, rank, tokens = 3, 4, 2, 3, 5, 7
    tensors = {
        "l.0.q_b_proj.weight": random(heads * 6, rank, seed=1),
        "l.0.kv_b_proj.weight": random(heads * 7, rank, seed=2),
    }
    x, c, k_rope = random(tokens, rank, seed=3), random(tokens, rank, seed=4), random(tokens, rope, seed=5)

    def forward(
        weights: dict[str, Tensor], x: Tensor = x, c: Tensor = c, k_rope: Tensor = k_rope
    ) -> tuple[Tensor, Tensor]:
        wq, wkv = weights.values()
        q = (x @ wq.t()).view(tokens, heads, nope + rope)
        kv = (c @ wkv.t()).view(tokens, heads, nope + value)
        logits = torch.einsum("thd,shd->hts", q[..., :nope], kv[..., :nope]) + torch.einsum(
            "thd,sd->hts", q[..., nope:], k_rope
        )
        return logits, kv[..., nope:]

    before, values = forward(tensors)
    largest = before.amax((1, 2))
    config = {**MLA, "threshold": float(largest.median())}
    after, values_after = forward(apply(config, tensors, {0: largest}))
    gamma = config["threshold"] / largest.clamp(min=config["threshold"])
    size, _ = forward({name: one.abs() for name, one in tensors.items()}, x.abs(), c.abs(), k_rope.abs())
    bound = 2 * sum_error(2 * rank + nope + rope + 6, torch.float32) * size
    assert ((after - before * gamma[:, None, None]).abs() <= bound).all()
    assert gamma.min() < 1
    same(values_after, values)


@pytest.mark.parametrize(
    ("split", "name"),
    [
        ((16, 8, 8), "h.0.attn.c_attn.weight"),
        ([16, 8, 8], "layers.0.self_attn.qkv_proj.weight"),
        (lambda name, shape: (16, 8, 8), "layers.0.Wqkv.weight"),
        ((16, 8, 8), "layers.0.attn.in_proj_weight"),
        ((16, 8, 8), "layers.0.query_key_value.weight"),
    ],
)
@pytest.mark.parametrize("use_muon", [True, False])
def test_fused_weights_take_rows_from_the_split(split: Any, name: str, use_muon: bool) -> None:
    bias = name.replace("weight", "bias")
    tensors = {name: random(32, 6), bias: random(32, seed=1)}
    values = [20.0, 5.0, 80.0, 30.0]
    found = apply(CONFIG, tensors, {0: torch.tensor(values)}, split=split, use_muon=use_muon)
    for one in (name, bias):
        wanted = clipped(tensors[one], [[v] for v in values], 10.0, 4)
        same(found[one], clipped(wanted, [values[:2], values[2:]], 10.0, 4, start=16))
        same(found[one][24:], tensors[one][24:])


NAMES = [
    ("model.layers.11.self_attn.q_proj.weight", 11, "q"),
    ("model.layers.11.self_attn.k_proj.weight", 11, "k"),
    ("layers.3.attention.wq.weight", 3, "q"),
    ("layers.3.attention.wk.weight", 3, "k"),
    ("transformer.h.0.attn.c_q.weight", 0, "q"),
    ("transformer.h.0.attn.c_k.weight", 0, "k"),
    ("model.layers.5.self_attn.q_b_proj.weight", 5, "q"),
    ("model.layers.5.self_attn.kv_b_proj.weight", 5, "kv_b"),
    ("layers.5.attention.wkv_b.weight", 5, "kv_b"),
    ("layers.5.attention.wq_b.weight", 5, "q"),
    ("transformer.h.2.attn.c_attn.weight", 2, "qkv"),
    ("encoder.layer.4.attention.self.query.weight", 4, "q"),
    ("encoder.layer.4.attention.self.key.weight", 4, "k"),
    ("blocks.4.attn.to_q.weight", 4, "q"),
    ("blocks.4.attn.Wqkv.weight", 4, "qkv"),
    ("layers.1.self_attn.in_proj_weight", 1, "qkv"),
    ("layers.1.self_attn.q_proj_weight", 1, "q"),
    ("module._orig_mod.layers.6._checkpoint_wrapped_module.attention.wq._orig_mod.weight", 6, "q"),
    ("attn.q_proj.weight", None, "q"),
]


@pytest.mark.parametrize(("name", "layer", "kind"), NAMES)
def test_names_of_common_models(name: str, layer: int | None, kind: str) -> None:
    [found] = find_projections(parameters({name: torch.zeros(1, 1)}), read_clip_config(CONFIG))
    assert (found.layer, found.kind, found.bias) == (layer, kind, False)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.self_attn.q_a_proj.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.1.mamba.in_proj.weight",
        "model.layers.1.self_attn.q_proj.lora_A.weight",
        "weight",
    ],
)
def test_names_of_other_parameters(name: str) -> None:
    assert find_projections(parameters({name: torch.zeros(1, 1)}), read_clip_config(CONFIG)) == []


def test_patterns_of_a_user() -> None:
    tensors = {"blocks.3.mix.Q.weight": random(8, 6), "blocks.3.mix.K.weight": random(8, 6, seed=1)}
    patterns = {"q": r"blocks\.(?P<layer>\d+)\.mix\.Q\.weight", "k": r"blocks\.(?P<layer>\d+)\.mix\.K\."}
    found = apply({**CONFIG, "patterns": patterns}, tensors, {3: torch.tensor([20.0, 5.0])})
    for name, tensor in tensors.items():
        same(found[name], clipped(tensor, [[20.0], [5.0]], 10.0, 4))


def test_layers_with_one_number_are_told_apart_by_name() -> None:
    tensors = {
        f"{tower}.{name}": tensor for tower in ("text", "vision") for name, tensor in pair(heads=2, key_heads=2).items()
    }
    with pytest.raises(ConfigError, match=r"layer 0 has 2 q projections: text\..*vision.*Name the attention module"):
        apply(CONFIG, tensors, {0: torch.tensor([20.0, 5.0])})
    found = apply(CONFIG, tensors, {"vision.model.layers.0": torch.tensor([20.0, 5.0])})
    for name, tensor in tensors.items():
        same(found[name], clipped(tensor, [[20.0], [5.0]], 10.0, 4) if name.startswith("vision") else tensor)
    with pytest.raises(ConfigError, match="has no query and key projections"):  # a name is no prefix of letters
        apply(CONFIG, tensors, {"vision.model.layer": torch.tensor([20.0, 5.0])})


BAD_CONFIGS = [
    ({"head_dim": 16}, "threshold=None must be a positive number"),
    ({"threshold": 10}, "needs head_dim"),
    ({"head_dim": 4, "threshold": 0}, "threshold=0 must be"),
    ({"head_dim": 4, "threshold": math.inf}, "threshold=inf must be"),
    ({"head_dim": 4, "threshold": math.nan}, "threshold=nan must be"),
    ({"head_dim": 4, "threshold": True}, "threshold=True must be"),
    ({"head_dim": 0, "threshold": 1}, "head_dim=0 must be"),
    ({"head_dim": 4.0, "threshold": 1}, "head_dim=4.0 must be"),
    ({**CONFIG, "heads": 4}, r"unknown keys \['heads'\]"),
    ({**CONFIG, "q_indices": []}, r"q_indices=\[\] must be"),
    ({**CONFIG, "k_indices": [0, -1]}, r"k_indices=\[0, -1\] must be"),
    ({**CONFIG, "q_indices": [0, 1, 2, 3], "k_indices": [0, 1]}, "4 q_indices but 2 k_indices"),
    ({"threshold": 1, "qk_nope_head_dim": 4}, "needs all of"),
    ({**CONFIG, "patterns": {"v": "x"}}, "must map q, k, kv_b, qkv"),
    ({**CONFIG, "patterns": {"q": "x"}}, "needs a group"),
    ({**CONFIG, "patterns": {"q": "(?P<layer>"}}, "is not a regular expression"),
    ([1], "must be a mapping"),
]


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS)
def test_configs_that_make_no_sense(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QKClip(config)


Q, K = pair()
BAD_LOGITS = [
    ("unknown layer", CONFIG, pair(), {3: torch.ones(4)}, rf"layer 3 has no query and key.*in all layers: {Q}, {K}\."),
    ("no projections", CONFIG, {"a.weight": random(4, 4)}, {3: torch.ones(4)}, r"in all layers: none\."),
    ("no keys", CONFIG, {Q: random(16, 6)}, {0: torch.ones(4)}, rf"has q projections, which do not.*in it: {Q}\."),
    ("too many logits", CONFIG, pair(), {0: torch.ones(5)}, "layer 0 has 5 logits but 4 query heads"),
    (
        "too few logits",
        {**CONFIG, "q_indices": [0, 1]},
        pair(),
        {0: torch.ones(4)},
        "4 logits, clip_config has 2 q_indices",
    ),
    ("q head", {**CONFIG, "q_indices": [4]}, pair(), {0: torch.ones(1)}, "q_indices name head 4, but layer 0 has 4"),
    ("k head", {**CONFIG, "q_indices": [0], "k_indices": [9]}, pair(), {0: torch.ones(1)}, "k_indices name head 9"),
    (
        "head_dim",
        {**CONFIG, "head_dim": 5},
        pair(),
        {0: torch.ones(4)},
        rf"{Q} \(layer 0\) has 16 rows, .*heads of 5 rows \(head_dim",
    ),
    ("groups", CONFIG, pair(4, 3), {0: torch.ones(4)}, "4 query heads, which cannot share 3 key heads equally"),
    (
        "no split",
        CONFIG,
        {"h.0.c_attn.weight": random(12, 4)},
        {0: torch.ones(1)},
        r"h.0.c_attn.weight \(layer 0\).*1 part\(s\).*split=",
    ),
    ("dims", CONFIG, {Q: random(4, 4, 6), K: random(16, 6)}, {0: torch.ones(4)}, r"shape \(4, 4, 6\)"),
    ("bias", CONFIG, {**pair(), Q[:-6] + "bias": random(8)}, {0: torch.ones(4)}, "has 8 rows, its weight .* has 16"),
    (
        "no MLA",
        CONFIG,
        {"l.0.wq.weight": random(8, 4), "l.0.wkv_b.weight": random(8, 4)},
        {0: torch.ones(2)},
        "needs qk_nope_head_dim",
    ),
    ("only MLA", MLA, pair(), {0: torch.ones(4)}, "is no MLA projection: clip_config needs head_dim"),
    ("shape", CONFIG, pair(), {0: torch.ones(1, 4)}, r"layer 0 needs a tensor of one dim.*\(1, 4\)"),
    ("number", CONFIG, pair(), {0: 7.0}, "layer 0 needs a tensor of one dim.*got float"),
    ("key", CONFIG, pair(), {(0,): torch.ones(4)}, r"the layer \(0,\) must be a number"),
    ("list", CONFIG, pair(), [torch.ones(4)], "must map layers to tensors"),
    ("no config", None, pair(), {0: torch.ones(4)}, "has no clip_config"),
    ("nothing", CONFIG, pair(), {}, "qk_logits is empty"),
    (
        "twice",
        CONFIG,
        pair(),
        {0: torch.ones(4), "model.layers.0": torch.ones(4)},
        rf"'model\.layers\.0' and 0 both mean {Q}",
    ),
    ("many", CONFIG, {f"{k}.q_proj.weight": random(4, 4) for k in range(25)}, {99: torch.ones(4)}, "and 5 more"),
]


@pytest.mark.parametrize(
    ("config", "tensors", "logits", "message"), [one[1:] for one in BAD_LOGITS], ids=[one[0] for one in BAD_LOGITS]
)
def test_logits_that_cannot_be_applied(config: Any, tensors: Any, logits: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QKClip(config).check(parameters(tensors), logits)


def test_no_logits_no_clip() -> None:
    tensors = pair()
    for config in (CONFIG, None):
        assert QKClip(config).apply(parameters(tensors), None) is None
    for name, tensor in pair().items():
        same(tensors[name], tensor)


def test_frozen_projections_stay() -> None:
    """Also one that is frozen between two steps."""
    tensors = {name: nn.Parameter(tensor, requires_grad="q_proj" in name) for name, tensor in pair().items()}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    clip, params = QKClip(CONFIG), parameters(tensors)
    for _ in range(2):
        clip.apply(params, {0: torch.full((4,), 40.0)})
        same(tensors[K].detach(), before[K])
        same(tensors[Q].detach(), clipped(before[Q], [[40.0]] * 4, 10.0, 4))
        tensors[Q].requires_grad_(False)


@pytest.mark.parametrize("left_out", [True, False])
def test_a_mask_on_the_device_leaves_everything_as_it_is(left_out: bool) -> None:
    tensors = {name: nn.Parameter(tensor) for name, tensor in pair().items()}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    QKClip(CONFIG).apply(parameters(tensors), {0: torch.full((4,), 40.0)}, skip_mask=torch.tensor(left_out))
    assert torch.equal(tensors[Q].detach(), before[Q]) is left_out


def test_layouts_are_read_at_every_step() -> None:
    """Other logits, other parameters and another split of the same names are seen."""
    clip = QKClip(CONFIG)
    name = "h.0.c_attn.weight"
    [record] = records = parameters({name: nn.Parameter(random(32, 6))})
    for replaced in (True, False):
        for split in ((8, 8, 16), (16, 8, 8), (16, 4, 12)):
            record.param.detach().copy_(random(32, 6))
            record.param_group["split"] = split
            params = parameters({name: record.param}, split=split) if replaced else records
            clip.apply(params, {0: torch.full((split[0] // 4,), 40.0)})
            wanted = random(32, 6)
            wanted[: split[0] + split[1]] *= torch.tensor(0.25).sqrt()
            same(record.param.detach(), wanted)


def test_parameters_may_change_their_places() -> None:
    clip, logits = QKClip(CONFIG), {0: torch.full((4,), 40.0)}
    for others in (0, 2, 1):
        tensors = {f"other.{k}.weight": random(16, 6, seed=k) for k in range(others)}
        tensors |= {name: nn.Parameter(tensor) for name, tensor in pair().items()}
        clip.apply(parameters(tensors), logits)
        for name, tensor in tensors.items():
            wanted = (
                random(16, 6, seed=int(name[6]))
                if name.startswith("other")
                else clipped(pair()[name], [[40.0]] * 4, 10.0, 4)
            )
            same(tensor.detach(), wanted)


class NoWaiting(TorchDispatchMode):
    """Fails where the host reads a number of a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), "the host waits for the device"
        assert "nonzero" not in str(func), "the host waits for the device"
        return func(*args, **(kwargs or {}))


def test_the_host_never_reads_a_logit() -> None:
    tensors = {name: nn.Parameter(tensor) for name, tensor in {**pair(), **pair(layer=1)}.items()}
    clip, logits = QKClip(CONFIG), {0: torch.full((4,), 40.0), 1: torch.full((4,), 50.0)}
    params = parameters(tensors)
    with NoWaiting():
        clip.apply(params, logits, skip_mask=torch.tensor(False))
        with pytest.raises(AssertionError, match="waits"):
            logits[0].max().item()


def muon_net(seed: int = 0) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(tensor) for name, tensor in {**pair(4, 2), **pair(4, 2, layer=1)}.items()}


def optimizer_of(params: dict[str, nn.Parameter], muon: bool = True, **options: Any) -> Muon:
    return Muon([{"params": list(params.items()), "use_muon": muon}], lr=0.01, allow_inactive=not muon, **options)


@pytest.mark.parametrize("muon", [True, False])
def test_a_step_clips_after_its_update(muon: bool) -> None:
    """Momentum is that of a step without the clip; both kinds of groups are clipped."""
    plain, params = muon_net(), muon_net()
    ours, other = optimizer_of(params, muon, clip_config=CONFIG), optimizer_of(plain, muon, clip_config=None)
    logits = {0: torch.tensor([20.0, 5.0, 80.0, 0.0]), 1: torch.tensor([1.0, 2.0, 3.0, 30.0])}
    for step in range(3):
        for k, name in enumerate(params):
            params[name].grad = random(*params[name].shape, seed=10 * step + k)
            plain[name].grad = random(*params[name].shape, seed=10 * step + k)
        given = logits if step != 1 else None
        ours.step(qk_logits=given)
        other.step()
        for name in params:
            if given is not None:
                values = logits[int(name.split(".")[2])].tolist()
                heads = [[one] for one in values] if "q_proj" in name else [values[:2], values[2:]]
                plain[name].data.copy_(clipped(plain[name].detach(), heads, 10.0, 4))
            same(params[name].detach(), plain[name].detach())
            for key, value in ours.state[params[name]].items():
                same(value, other.state[plain[name]][key])


def test_the_text_of_logits_tells_layers_heads_and_values_apart() -> None:
    shown = [
        logits_text(one)
        for one in (None, {}, {0: torch.ones(4)}, {0: torch.zeros(4)}, {0: torch.ones(3)}, {1: torch.ones(4)})
    ]
    assert len(set(shown)) == 6
    # what the host cannot read is not compared
    far = {0: torch.ones(4, device="meta")}, {0: torch.zeros(4, device="meta")}
    assert logits_text(far[0]) == logits_text(far[1])
    layers = {0: torch.ones(4), 10: torch.ones(3), "vision.layers.0": torch.ones(4)}
    assert logits_text(layers) == logits_text(dict(reversed(layers.items())))
