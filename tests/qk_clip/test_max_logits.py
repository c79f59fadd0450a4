"""MaxLogits on one device: exact maxima against dense logits, what is watched and when, and how much memory it
takes.
"""

from __future__ import annotations

import math
import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshmuon import ConfigError
from meshmuon.qk_clip import logit_maxima
from meshmuon.qk_clip.logit_maxima import head_maxima
from meshmuon.qk_clip.max_logits import MaxLogits
from tests.support.bounds import sum_error


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(q: Tensor, k: Tensor, *, causal: bool, scale: float | None = None, visible: Tensor | None = None) -> Tensor:
    """All logits at once, in float64."""
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = q.double() @ k.double().transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.amax([dim for dim in range(scores.dim()) if dim != scores.dim() - 3])


def close(found: Tensor, wanted: Tensor) -> None:
    # Projections over 12 inputs, heads of up to 16 dims, and a factor; entries below 6, so that no logit adds up more
    # than 300.
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=sum_error(12 + 12 + 16 + 4, torch.float32) * 300)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_shapes_and_masks(data: Any) -> None:
    """Any number of batch dims; a key head serves several query heads, and keys of one sequence may serve all."""
    key_heads, shared, dim = (data.draw(st.integers(1, 4)) for _ in range(3))
    queries, keys = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    heads, seed = key_heads * shared, data.draw(st.integers(0, 100))
    batch = data.draw(st.sampled_from([(), (1,), (3,), (4,), (2, 3)]))
    key_batch = data.draw(st.sampled_from([batch, (1,) * len(batch)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64]))
    q, k = (
        random(*batch, heads, queries, dim, seed=seed).to(dtype),
        random(*key_batch, key_heads, keys, dim, seed=seed + 1).to(dtype),
    )
    kind = data.draw(st.sampled_from(["none", "bool", "added"]))
    shape = tuple(data.draw(st.sampled_from([1, size])) for size in (*batch, heads, queries, keys))[
        data.draw(st.integers(0, 1)) :
    ]
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    hidden = data.draw(st.sampled_from([-math.inf, -1e4, torch.finfo(torch.float32).min]))
    added = torch.where(visible, data.draw(st.sampled_from([0.0, -3.0, 2.0])), hidden)
    found = head_maxima(
        q,
        k,
        causal=(causal := data.draw(st.booleans())),
        scale=(scale := data.draw(st.sampled_from([None, 0.3, 1.0, -0.7]))),
        mask={"none": None, "bool": visible, "added": added}[kind],
        block_bytes=data.draw(st.sampled_from([1, 100, 1000, 10**9])),
    )
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    whole = k.expand(*batch, *k.shape[-3:])
    close(found, dense(q, whole, causal=causal, scale=scale, visible=None if kind == "none" else visible))


def test_half_precision_is_multiplied_in_full() -> None:
    """Products of bfloat16 numbers are exact in float32; in bfloat16 the sum below would be 256."""
    q = torch.ones(1, 1, 1, 257, dtype=torch.bfloat16)
    assert head_maxima(q, q, causal=True, scale=1.0, block_bytes=100).item() == 257.0


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_nothing_to_see(empty: str) -> None:
    q = random(0 if empty == "batch" else 2, 3, 0 if empty == "queries" else 4, 5)
    k = random(q.shape[0], 3, 0 if empty == "keys" else 4, 5)
    assert torch.equal(head_maxima(q, k, causal=True, block_bytes=100), torch.full((3,), -math.inf))


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result._is_view():
            storage = result.untyped_storage().nbytes()
            self.nbytes = max(self.nbytes, storage)
        return result


@pytest.mark.parametrize("masked", [False, True])
def test_memory_stays_within_the_blocks(masked: bool) -> None:
    """512 queries × 512 keys × 8 heads × 2 sequences are 16 MiB of logits; no tensor exceeds the block of 1 MiB."""
    q, k = random(2, 8, 512, 16), random(2, 4, 512, 16, seed=1)
    mask = torch.ones(512, 512, dtype=torch.bool).tril() if masked else None
    with Largest() as largest:
        head_maxima(q, k, causal=not masked, mask=mask, block_bytes=2**20)
    assert 2**19 < largest.nbytes <= 2**20
    with Largest() as largest:
        head_maxima(q, k, causal=not masked, mask=mask, block_bytes=2**30)
    assert largest.nbytes == 2**24  # the measure itself can see them all


