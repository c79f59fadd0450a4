"""Passes in portions, in stacks of small tensors and in one operation: the bits of plain operations on whole tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshmuon.execute import elementwise, one_pass, portions
from meshmuon.execute.elementwise import accumulate, adds_alike, apply, fill_with_momentum, look_ahead
from meshmuon.execute.one_pass import LARGE, VECTOR_MULTIPLE
from meshmuon.execute.portions import cuts_within, portions_of_lists, portions_of_tensors
from meshmuon.execute.small_stack import SmallStacks, small_kind, stacked_view
from meshmuon.ortho import Workspace
from tests.support.hostile import HostileArithmetic, fresh_trials, misplaced
from tests.support.reference import assert_same_bits

RETAIN, MOMENTUM, DECAY, RATE = 0.95, 0.9, 0.9987, 0.0123


@pytest.fixture(params=[1, 2, 3], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_lists_are_cut_by_elements() -> None:
    tensors = [torch.zeros(size) for size in (3, 4, 9, 2, 0, 8, 1)]
    doubled = [torch.zeros(2, tensor.numel()) for tensor in tensors]
    pairs = list(portions_of_lists(tensors, doubled, limit=8))
    assert [[tensor.numel() for tensor in portion] for portion, _ in pairs] == [[3, 4], [9], [2, 0], [8], [1]]
    assert [tensor for _, portion in pairs for tensor in portion] == doubled
    assert list(portions_of_lists([], limit=8)) == []


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(7,), (5, 9), (3, 4, 5), (1, 40), (64,), (2, 3, 2, 7)], ids=str)
@pytest.mark.parametrize("limit", [1, 4, 10, 64])
def test_parts_cover_a_tensor_once(shape: tuple[int, ...], limit: int, turned: bool) -> None:
    counts, other = torch.zeros(shape), torch.zeros(shape)
    if turned:  # memory in another order, as the window of a fused weight or a strided shard has it
        counts, other = torch.zeros(shape[::-1]).permute(*range(len(shape))[::-1]), torch.zeros(*shape, 2)[..., 1]
    for part, other_part in zip(*portions_of_tensors(counts, other, limit=limit), strict=True):
        assert 0 < part.numel() <= limit
        assert part.shape == other_part.shape
        part += 1
        other_part += 1
    assert counts.eq(1).all()
    assert other.eq(1).all()
    assert sum(torch.zeros(shape)[cut].numel() for cut in cuts_within(shape, limit)) == counts.numel()


SIZES = (1, 63, 64, 65, 1000, 4099, 20_011)
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("momentum", [MOMENTUM, None])
@pytest.mark.parametrize(("grad_dtype", "buffer_dtype"), DTYPES)
def test_momentum_in_portions(
    monkeypatch: pytest.MonkeyPatch,
    grad_dtype: torch.dtype,
    buffer_dtype: torch.dtype,
    momentum: float | None,
    hostile: bool,
    threads: int,
) -> None:
    """Odd sizes at odd addresses, more than one portion of some of them."""
    monkeypatch.setattr(portions, "PORTION", 1024)
    wide = torch.float64 if grad_dtype == torch.float64 else torch.float32
    grads = [misplaced(random(size, seed=size, dtype=grad_dtype), size % 5) for size in SIZES]
    start = [misplaced(random(size, seed=size + 1, dtype=buffer_dtype), size % 3) for size in SIZES]
    with fresh_trials(), HostileArithmetic() if hostile else Operations():
        whole, buffers = [buffer.clone() for buffer in start], [misplaced(buffer, 1) for buffer in start]
        wanted, views = ([torch.zeros(size, dtype=wide) for size in SIZES] for _ in range(2))
        accumulate(whole, grads, RETAIN)
        if momentum is None:
            torch._foreach_copy_(wanted, whole)
        else:
            look_ahead(wanted, grads, whole, momentum)
        fill_with_momentum(views, grads, buffers, RETAIN, momentum)
    assert_same_bits(buffers, whole)
    assert_same_bits(views, wanted)


def test_momentum_of_tensors_with_gaps(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(portions, "PORTION", 500)
    grad, start = random(67, 41, seed=1), random(67, 41, seed=2)
    whole, wanted = start.clone(), torch.zeros(67, 41)
    accumulate([whole], [grad], RETAIN)
    look_ahead([wanted], [grad], [whole], MOMENTUM)
    buffer, view = torch.zeros(67, 50)[:, 3:44].copy_(start), torch.zeros(41, 67).T
    fill_with_momentum([view], [grad], [buffer], RETAIN, MOMENTUM)
    assert_same_bits([buffer, view], [whole, wanted])


def stacks_for(views: list[Tensor]) -> SmallStacks:
    return SmallStacks(views, Workspace())


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_small_tensors_in_stacks(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, gaps: bool, hostile: bool, threads: int
) -> None:
    """Momentum, look-ahead and update of (5, 7) tensors, ten in a stack, the last of which is not full."""
    monkeypatch.setattr("meshmuon.execute.small_stack.PORTION", 350)
    count, shape = 23, (5, 7)
    grads, start, weights = ([random(*shape, seed=3 * k + n, dtype=dtype) for k in range(count)] for n in range(3))
    memory = torch.zeros(count, 5 + gaps, 7, dtype=dtype)
    views = [memory[k, :5] for k in range(count)]
    stacks = stacks_for(views)
    assert (stacks.capacity, stacks.views(0, count) is None) == (10, gaps)
    with fresh_trials(), HostileArithmetic() if hostile else Operations():
        whole, buffers = ([buffer.clone() for buffer in start] for _ in range(2))
        wanted = [torch.zeros(shape, dtype=dtype) for _ in views]
        params, wanted_params = ([weight.clone() for weight in weights] for _ in range(2))
        accumulate(whole, grads, RETAIN)
        look_ahead(wanted, grads, whole, MOMENTUM)
        fill_with_momentum(views, grads, buffers, RETAIN, MOMENTUM, stacks=stacks)
        assert_same_bits(buffers, whole)
        assert_same_bits(views, wanted)
        apply(wanted_params, wanted, DECAY, RATE)
        apply(params, views, DECAY, RATE, stacks=stacks)
    assert_same_bits(params, wanted_params)


@pytest.mark.parametrize("idle", [(), (0,), (3, 4, 17)], ids=str)
def test_stacks_of_those_that_are_not_idle(idle: tuple[int, ...]) -> None:
    grads, start = ([random(4, 4, seed=2 * k + n) for k in range(20)] for n in range(2))
    memory = torch.zeros(20, 4, 4)
    views, active = list(memory), [k for k in range(20) if k not in idle]
    stacks = stacks_for(views).for_other_views() if idle else stacks_for(views)

    def of_active(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[k] for k in active]

    buffers = [buffer.clone() for buffer in start]
    fill_with_momentum(of_active(views), of_active(grads), of_active(buffers), RETAIN, MOMENTUM, stacks=stacks)
    for k in range(20):
        stepped = start[k].clone()
        accumulate([stepped], [grads[k]], RETAIN)
        assert torch.equal(buffers[k], start[k] if k in idle else stepped)
        assert torch.equal(views[k], torch.zeros(4, 4) if k in idle else torch.add(grads[k], stepped, alpha=MOMENTUM))


def test_stacks_of_other_dtypes_are_not_used() -> None:
    """A gradient of 16 bits is added in two operations, as without stacks."""
    grads = [random(4, 4, seed=k, dtype=torch.bfloat16 if k % 2 else torch.float32) for k in range(20)]
    start, views = [random(4, 4, seed=k + 50) for k in range(20)], list(torch.zeros(20, 4, 4))
    whole, buffers = ([buffer.clone() for buffer in start] for _ in range(2))
    accumulate(whole, grads, RETAIN)
    fill_with_momentum(views, grads, buffers, RETAIN, None, stacks=stacks_for(views))
    assert_same_bits(buffers, whole)
    assert_same_bits(views, whole)


def test_stacks_take_few_operations() -> None:
    grads, buffers, params = ([random(8, 8, seed=3 * k + n) for k in range(200)] for n in range(3))
    views = list(torch.zeros(200, 8, 8))
    stacks = stacks_for(views)
    for _ in range(2):  # the first time takes memory and tries what the machine does
        with Operations() as operations:
            fill_with_momentum(views, grads, buffers, RETAIN, MOMENTUM, stacks=stacks)
            apply(params, views, DECAY, RATE, stacks=stacks)
    assert sum(operations.count.values()) < 20


def test_what_is_small_and_what_follows_in_memory() -> None:
    assert small_kind(torch.zeros(32, 32)) == small_kind(torch.ones(32, 32)) != small_kind(torch.zeros(16, 64))
    assert small_kind(torch.zeros(32, 33)) is small_kind(torch.zeros(0, 4)) is None
    memory = torch.arange(48.0).view(4, 3, 4)
    stacked = stacked_view([memory[1], memory[2]])
    assert stacked is not None
    assert torch.equal(stacked, memory[1:3])
    assert stacked_view([memory[0], memory[2]]) is None
    assert stacked_view([memory[1], memory[0]]) is None
    assert stacked_view([memory[0].T, memory[1].T]) is None
    assert stacked_view([memory[0], memory.clone()[1]]) is None


def updated(start: Tensor, update: Tensor, decay: float = DECAY, rate: float = RATE) -> Tensor:
    """p·decay − rate·update by plain operations, in those that this machine rounds alike everywhere."""
    if adds_alike(start.dtype, update.dtype):
        return start.mul(decay).add_(update, alpha=-rate)
    return start.mul(decay).sub_(update.mul(rate).add_(0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [LARGE, LARGE + 1, LARGE + VECTOR_MULTIPLE - 1, 3 * LARGE + 17, 300_007])
def test_large_weights_in_one_pass(size: int, dtype: torch.dtype, threads: int) -> None:
    start, update = misplaced(random(size, seed=1, dtype=dtype), 3), misplaced(random(size, seed=2, dtype=dtype), 5)
    one_pass_expected = adds_alike(dtype, dtype) and one_pass.rounds_alike(dtype) and threads == 1
    param, wanted = misplaced(start, 1), updated(start, update)
    with Operations() as operations:
        apply([param], [update], DECAY, RATE)
    assert torch.equal(param, wanted)
    assert operations.count["addr_"] == one_pass_expected


@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_one_pass_keeps_what_is_not_finite_and_the_sign_of_zeros(decay: float) -> None:
    start, update = random(LARGE, seed=1), torch.zeros(LARGE)
    start[:4] = torch.tensor([torch.nan, torch.inf, -0.0, 0.0])
    update[4:6] = torch.tensor([torch.nan, -torch.inf])
    for rate in (RATE, -RATE, 0.0):
        param = start.clone()
        apply([param], [update.clone()], decay, rate)
        wanted = updated(start, update, decay, rate)
        assert torch.equal(param.view(torch.int32), wanted.view(torch.int32))


def test_two_passes_where_one_rounds_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "rounds_alike", lambda dtype: False)
    monkeypatch.setattr(portions, "PORTION", 10_000)
    start, update = random(LARGE + 5, seed=1), random(LARGE + 5, seed=2)
    param, wanted = start.clone(), updated(start, update)
    with Operations() as operations:
        apply([param], [update], DECAY, RATE)
    assert torch.equal(param, wanted)
    assert operations.count["addr_"] == 0
    assert operations.count["mul_"] == -(-(LARGE + 5) // (10_000 * torch.get_num_threads()))  # one per portion


def test_weights_with_gaps_take_two_passes() -> None:
    start, update = random(300, 200, seed=1), random(300, 200, seed=2)
    param, wanted = torch.zeros(300, 210)[:, 5:205].copy_(start), updated(start, update)
    apply([param], [update], DECAY, RATE)
    assert torch.equal(param, wanted)


def test_a_trial_sees_a_machine_that_rounds_the_product_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(param: Tensor, update: Tensor, decay: float, minus_rate: Tensor) -> None:
        """The product with the decay is exact, which no CPU's separate operations are."""
        param.copy_(param.double().mul_(decay).add_(update * minus_rate))

    with fresh_trials():
        monkeypatch.setattr(one_pass, "_update_whole_vectors", last)
        assert not one_pass.rounds_alike(torch.float32)


