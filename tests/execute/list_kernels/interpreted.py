"""Properties of the list kernels in Triton's interpreter. Run by ``test_list_kernels``, in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshmuon.execute import elementwise, rounding
from meshmuon.execute.list_kernels import ListKernels

SPECIAL = (
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1e-40,
    -1e-38,
    3e38,
    1.00390625,
    1.01171875,
)  # the last two are ties in bfloat16
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
slow = settings(max_examples=10, deadline=None)


@pytest.fixture(autouse=True)
def products_and_sums_round_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the kernels; on most CPUs torch's ``add`` with ``alpha`` rounds once."""
    monkeypatch.setattr(elementwise, "adds_uniformly", lambda *dtypes: False)


class Lists:
    """Lists of tensors of the same random shapes, each a view with random strides of memory that it does not fill."""

    def __init__(self, draw: Callable[..., object], seed: int, special: bool = True) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._special = special
        sizes = st.lists(st.sampled_from([1, 2, 3, 5, 8, 16, 40]), min_size=1, max_size=4).filter(
            lambda shape: math.prod(shape) < 6000
        )
        self.shapes: list[list[int]] = draw(st.lists(sizes, min_size=1, max_size=4))  # type: ignore[assignment]
        if draw(st.booleans()):
            self.shapes.append([3000])
        if draw(st.booleans()):
            self.shapes.insert(0, [4, 0])
        self._draw = draw
        self._memory: list[tuple[Tensor, Tensor, Tensor]] = []  # views, what they are views of, and a copy of that

    def make(self, dtype: torch.dtype) -> list[Tensor]:
        return [self._view(shape, dtype) for shape in self.shapes]

    def _view(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        draw = self._draw
        order: list[int] = draw(st.permutations(range(len(shape))))  # type: ignore[assignment]
        gaps: list[int] = draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))  # type: ignore[assignment]
        padded = [shape[dim] + gap for dim, gap in zip(order, gaps, strict=True)]
        base = torch.randn(padded, generator=self._generator)
        if self._special:
            at = torch.randint(0, max(base.numel(), 1), (min(len(SPECIAL), base.numel()),), generator=self._generator)
            base.view(-1)[at] = torch.tensor(SPECIAL[: len(at)])
        base = base.to(dtype)
        view = base[tuple(slice(0, shape[dim]) for dim in order)].permute(
            [order.index(dim) for dim in range(len(shape))]
        )
        assert list(view.shape) == list(shape)
        self._memory.append((view, base, base.clone()))
        return view

    def rest_is_untouched(self) -> None:
        for view, base, before in self._memory:
            view.zero_()
            before.as_strided(view.shape, view.stride(), view.storage_offset()).zero_()
            assert same(base, before)


def same(a: Tensor, b: Tensor) -> bool:
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    nan = a.isnan() & b.isnan()
    return bool(((a.contiguous().view(bits) == b.contiguous().view(bits)) | nan).all())


def all_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(same(a, b) for a, b in zip(left, right, strict=True))


def scalars(value: float) -> st.SearchStrategy[float | Tensor]:
    return st.sampled_from([value, torch.tensor(value)])


@slow
@given(st.data(), st.sampled_from(FLOATS), st.sampled_from(FLOATS), scalars(0.95), st.sampled_from([None, 0.9]))
def test_momentum_and_look_ahead_have_the_bits_of_the_twin(
    data: st.DataObject, dtype: torch.dtype, wire: torch.dtype, retain: float | Tensor, momentum: float | None
) -> None:
    lists = Lists(data.draw, data.draw(st.integers(0, 99)))
    grads, momenta, views = lists.make(dtype), lists.make(torch.float32), lists.make(wire)
    expected, wide = [buffer.clone() for buffer in momenta], [torch.empty(view.shape) for view in views]
    elementwise.fill_with_momentum(wide, grads, expected, retain, momentum)
    ListKernels().fill(views, grads, momenta, retain, momentum)
    assert all_same(momenta, expected)
    assert all_same(views, [view.to(wire) for view in wide])
    lists.rest_is_untouched()


@slow
@given(st.data(), st.sampled_from(FLOATS), scalars(0.95))
def test_momentum_alone(data: st.DataObject, dtype: torch.dtype, retain: float | Tensor) -> None:
    lists = Lists(data.draw, data.draw(st.integers(0, 99)))
    grads, momenta = lists.make(dtype), lists.make(torch.float32)
    expected = [buffer.clone() for buffer in momenta]
    elementwise.accumulate(expected, grads, retain)
    ListKernels().fill(None, grads, momenta, retain, 0.9)
    assert all_same(momenta, expected)
    lists.rest_is_untouched()


