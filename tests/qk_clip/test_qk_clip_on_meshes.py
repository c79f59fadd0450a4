"""QK-clip on meshes: every rank ends with the bits of one device, whatever cuts the heads, and MaxLogits over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import ConfigError, Interleaved, Muon
from meshmuon.qk_clip.clip import QKClip
from meshmuon.qk_clip.max_logits import MaxLogits
from tests.qk_clip.test_max_logits import Attend, dense
from tests.support.bounds import sum_error
from tests.support.clip_reference import clipped, clipped_mla, parameters
from tests.support.collectives import counted_collectives
from tests.support.random_layouts import placements
from tests.support.tensors import local, same
from tests.support.threads import run_threads

R, S0, S1 = Replicate(), Shard(0), Shard(1)
STRIDED = _StridedShard(0, split_factor=2)
MLA = {"threshold": 10.0, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Attention:
    """A layer's projections as whole tensors, before the clip and after it, found from the formula."""

    config: dict[str, Any]
    split: tuple[int, ...] | Interleaved | None
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    logits: Tensor


def separate(key_heads: int, shared: int, dim: int, cols: int, *, bias: bool = False) -> Attention:
    heads = key_heads * shared
    values = (random(heads, seed=9) * 30).tolist()
    before = {"layers.0.self_attn.q_proj.weight": random(heads * dim, cols, seed=1)}
    before["layers.0.self_attn.k_proj.weight"] = random(key_heads * dim, cols, seed=2)
    if bias:
        before["layers.0.self_attn.q_proj.bias"] = random(heads * dim, seed=3)
        before["layers.0.self_attn.k_proj.bias"] = random(key_heads * dim, seed=4)
    q, k = [[one] for one in values], [values[h * shared : (h + 1) * shared] for h in range(key_heads)]
    after = {name: clipped(one, q if "q_proj" in name else k, 10.0, dim) for name, one in before.items()}
    return Attention({"head_dim": dim, "threshold": 10.0}, None, before, after, torch.tensor(values))


def fused(key_heads: int, shared: int, dim: int, cols: int) -> Attention:
    parts = separate(key_heads, shared, dim, cols)
    values = random(key_heads * dim, cols, seed=5)
    sizes = (key_heads * shared * dim, key_heads * dim, key_heads * dim)
    before, after = (torch.cat([*one.values(), values]) for one in (parts.before, parts.after))
    name = "layers.0.attn.qkv_proj.weight"
    return Attention(parts.config, sizes, {name: before}, {name: after}, parts.logits)


def interleaved(key_heads: int, shared: int, dim: int, cols: int) -> Attention:
    """For every key head its queries, the key and the value: with one query each, as gpt-neox has it, else as
    falcon.
    """
    parts = separate(key_heads, shared, dim, cols)
    values = random(key_heads * dim, cols, seed=5)
    before, after = (
        torch.cat([part.view(key_heads, -1, cols) for part in (*one.values(), values)], 1).flatten(0, 1)
        for one in (parts.before, parts.after)
    )
    name = "layers.0.attention.query_key_value.weight"
    return Attention(
        parts.config, Interleaved((shared * dim, dim, dim), key_heads), {name: before}, {name: after}, parts.logits
    )


def latent(heads: int, cols: int) -> Attention:
    values = (random(heads, seed=9) * 30).tolist()
    q, kv = "layers.0.self_attn.q_b_proj.weight", "layers.0.self_attn.kv_b_proj.weight"
    before = {q: random(heads * 5, cols, seed=1), kv: random(heads * 7, cols, seed=2)}
    after = {q: clipped_mla(before[q], values, 10.0, 3, 2, 0), kv: clipped_mla(before[kv], values, 10.0, 3, 0, 4)}
    return Attention(MLA, None, before, after, torch.tensor(values))


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape))


def place(value: Tensor, mesh: DeviceMesh, cut: tuple[Any, ...] | None) -> Tensor:
    value = value.clone()  # what is replicated shares its memory
    return value if cut is None else distribute_tensor(value, mesh, cut, src_data_rank=None)