class Attend(nn.Module):
    """Grouped attention; the number of heads follows from what the projections give."""

    def __init__(self, heads: int = 4, key_heads: int = 2, dim: int = 3, *, bias: bool = True, **options: Any) -> None:
        super().__init__()
        self.dim, self.options = dim, options
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(12, count * dim, bias=bias) for count in (heads, key_heads, key_heads)
        )

    def parts(self, x: Tensor) -> list[Tensor]:
        return [one(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj)]

    def forward(self, x: Tensor) -> Tensor:
        options = {"is_causal": True, "enable_gqa": True, **self.options}
        # Cloned: FSDP2 warns of modules that return views.
        return F.scaled_dot_product_attention(*self.parts(x), **options).transpose(1, 2).flatten(2).clone()


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attend() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def watched(net: Net) -> MaxLogits:
    logits = MaxLogits()
    for k, layer in enumerate(net.layers):
        logits.attach(layer, k)
    return logits


def expected(net: Net, *batches: Tensor) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    with torch.no_grad():
        for x in batches:
            for k, layer in enumerate(net.layers):
                q, key, _ = layer.parts(x)
                mine = dense(q, key, causal=True)
                found[k] = torch.maximum(found[k], mine) if k in found else mine
                x = x + layer(x)
    return found


def compare(found: dict[Any, Tensor], wanted: dict[int, Tensor]) -> None:
    assert list(found) == list(wanted)
    for k, value in found.items():
        assert value.dtype == torch.float32
        assert not value.requires_grad
        close(value, wanted[k])


def test_attached_modules_are_watched_over_several_forwards() -> None:
    torch.manual_seed(0)
    net, batches = Net(), [random(2, 6, 12, seed=seed) for seed in range(3)]
    logits = watched(net)
    with logits.collecting():
        net(batches[0])
        net(batches[1])
    net(batches[2] * 100)  # not watched
    with logits.collecting():
        net(batches[2])
    compare(logits.collect(), expected(net, *batches))
    assert logits.collect() == {}
    with logits.collecting():
        net(batches[1])
    compare(logits.collect(), expected(net, batches[1]))  # what was collected is forgotten


@pytest.mark.parametrize("kind", ["bool", "added", "positional", "scale", "not causal"])
def test_options_of_sdpa_are_honoured(kind: str) -> None:
    torch.manual_seed(0)
    visible = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)) < 0.5
    visible |= torch.eye(6, dtype=torch.bool)
    options: dict[str, Any] = {
        "bool": {"is_causal": False, "attn_mask": visible},
        "added": {
            "is_causal": False,
            "attn_mask": torch.zeros(6, 6).masked_fill(~visible, torch.finfo(torch.float32).min),
        },
        "positional": {"is_causal": False, "attn_mask": visible},
        "scale": {"scale": 2.0},
        "not causal": {"is_causal": False},
    }[kind]
    layer, x, logits = Attend(**options), random(2, 6, 12), MaxLogits()
    if kind == "positional":
        layer.forward = lambda x: F.scaled_dot_product_attention(*layer.parts(x), visible, 0.0, False, enable_gqa=True)  # type: ignore[method-assign]
    own = layer.__dict__.get("forward")
    logits.attach(layer, "attn")
    with logits.collecting():
        layer(x)
    assert layer.__dict__.get("forward") is own
    q, k, _ = layer.parts(x)
    mask = visible if "attn_mask" in options else None
    close(
        logits.collect()["attn"],
        dense(q.detach(), k.detach(), causal=kind == "scale", scale=options.get("scale"), visible=mask),
    )


def test_outside_of_collecting_modules_are_as_they_were() -> None:
    net = Net()
    logits = watched(net)
    with logits.collecting():
        assert all("forward" in layer.__dict__ for layer in net.layers)
    assert not any(
        "forward" in layer.__dict__ or layer._forward_hooks or layer._forward_pre_hooks for layer in net.layers
    )
    with pytest.raises(RuntimeError, match="in the middle"), logits.collecting():
        raise RuntimeError("in the middle")
    assert not any("forward" in layer.__dict__ for layer in net.layers)
    with pytest.raises(RuntimeError), logits.collecting():
        net(random(2, 6, 11))
    assert torch.overrides._get_current_function_mode_stack() == []