@slow
@given(st.data())
def test_momentum_of_16_bits_is_rounded_once_and_looked_ahead_from_as_stored(data: st.DataObject) -> None:
    lists = Lists(data.draw, 0, special=False)
    grads, momenta, views = lists.make(torch.bfloat16), lists.make(torch.bfloat16), lists.make(torch.float32)
    stored = [(buffer.float() * 0.95 + grad.float()).bfloat16() for buffer, grad in zip(momenta, grads, strict=True)]
    ahead = [buffer.float() * 0.9 + grad.float() for buffer, grad in zip(stored, grads, strict=True)]
    ListKernels().fill(views, grads, momenta, 0.95, 0.9)
    assert all_same(momenta, stored)
    assert all_same(views, ahead)


@slow
@given(
    st.data(),
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
    scalars(0.998),
    scalars(0.03),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, *FLOATS]),
)
def test_weights_have_the_bits_of_the_twin(
    data: st.DataObject,
    dtype: torch.dtype,
    wire: torch.dtype,
    decay: float | Tensor,
    rate: float | Tensor,
    cautious: bool,
    stochastic: bool,
    guarded: torch.dtype | None,
) -> None:
    """Also guarded: where an update is not finite, weight and momentum are what they were."""
    lists = Lists(data.draw, data.draw(st.integers(0, 99)))
    params, updates = lists.make(dtype), lists.make(wire)
    counters = None
    if stochastic and dtype == torch.bfloat16:
        counters = [(torch.tensor([7 - 3 * k, 3 + k]), elements_of(param)) for k, param in enumerate(params)]
    expected, wide = [param.clone() for param in params], [update.clone().float() for update in updates]
    momenta, before = (lists.make(guarded), lists.make(guarded)) if guarded else ([], [])
    restored = [momentum.clone() for momentum in momenta]
    kept, twin_kept = ((momenta, before), elementwise.OldMomenta(restored, before)) if guarded else (None, None)
    twin = elementwise.Elementwise()
    twin.apply(expected, wide, decay, rate, cautious=cautious, counters=counters, old_momenta=twin_kept)
    hashed = None if counters is None else [(elements.rows, elements.cols, counter) for counter, elements in counters]
    ListKernels().apply(params, updates, decay, rate, cautious=cautious, counters=hashed, old_momenta=kept)
    assert all_same(params, expected)
    assert all_same(momenta, restored)
    lists.rest_is_untouched()


def elements_of(param: Tensor) -> rounding.Elements:
    held = [((0, size),) for size in param.shape]
    return rounding.elements_held(param.shape, held, param.device).hashed()


def test_a_rate_of_zero_changes_no_bit() -> None:
    params = [torch.tensor([-0.0, 0.0, 1.5, -2.0]), torch.randn(3, 5)]
    before = [param.clone() for param in params]
    ListKernels().apply(params, [torch.ones(4), torch.randn(3, 5)], 1.0, 0.0, cautious=False, counters=None)
    assert all_same(params, before)


@slow
@given(st.data(), st.sampled_from(FLOATS), st.sampled_from(FLOATS))
def test_copies_round_as_torch_does(data: st.DataObject, target: torch.dtype, source: torch.dtype) -> None:
    lists = Lists(data.draw, data.draw(st.integers(0, 99)))
    targets, sources = lists.make(target), lists.make(source)
    ListKernels().copy(targets, sources)
    assert all_same(targets, [tensor.to(target) for tensor in sources])
    lists.rest_is_untouched()


@slow
@given(st.data(), st.sampled_from(FLOATS), st.sampled_from([None, math.inf, -math.inf, math.nan]))
def test_one_element_that_is_not_finite_is_found(data: st.DataObject, dtype: torch.dtype, bad: float | None) -> None:
    lists = Lists(data.draw, 0, special=False)
    tensors, flag = lists.make(dtype), torch.zeros(1)
    filled = [tensor for tensor in tensors if tensor.numel()]
    if bad is not None:
        chosen = data.draw(st.sampled_from(range(len(filled))))
        index = data.draw(st.integers(0, filled[chosen].numel() - 1))
        filled[chosen][tuple(torch.unravel_index(torch.tensor(index), filled[chosen].shape))] = bad
    ListKernels().mark_nonfinite(tensors, flag)
    assert flag.item() == (0.0 if bad is None else 1.0)