def run_clip(
    layer: Attention, shape: tuple[int, ...], cuts: list[tuple[Any, ...] | None], logits_cut: Any = None
) -> None:
    """Clips twice on every rank, so that what is kept from the first time is used, and compares with the formula."""

    def main(rank: int) -> None:
        mesh = mesh_of(shape)
        clip = QKClip(layer.config)
        for _ in range(2):
            tensors = {
                name: nn.Parameter(place(value, mesh, cut))
                for (name, value), cut in zip(layer.before.items(), cuts, strict=True)
            }
            params = parameters(tensors, split=layer.split)
            clip.check(params, {0: layer.logits})
            clip.apply(params, {0: place(layer.logits, mesh, logits_cut)})
            for (name, value), cut in zip(layer.after.items(), cuts, strict=True):
                same(local(tensors[name]), local(place(value, mesh, cut)), name)

    run_threads(math.prod(shape), main)


SHAPES = [(1,), (2,), (3,), (4,), (5,), (7,), (2, 2), (2, 3), (3, 2), (2, 4), (2, 2, 2), (2, 1, 3)]


@st.composite
def clips(draw: Any) -> tuple[Attention, tuple[int, ...], list[Any], Any]:
    kind = draw(st.sampled_from(["separate", "biased", "fused", "interleaved", "latent"]))
    key_heads, shared = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    dim, cols = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 5))
    layer = {
        "separate": lambda: separate(key_heads, shared, dim, cols),
        "biased": lambda: separate(key_heads, shared, dim, cols, bias=True),
        "fused": lambda: fused(key_heads, shared, dim, cols),
        "interleaved": lambda: interleaved(key_heads, shared, dim, cols),
        "latent": lambda: latent(key_heads, cols),
    }[kind]()
    shape = draw(st.sampled_from(SHAPES))
    cuts = [draw(st.one_of(placements(one.dim(), len(shape)), st.none())) for one in layer.before.values()]
    by_heads = st.tuples(*[st.sampled_from([R, S0, STRIDED])] * len(shape))
    return layer, shape, cuts, draw(st.one_of(st.none(), by_heads))


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(clips())
def test_random_layouts_equal_one_device(drawn: Any) -> None:
    run_clip(*drawn)


def test_logits_that_are_maxima_not_yet_taken() -> None:
    """A DTensor of partial maxima over data parallel ranks, cut by heads over tensor parallel ones."""
    layer = separate(2, 2, 3, 5)

    def main(rank: int) -> None:
        mesh = mesh_of((2, 2))
        mine = layer.logits.chunk(2)[mesh.get_coordinate()[1]].clone()
        mine[mesh.get_coordinate()[0] :: 2] -= 50.0  # the other data parallel rank has seen the larger one
        logits = DTensor.from_local(mine, mesh, [Partial("max"), S0], run_check=False)
        tensors = {name: nn.Parameter(place(value, mesh, (R, S0))) for name, value in layer.before.items()}
        QKClip(layer.config).apply(parameters(tensors), {0: logits})
        for name, value in layer.after.items():
            same(local(tensors[name]), local(place(value, mesh, (R, S0))), name)

    run_threads(4, main)


def test_logits_of_several_layers_come_together_in_one_reduction() -> None:
    layers = [separate(2, 2, 3, 5), separate(2, 2, 3, 5)]
    before = {
        name.replace("layers.0", f"layers.{k}"): v for k, one in enumerate(layers) for name, v in one.before.items()
    }
    after = {
        name.replace("layers.0", f"layers.{k}"): v for k, one in enumerate(layers) for name, v in one.after.items()
    }

    def main(rank: int) -> None:
        mesh = mesh_of((2, 2))
        logits = {k: place(one.logits, mesh, (S0, S0)) for k, one in enumerate(layers)}
        tensors = {name: nn.Parameter(place(value, mesh, (R, S0))) for name, value in before.items()}
        calls[rank].clear()
        QKClip(layers[0].config).apply(parameters(tensors), dict(reversed(logits.items())) if rank else logits)
        assert calls[rank] == [("all_reduce", 8)]
        for name, value in after.items():
            same(local(tensors[name]), local(place(value, mesh, (R, S0))), name)

    with counted_collectives() as calls:
        run_threads(4, main)