def test_detached_modules_are_not_watched() -> None:
    net = Net()
    logits = watched(net)
    with logits.collecting():
        net(random(1, 3, 12))
    logits.detach()
    with logits.collecting():
        net(random(1, 3, 12))
    assert logits.collect() == {}


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    torch.manual_seed(0)
    net, x = Net(), random(2, 6, 12)
    logits, y = watched(net), x
    y = x.clone().requires_grad_()
    with logits.collecting():
        for layer in net.layers:
            y = y + checkpoint(layer, y, use_reentrant=reentrant)
        y.sum().backward()
    compare(logits.collect(), expected(net, x))


@pytest.mark.parametrize("what", ["model", "module", "in place"])
def test_compiled_modules_are_watched_in_eager_mode(what: str) -> None:
    torch.manual_seed(0)
    net, x = Net(), random(2, 6, 12)
    wanted = expected(net, x)
    logits = watched(net)
    model: Any = net
    if what == "model":
        model = torch.compile(net, backend="eager")
    elif what == "in place":
        net.compile(backend="eager")
    else:
        net.layers = nn.ModuleList(torch.compile(layer, backend="eager") for layer in net.layers)  # type: ignore[misc]
        logits = watched(net)
    model(x)
    with logits.collecting():
        model(x)
    compare(logits.collect(), wanted)
    model(x)
    assert logits.collect() == {}


def test_hand_written_attention_inside_compiled_code() -> None:
    q, k, logits = random(2, 4, 6, 3), random(2, 2, 6, 3, seed=1), MaxLogits()

    def attention(q: Tensor, k: Tensor) -> Tensor:
        logits.observe(0, q, k)
        return q * 2

    compiled = torch.compile(attention, backend="eager")
    compiled(q, k)
    assert logits.collect() == {}
    for eager in (True, False):
        with logits.collecting(eager=eager):
            assert torch.equal(compiled(q, k), q * 2)
        close(logits.collect()[0], dense(q, k, causal=True))
        compiled(q, k)
        assert logits.collect() == {}


def test_scores_that_attention_has_found_itself() -> None:
    logits, scores = MaxLogits(), random(2, 4, 6)
    logits.observe_scores(0, scores)
    assert logits.collect() == {}
    with logits.collecting():
        logits.observe_scores(0, scores)
        logits.observe_scores(0, scores - 1)
    assert torch.equal(logits.collect()[0], scores.amax((0, 2)))


def test_the_log_sum_exp_of_flash_attention_is_a_bound() -> None:
    """Above the largest logit by at most the logarithm of the number of keys, by nothing where a head is about to
    explode.
    """
    keys = 64
    q, k, v = random(3, 2, 4, keys, 16) * torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None, None]
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)
    logits = MaxLogits()
    with logits.collecting():
        logits.observe_scores("bound", lse)
        logits.observe("exact", q, k, causal=True)
    largest = logits.collect()
    above = largest["bound"] - largest["exact"]
    assert above.min() > -1e-3
    assert above.max() < math.log(keys) + 1e-3
    assert above[-1] < 1e-3


def test_nan_becomes_infinity() -> None:
    logits = MaxLogits()
    with logits.collecting():
        logits.observe_scores(0, torch.tensor([[1.0, math.nan], [-math.inf, -math.inf], [math.inf, 0.0], [1.0, 2.0]]))
    assert logits.collect()[0].tolist() == [math.inf, -math.inf, math.inf, 2.0]


def test_attention_that_is_not_seen_is_refused() -> None:
    """A module that multiplies by hand would otherwise never be clipped."""
    layer, logits = nn.MultiheadAttention(12, 4, batch_first=True), MaxLogits()
    logits.attach(layer, 7)
    x = random(2, 6, 12)
    with (
        pytest.raises(ConfigError, match=r"MultiheadAttention of layer 7 never called F\.scaled_dot_product"),
        logits.collecting(),
    ):
        layer(x, x, x)