@slow
@given(st.data(), st.sampled_from(FLOATS), st.booleans())
def test_what_is_filled_is_filled_only_if_asked(data: st.DataObject, dtype: torch.dtype, filled: bool) -> None:
    lists = Lists(data.draw, 0)
    tensors = lists.make(dtype)
    expected = [torch.full_like(tensor, -0.0) if filled else tensor.clone() for tensor in tensors]
    ListKernels().fill_if(tensors, torch.tensor(filled), -0.0)
    assert all_same(tensors, expected)
    lists.rest_is_untouched()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matrices_are_filled_one_by_one(dtype: torch.dtype) -> None:
    """A mask is broadcast, and NaN is not 0."""
    stacked = torch.randn(3, 5, 24).to(dtype)[..., :20]
    expected = torch.stack([stacked[0], torch.full((5, 20), math.nan, dtype=dtype), stacked[2]])
    ListKernels().fill_if([stacked], torch.tensor([0.0, math.nan, 0.0])[:, None, None], math.nan)
    assert same(stacked, expected)


@settings(max_examples=4, deadline=None)
@given(st.data(), st.sampled_from(FLOATS), st.booleans(), st.booleans())
def test_what_is_only_compiled_changes_nothing(
    data: st.DataObject, dtype: torch.dtype, in_memory: bool, stochastic: bool
) -> None:
    """All kernels run, over a table without elements."""
    lists = Lists(data.draw, 0)
    kernels, tensors = ListKernels(), [lists.make(dtype) for _ in range(4)]
    before = [[tensor.clone() for tensor in of_list] for of_list in tensors]
    params, updates, momenta, kept = tensors
    number: float | Tensor = torch.tensor(0.5) if in_memory else 0.5
    hashed = [(of.rows, of.cols, torch.tensor([7, 3])) for of in map(elements_of, params)] if stochastic else None
    flag = torch.zeros(1)
    entered: list[int] = []

    @contextmanager
    def surrounding() -> Iterator[None]:
        entered.append(1)
        yield

    kernels.only_compiles = surrounding
    kernels.fill(None, updates, momenta, number, 0.9)
    kernels.fill(params, updates, momenta, number, 0.9)
    kernels.apply(params, updates, number, number, cautious=True, counters=hashed, old_momenta=(momenta, kept))
    kernels.copy(params, updates)
    kernels.fill_if(params, torch.tensor(True), 7.0)
    kernels.mark_nonfinite(params, flag)
    assert len(entered) == 6
    assert not bool(flag)
    assert all(all_same(now, old) for now, old in zip(tensors, before, strict=True))


def test_tables_are_kept_and_follow_the_tensors() -> None:
    kernels = ListKernels()
    targets, sources = [torch.zeros(4, 6), torch.zeros(9)], [torch.randn(4, 6), torch.randn(9)]
    kernels.copy(targets, sources)
    tables = list(kernels._tables.values())
    kernels.copy(targets, sources)
    assert list(kernels._tables.values()) == tables
    others = [torch.randn(4, 6), torch.randn(9)]
    kernels.copy(targets, others)
    assert all_same(targets, others)
    assert len(kernels._tables) == 2
    kernels.copy(targets, sources)
    assert all_same(targets, sources)
    assert len(kernels._tables) == 2


def test_the_number_of_tables_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ListKernels, "MOST_TABLES", 3)
    kernels, kept = ListKernels(), [torch.randn(5) for _ in range(6)]
    for tensor in kept:
        kernels.copy([torch.zeros(5)], [tensor])
    assert len(kernels._tables) == 3


def test_lists_of_the_same_tensors_in_other_roles_have_tables_of_their_own() -> None:
    kernels, a, b = ListKernels(), torch.zeros(5), torch.ones(5)
    kernels.fill_if([a, b], torch.tensor(False), 7.0)
    kernels.copy([a], [b])
    assert torch.equal(a, torch.ones(5))


def test_tables_are_made_in_host_memory_whatever_the_default_device() -> None:
    table_of, a, b = ListKernels()._table, torch.zeros(5), torch.ones(5)
    with torch.device("meta"):
        table = table_of([a], [b])
    assert table.numbers.device.type == "cpu"