def test_nan_in_divided_logits_leaves_the_head_alone_on_all_ranks() -> None:
    layer = separate(4, 1, 2, 3)
    logits = layer.logits.clone()
    logits[layer.logits.argmax()] = math.nan

    def main(rank: int) -> Tensor:
        mesh = mesh_of((2,))
        tensors = {name: nn.Parameter(value.clone()) for name, value in layer.before.items()}
        clip = QKClip(layer.config)
        clip.apply(parameters(tensors), {0: place(logits, mesh, (S0,))})
        assert clip.nonfinite_logits == 1
        return torch.cat([one.detach().flatten() for one in tensors.values()])

    first, second = run_threads(2, main)
    same(first, second, "ranks")
    assert torch.isfinite(first).all()


def test_logits_that_are_sums_are_refused() -> None:
    layer = separate(2, 1, 2, 3)

    def main(rank: int) -> None:
        logits = DTensor.from_local(layer.logits, mesh_of((2,)), [Partial()], run_check=False)
        QKClip(layer.config).check(parameters(layer.before), {0: logits})

    assert all('Partial("max")' in one for one in refusals(2, main))


def test_steps_on_a_mesh_equal_steps_on_one_device() -> None:
    """Through Muon: update, then clip, three times; momentum stays that of the update."""
    layer = separate(4, 2, 3, 7)

    def train(tensors: dict[str, nn.Parameter], grad: Any) -> Muon:
        optimizer = Muon([{"params": list(tensors.items()), "use_muon": True}], lr=0.01, clip_config=layer.config)
        for step in range(3):
            for k, param in enumerate(tensors.values()):
                param.grad = grad(random(*param.shape, seed=20 + 10 * step + k))
            optimizer.step(qk_logits={0: layer.logits.roll(step)})
        return optimizer

    whole = {name: nn.Parameter(value.clone()) for name, value in layer.before.items()}
    states = train(whole, lambda value: value).state

    def main(rank: int) -> None:
        mesh, cut = mesh_of((2, 2, 2)), (R, STRIDED, S0)
        tensors = {name: nn.Parameter(place(value, mesh, cut)) for name, value in layer.before.items()}
        found = train(tensors, lambda value: place(value, mesh, cut)).state
        for name, param in tensors.items():
            same(local(param), local(place(whole[name].detach(), mesh, cut)), name)
            wanted = states[whole[name]]["momentum_buffer"]
            same(local(found[param]["momentum_buffer"]), local(place(wanted, mesh, cut)), f"momentum of {name}")

    run_threads(8, main)


def attentions(count: int = 2) -> nn.ModuleList:
    layers = nn.ModuleList(Attend(8, 4, bias=False) for _ in range(count))
    for k, param in enumerate(layers.parameters()):
        nn.init.normal_(param, generator=torch.Generator().manual_seed(k))
    return layers


def test_logits_of_data_and_tensor_parallel_ranks_come_together() -> None:
    """TP by heads through torch's own wrapper × data parallel; each further collect is one all-reduce."""
    x = random(4, 6, 12, seed=50)
    wanted, bound = single_logits(x), logit_error(x)

    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layers = attentions()
        for layer in layers:
            parallelize_module(layer, mesh["tp"], {f"{one}_proj": ColwiseParallel() for one in "qkv"})
        logits = MaxLogits(mesh, tp_group=mesh["tp"])
        for k, layer in enumerate(layers):
            logits.attach(layer, k)
        for turn in range(3):
            with logits.collecting():
                for layer in layers:
                    layer(x.chunk(2)[mesh.get_coordinate()[0]])
            calls[rank].clear()
            found = logits.collect()
            assert turn == 0 or calls[rank] == [("all_reduce", 17)]
            assert list(found) == [0, 1]
            for k, value in found.items():
                torch.testing.assert_close(value, wanted[k], rtol=0, atol=bound)

    with counted_collectives() as calls:
        run_threads(4, main)