def test_portions_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Momentum and look-ahead of a portion come before the momentum of the next one."""
    monkeypatch.setattr(portions, "PORTION", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(elementwise, "adds_alike", lambda *dtypes: True)
    monkeypatch.setattr(elementwise, "accumulates_once", lambda dtype: True)
    written: list[int] = []
    add = torch.add

    def noted(*args: Any, out: Tensor, **options: Any) -> Tensor:
        written.append(out.data_ptr())
        return add(*args, out=out, **options)

    monkeypatch.setattr(elementwise.torch, "add", noted)
    view, grad, buffer = torch.zeros(250), torch.ones(250), torch.zeros(250)
    fill_with_momentum([view], [grad], [buffer], RETAIN, MOMENTUM)
    parts = [(4 * start + buffer.data_ptr(), 4 * start + view.data_ptr()) for start in (0, 84, 168)]
    assert written == [address for pair in parts for address in pair]


def test_the_default_device_does_not_matter() -> None:
    starts, updates = [random(size, seed=size) for size in (3, LARGE + 3)], [random(size, seed=-size) for size in (3, LARGE + 3)]
    wanted, params = list(map(updated, starts, updates)), [start.clone() for start in starts]
    with fresh_trials(), torch.device("meta"):
        apply(params, updates, DECAY, RATE)
    assert_same_bits(params, wanted)