def test_a_module_that_observes_by_hand_may_be_attached() -> None:
    logits, q = MaxLogits(), random(1, 2, 3, 4)

    class ByHand(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            logits.observe(3, q, q, causal=False)
            return q

    layer = ByHand()
    logits.attach(layer, 3)
    with logits.collecting():
        layer(q)
    close(logits.collect()[3], dense(q, q, causal=False))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda logits: logits.attach(nn.Linear(1, 1), 1.5), "layer 1.5 must be"),
        (lambda logits: logits.observe(0, random(2, 3), random(2, 3)), r"q \(2, 3\) and k \(2, 3\) must both be"),
        (lambda logits: logits.observe(0, random(1, 3, 2, 4), random(1, 3, 2, 5)), "must both be"),
        (
            lambda logits: logits.observe(0, random(1, 3, 2, 4), random(1, 2, 2, 4)),
            "3 query heads cannot share 2 key heads",
        ),
        (
            lambda logits: logits.observe(0, random(1, 3, 2, 4), random(1, 3, 2, 4), mask=torch.ones(3, 3) > 0),
            r"mask \(3, 3\) does not",
        ),
        (lambda logits: logits.observe_scores(0, random(3)), r"shape \(3,\)"),
        (
            lambda logits: [logits.observe(0, one, one) for one in (random(1, 2, 2, 4), random(1, 3, 2, 4))],
            "had 2 heads and now has 3",
        ),
        (lambda logits: logits.collecting().__enter__(), "entered already"),
        (lambda logits: logits.detach(), "after collecting"),
        (lambda logits: logits.attach(nn.Linear(1, 1), 0), "before collecting"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, message: str) -> None:
    logits = MaxLogits()
    with pytest.raises(ConfigError, match=message), logits.collecting():
        call(logits)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_bytes=0"):
        MaxLogits(block_bytes=0)
    logits = MaxLogits()
    logits.attach(nn.Linear(1, 1), 0)
    with pytest.raises(ConfigError, match="eager mode only"), logits.collecting(eager=False):
        pass


class Products(TorchDispatchMode):
    """The kinds and dtypes of all batched products."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[str, torch.dtype, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::bmm":
            self.made.add((func._overloadname, args[0].dtype, result.dtype))
        return result


def test_a_gpu_multiplies_half_precision_as_it_is_and_adds_up_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        half, full = (torch.empty(1, 1, 2, 4, dtype=dtype, device="cuda") for dtype in (torch.bfloat16, torch.float32))
    fits = logit_maxima._multiplied_as_they_are
    assert fits(half, half)
    assert not any((fits(full, full), fits(half, full), fits(random(1, 1, 2, 4).half(), random(1, 1, 2, 4).half())))
    monkeypatch.setattr(logit_maxima, "_multiplied_as_they_are", lambda q, k: True)
    q, k = (torch.empty(2, heads, 9, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    with Products() as products:
        found = head_maxima(q, k, causal=True, block_bytes=1000)
    assert (found.shape, found.dtype) == ((4,), torch.float32)
    assert products.made == {("dtype", torch.bfloat16, torch.float32)}


class _Mixed(nn.Module):
    """Attention, then products that selective checkpointing saves."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 16, 16) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, dim=-1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        both = torch.cat([x, x])
        return both + torch.bmm(both, self.experts).tanh()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("length", [8, 16])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_training_is_the_same_with_and_without(checkpointed: bool, length: int, backward_inside: bool) -> None:
    """Also with selective checkpointing, which must not take what is computed for the maxima for the model's own
    products.
    """

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op is torch.ops.aten.bmm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    found = []
    for collects in (False, True):
        torch.manual_seed(0)
        block, x = _Mixed(), torch.randn(2, length, 16, requires_grad=True)
        logits = MaxLogits()
        logits.attach(block, 0)
        contexts = partial(create_selective_checkpoint_contexts, policy)
        with logits.collecting() if collects else nullcontext():
            y = checkpoint(block, x, use_reentrant=False, context_fn=contexts) if checkpointed else block(x)
            if backward_inside:
                y.square().sum().backward()
        if not backward_inside:
            y.square().sum().backward()
        found.append([one.grad for one in (x, *block.parameters())])
    for plain, watched in zip(*found, strict=True):
        assert torch.equal(plain, watched)


def test_threads_that_collect_leave_the_compiler_as_it_was() -> None:
    """The stance is one of the process: interleaved threads must not hand each other's to the next test."""
    from torch._dynamo import eval_frame

    before, inside = eval_frame._stance.stance, []
    entered, left = ([threading.Event() for _ in range(4)] for _ in range(2))

    def main(turn: int) -> None:
        """Threads enter one after the other, and once all are inside they leave in the same order."""
        assert turn == 0 or entered[turn - 1].wait(100)
        with MaxLogits().collecting():
            inside.append(eval_frame._stance.stance)
            entered[turn].set()
            assert entered[-1].wait(100)
            assert turn == 0 or left[turn - 1].wait(100)
        left[turn].set()

    threads = [threading.Thread(target=main, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(event.is_set() for event in left)
    assert inside == ["force_eager"] * 4
    assert eval_frame._stance.stance == before