def single_logits(x: Tensor) -> dict[int, Tensor]:
    """On one device, as torch computes products: the same per-head maxima."""
    with torch.no_grad():
        parts = [layer.parts(x) for layer in attentions()]
    return {k: dense(q, key, causal=True).float() for k, (q, key, _) in enumerate(parts)}


def logit_error(x: Tensor) -> float:
    """Rounding of any logit of ``attentions()`` on x: inner sizes of 12, 12 and 3, a division and two factors, on
    two sides.
    """
    worst = 0.0
    for layer in attentions():
        q, k = ((x.abs() @ one.weight.detach().abs().t()).amax() for one in (layer.q_proj, layer.k_proj))
        worst = max(worst, float(3 * q * k / math.sqrt(3)))
    return 2 * sum_error(12 + 12 + 3 + 4, torch.float32) * worst


def test_fsdp_end_to_end_keeps_logits_under_the_threshold() -> None:
    """fully_shard, MaxLogits and the clip together: measured again after the step, no logit exceeds the threshold."""
    x = random(4, 6, 12, seed=50)

    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        layers = attentions()
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        mine = x[rank : rank + 2]
        groups = [{"params": list(layers.named_parameters()), "use_muon": True}]
        optimizer = Muon(groups, lr=0.0, weight_decay=0.0, clip_config={"head_dim": 3, "threshold": 4.0})
        logits = MaxLogits(dist.group.WORLD)
        for k, layer in enumerate(layers):
            logits.attach(layer, k)

        def measure() -> dict[Any, Tensor]:
            with logits.collecting():
                sum(layer(mine).square().sum() for layer in layers).backward()
            return logits.collect()

        first = measure()
        assert max(float(one.max()) for one in first.values()) > 8.0
        optimizer.step(qk_logits=first)
        optimizer.zero_grad()
        second = measure()
        assert max(float(one.max()) for one in second.values()) <= 4.0 + logit_error(x)
        assert max(float(one.max()) for one in second.values()) > 3.0

    run_threads(3, main)


def collected(logits: MaxLogits, *observed: tuple[Any, Tensor, Tensor], **options: Any) -> dict[Any, Tensor]:
    """What ``collect`` returns once ``observe`` was given these layers, queries and keys."""
    with logits.collecting():
        for layer, q, k in observed:
            logits.observe(layer, q, k, **options)
    return logits.collect()


def test_unevenly_divided_heads() -> None:
    """Three heads over two tensor parallel ranks: two on the first, one on the second."""
    q, k = random(2, 3, 5, 4, seed=1), random(2, 3, 5, 4, seed=2)
    wanted = collected(MaxLogits(), (0, q, k))[0]

    def main(rank: int) -> None:
        heads = slice(0, 2) if rank == 0 else slice(2, 3)
        same(collected(MaxLogits(tp_group=dist.group.WORLD), (0, q[:, heads], k[:, heads]))[0], wanted, "heads")

    run_threads(2, main)


def test_ranks_that_saw_nothing_take_part() -> None:
    def main(rank: int) -> None:
        logits = MaxLogits(dist.group.WORLD)
        for turn in range(3):
            seen = [("attn", torch.full((1, 2, 1, 4), float(turn + 1)), torch.ones(1, 2, 1, 4))] if rank == turn else []
            same(collected(logits, *seen, scale=1.0)["attn"], torch.full((2,), 4.0 * (turn + 1)), "logits")
        same(logits.collect()["attn"], torch.full((2,), -math.inf), "nothing seen")

    run_threads(3, main)


def test_nan_of_one_rank_reaches_all_as_infinity() -> None:
    def main(rank: int) -> None:
        q = torch.ones(1, 2, 1, 4)
        if rank == 1:
            q[0, 0, 0, 0] = math.nan
        found = collected(MaxLogits(dist.group.WORLD), (0, q, torch.ones(1, 2, 1, 4)))
        same(found[0], torch.tensor([math.inf, 2.0]), "logits")

    run_threads(3, main)


def refusals(world: int, main: Any) -> list[str]:
    def caught(rank: int) -> str:
        with pytest.raises(ConfigError) as shown:
            main(rank)
        return str(shown.value)

    return run_threads(world, caught)


def test_layers_and_heads_may_come_and_go() -> None:
    """Ranks that see a new layer, or other heads, have all compare notes again; a layer that is not seen any more
    has −∞.
    """

    def main(rank: int) -> list[dict[Any, list[float]]]:
        logits = MaxLogits(dist.group.WORLD)
        found = []
        for layers, heads in (((0,), 2), ((0, 1) if rank == 2 else (0,), 2), ((1,), 2), ((0,), 2), ((0,), 3)):
            q = torch.full((1, heads, 1, 4), 1.0 + rank)
            largest = collected(logits, *((layer, q, torch.full((1, heads, 1, 4), 1.0 + layer)) for layer in layers))
            found.append({layer: one.tolist() for layer, one in largest.items()})
        return found

    first, both, second = {0: [6.0, 6.0]}, {0: [6.0, 6.0], 1: [12.0, 12.0]}, {0: [-math.inf] * 2, 1: [12.0, 12.0]}
    third, last = {0: [6.0, 6.0], 1: [-math.inf] * 2}, {0: [6.0, 6.0, 6.0]}
    assert run_threads(3, main) == [[first, both, second, third, last]] * 3


@pytest.mark.parametrize(
    ("heads", "by_heads", "text"),
    [
        ((2, 3, 2), False, "3 heads on rank 1 and 2"),
        ((0, 0, 0), False, "no rank has observed"),
        ((2, 0, 2), True, "only [0, 2] of 3 tensor parallel ranks"),
    ],
)
def test_every_rank_hears_the_same_refusal(heads: tuple[int, ...], by_heads: bool, text: str) -> None:
    def main(rank: int) -> None:
        logits = MaxLogits(dist.group.WORLD, tp_group=dist.group.WORLD if by_heads else None)
        ones = torch.ones(1, heads[rank], 1, 4)
        collected(logits, *[(0, ones, ones)] * bool(heads[rank]))

    shown = refusals(3, main)
    assert len(set(shown)) == 1
    assert text in shown[0]


def test_groups_that_lack_ranks() -> None:
    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        MaxLogits(mesh["dp"], tp_group=mesh["tp"])

    assert all("of which group lacks" in one for one in refusals(4, main))
    assert all("MaxLogits(group=...)" in one for one in refusals(2, lambda rank: MaxLogits().collect()))


def test_dtensor_queries() -> None:
    """Attention on DTensors: cut by heads and batch it works, cut by positions it is refused."""
    q, k = random(2, 4, 6, 3, seed=1), random(2, 4, 6, 3, seed=2)
    wanted = collected(MaxLogits(), (0, q, k))[0]

    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        logits = MaxLogits(mesh, tp_group=mesh["tp"])
        cut = [Shard(0), Shard(1)]
        with logits.collecting():
            logits.observe(0, place(q, mesh, cut), place(k, mesh, cut))
            for wrong in ([Shard(0), Shard(2)], [Partial(), Shard(1)]):
                bad = [DTensor.from_local(one[:1, :2], mesh, wrong, run_check=False) for one in (q, k)]
                with pytest.raises(ConfigError, match="shard by batch and heads only"):
                    logits.observe(0, *bad)
            with pytest.raises(ConfigError, match="redistribute k like q"):
                logits.observe(0, place(q, mesh, cut), k)
        same(logits.collect()[0], wanted, "logits")

    run_threads(4, main)
