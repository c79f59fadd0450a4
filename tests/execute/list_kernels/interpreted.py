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

from meshmuon.execute import elementwise, fused_elementwise, int8, rounding
from meshmuon.execute.int8_momentum import Int8Momentum
from meshmuon.execute.list_kernels import ListKernels
from tests.support.happens_before.list_kernels import in_int8

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


class InInt8:
    """Lists of numbers in int8 whose quanta and scales begin at any byte, with the rest of the memory that they are
    views of.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], firsts: Sequence[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.blocks: list[int8.Int8Blocks] = []
        self.memory: list[Tensor] = []
        for shape, first in zip(shapes, firsts, strict=True):
            size, scales = math.prod(shape), (*shape[:-1], int8.blocks_in(shape[-1], first))
            memory = torch.randint(-127, 128, (size + 2 * math.prod(scales) + 2,), generator=generator).to(torch.int8)
            in_bytes = memory[1 + size : -1].view(*scales[:-1], 2 * scales[-1])
            in_bytes.copy_(torch.rand(scales, generator=generator).bfloat16().view(torch.int8))
            self.blocks.append(int8.Int8Blocks(memory[1 : 1 + size].view(shape), in_bytes, first))
            self.memory.append(memory)

    def momenta(self) -> list[Int8Momentum]:
        return [in_int8(of.quanta, of.scales.clone().view(torch.bfloat16)) for of in self.blocks]


def in_blocks(data: st.DataObject) -> tuple[list[tuple[int, ...]], list[int], int]:
    """Shapes that have short blocks, of one element too, and columns that begin inside of a block."""
    shapes = data.draw(
        st.lists(
            st.sampled_from([(3, 1), (2, 5, 40), (4, 128), (3, 129), (2, 2, 300), (1, 1100)]), min_size=1, max_size=3
        )
    )
    return shapes, [data.draw(st.sampled_from([0, 0, 100])) for _ in shapes], data.draw(st.integers(0, 99))


def numbers_of(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Every second tensor begins with special numbers; none is contiguous."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(*shape[:-1], shape[-1] + 3, generator=generator)[..., : shape[-1]] for shape in shapes]
    for tensor in tensors[1::2]:
        tensor[(0,) * (tensor.dim() - 1)][: len(SPECIAL)] = torch.tensor(SPECIAL)[: tensor.shape[-1]]
    return [tensor.to(dtype) for tensor in tensors]


def same_bytes(left: InInt8, right: InInt8) -> bool:
    return all(map(torch.equal, left.memory, right.memory))


@slow
@given(st.data(), st.sampled_from(FLOATS))
def test_copies_into_int8_and_out_of_it_have_the_bits_of_the_twin(data: st.DataObject, dtype: torch.dtype) -> None:
    """What begins or ends inside of a block has a source with the rest of it."""
    shapes, firsts, seed = in_blocks(data)
    ends = [(first + shape[-1]) % 128 for shape, first in zip(shapes, firsts, strict=True)]
    behind = [data.draw(st.sampled_from([0, 27])) if 0 < end <= 101 else 0 for end in ends]
    covered = [
        (*shape[:-1], first + shape[-1] + rest) for shape, first, rest in zip(shapes, firsts, behind, strict=True)
    ]
    sources, kernels, twins = (
        numbers_of(covered, dtype, seed),
        InInt8(shapes, firsts, seed),
        InInt8(shapes, firsts, seed),
    )
    ListKernels().copy(kernels.blocks, sources)
    elementwise.Elementwise().copy(twins.blocks, sources)
    assert same_bytes(kernels, twins)
    targets, expected = numbers_of(shapes, dtype, seed), [torch.empty(shape, dtype=dtype) for shape in shapes]
    ListKernels().copy(targets, kernels.blocks)
    elementwise.Elementwise().copy(expected, twins.blocks)
    assert all_same(targets, expected)


@pytest.mark.parametrize("first", [0, 64])
def test_blocks_that_begin_at_multiples_of_16_bytes(first: int) -> None:
    """They may move in vectors, but not where the first block is cut."""
    numbers, out = (
        torch.randn(2, 128 + first, generator=torch.Generator().manual_seed(0)),
        [torch.empty(2, 128) for _ in range(2)],
    )
    kernels, twin = ListKernels(), elementwise.Elementwise()
    blocks = [int8.Int8Blocks(*(torch.zeros(2, size, dtype=torch.int8) for size in (128, 16)), first) for _ in range(2)]
    blocks = [int8.Int8Blocks(of.quanta, of.scales[:, : 2 * int8.blocks_in(128, first)], first) for of in blocks]
    for each, of, into in zip((kernels, twin), blocks, out, strict=True):
        each.copy([of], [numbers])
        each.copy([into], [of])
    assert torch.equal(blocks[0].quanta, blocks[1].quanta)
    assert torch.equal(blocks[0].scales, blocks[1].scales)
    assert same(*out)


def test_a_table_is_for_blocks_that_begin_where_these_do() -> None:
    """The same memory, read with its second block from column 128 on, then from column 108 on."""
    memory, kernels = InInt8([(3, 150)], [0], 0).blocks[0], ListKernels()
    out, expected = [torch.empty(3, 150)], [torch.empty(3, 150)]
    for first in (0, 20):
        blocks = [int8.Int8Blocks(memory.quanta, memory.scales, first)]
        kernels.copy(out, blocks)
        elementwise.Elementwise().copy(expected, blocks)
        assert all_same(out, expected)


def test_momentum_in_int8_keeps_its_bits_in_a_step_that_is_skipped() -> None:
    """Its blocks have no quantum of 127, so that scales found anew would differ."""
    momentum, before = InInt8([(3, 300)], [0], 0), InInt8([(3, 300)], [0], 0)
    for of_both in (momentum, before):
        of_both.blocks[0].quanta.clamp_(-90, 90)
    ListKernels().fill(None, [torch.full((3, 300), -0.0)], momentum.blocks, torch.tensor(1.0), 0.9)
    assert same_bytes(momentum, before)


def test_new_momentum_stays_zeros_in_a_step_that_is_skipped() -> None:
    """Its scales are zeros, too: the quotients would be NaN."""
    blocks = int8.Int8Blocks(torch.zeros(3, 130, dtype=torch.int8), torch.zeros(3, 4, dtype=torch.int8))
    ListKernels().fill([view := torch.ones(3, 130)], [torch.full((3, 130), -0.0)], [blocks], torch.tensor(1.0), 0.9)
    assert not any(tensor.any() for tensor in (blocks.quanta, blocks.scales, view))


@slow
@given(st.data(), st.sampled_from(FLOATS))
def test_numbers_are_rounded_through_int8_as_by_the_twin(data: st.DataObject, dtype: torch.dtype) -> None:
    shapes, _, seed = in_blocks(data)
    numbers, expected = numbers_of(shapes, dtype, seed), [tensor.clone() for tensor in numbers_of(shapes, dtype, seed)]
    ListKernels().copy(numbers, numbers, through_int8=True)
    for tensor in expected:
        int8.round_to_int8(tensor)
    assert all_same(numbers, expected)


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


@settings(max_examples=8, deadline=None)
@given(
    st.data(),
    st.sampled_from(FLOATS),
    st.sampled_from([None, torch.int8, *FLOATS]),
    st.booleans(),
    scalars(0.95),
    st.sampled_from([None, 0.9]),
)
def test_momentum_in_int8_or_sent_in_int8_has_the_bits_of_the_twin(
    data: st.DataObject,
    dtype: torch.dtype,
    wire: torch.dtype | None,
    stored_in_int8: bool,
    retain: float | Tensor,
    momentum: float | None,
) -> None:
    """Blocks of 128 and shorter ones; zeros, what is not finite, and blocks that do not change in a step that may
    be skipped.
    """
    shapes, _, seed = in_blocks(data)
    grads = numbers_of(shapes, dtype, seed)
    if isinstance(retain, Tensor) and data.draw(st.booleans()):
        retain, grads = torch.tensor(1.0), [torch.full_like(grad, -0.0) for grad in grads]
    whole = [0] * len(shapes)
    in_kernels, in_twin, before = (InInt8(shapes, whole, seed) for _ in range(3))
    sent, sent_by_twin = (InInt8(shapes, whole, seed) for _ in range(2))
    buffers, expected = numbers_of(shapes, torch.float32, seed + 1), numbers_of(shapes, torch.float32, seed + 1)
    views = None if wire is None else [torch.empty(shape, dtype=wire) for shape in shapes]
    wide = None if wire is None else [torch.empty(shape, dtype=wire) for shape in shapes]
    momenta = in_twin.momenta()
    elementwise.Elementwise().fill(
        sent_by_twin.blocks if wire == torch.int8 else wide,
        grads,
        momenta if stored_in_int8 else expected,
        retain,
        momentum,
    )
    for of_twin, buffer in zip(in_twin.blocks, momenta, strict=True):
        of_twin.scales.copy_(buffer.scales.view(torch.int8))
    ListKernels().fill(
        sent.blocks if wire == torch.int8 else views,
        grads,
        in_kernels.blocks if stored_in_int8 else buffers,
        retain,
        momentum,
    )
    assert same_bytes(in_kernels, in_twin)
    assert same_bytes(sent, sent_by_twin)
    assert all_same(buffers, expected)
    assert wire in (None, torch.int8) or all_same(views or [], wide or [])
    if isinstance(retain, Tensor) and retain == 1:
        assert same_bytes(in_kernels, before)


@slow
@given(st.data(), st.sampled_from(FLOATS))
def test_scales_are_restored_where_updates_are_not_finite(data: st.DataObject, dtype: torch.dtype) -> None:
    lists = Lists(data.draw, data.draw(st.integers(0, 99)))
    targets, before, updates = lists.make(torch.bfloat16), lists.make(torch.bfloat16), lists.make(dtype)
    expected = [torch.where(u.isfinite(), now, old) for now, old, u in zip(targets, before, updates, strict=True)]
    ListKernels().restore(targets, before, updates)
    assert all_same(targets, expected)
    lists.rest_is_untouched()


def test_scales_are_restored_where_the_scales_of_updates_are_nan() -> None:
    scales = torch.tensor([[math.nan, 1.0], [int8.MOST_SCALE, 1.0], [1.0, 1.0], [math.nan, 1.0]]).bfloat16()
    targets, before = torch.zeros(4, 3).bfloat16(), torch.ones(4, 3).bfloat16()
    ListKernels().restore([targets], [before], [scales.view(torch.int8)[:, 1:2].expand(4, 3)])
    assert targets[:, 0].tolist() == [1, 0, 0, 1]


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


@slow
@given(st.data(), st.sampled_from(FLOATS), scalars(0.03), st.booleans(), st.booleans(), st.booleans())
def test_weights_have_the_bits_of_the_twin_with_updates_in_int8(
    data: st.DataObject, dtype: torch.dtype, rate: float | Tensor, cautious: bool, stochastic: bool, guarded: bool
) -> None:
    """Also where the columns begin inside of a block, and where a block is NaN."""
    shapes, firsts, seed = in_blocks(data)
    updates = InInt8(shapes, firsts, seed)
    updates.blocks[0].scales.view(-1)[:2] = torch.tensor([math.nan]).bfloat16().view(torch.int8)
    params, expected = numbers_of(shapes, dtype, seed), numbers_of(shapes, dtype, seed)
    momenta, restored, before = (numbers_of(shapes, torch.float32, seed + k) for k in (1, 1, 2))
    counters = None
    if stochastic and dtype == torch.bfloat16:
        counters = [(torch.tensor([7 - 3 * k, 3 + k]), elements_of(param)) for k, param in enumerate(params)]
    kept, twin_kept = ((momenta, before), elementwise.OldMomenta(restored, before)) if guarded else (None, None)
    twin = elementwise.Elementwise()
    twin.apply(expected, updates.blocks, 0.998, rate, cautious=cautious, counters=counters, old_momenta=twin_kept)
    hashed = None if counters is None else [(elements.rows, elements.cols, counter) for counter, elements in counters]
    ListKernels().apply(params, updates.blocks, 0.998, rate, cautious=cautious, counters=hashed, old_momenta=kept)
    assert all_same(params, expected)
    assert all_same(momenta, restored)


def elements_of(param: Tensor) -> rounding.Elements:
    held = [((0, size),) for size in param.shape]
    return rounding.elements_held(param.shape, held, param.device).hashed()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("guarded", [False, True])
def test_filters_are_stepped_with_updates_in_int8(
    dtype: torch.dtype, layout: torch.memory_format, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their columns are several dims, which only some views join, and random bits are for none of them joined."""
    monkeypatch.setattr(
        fused_elementwise, "_is_fused", lambda numbers: numbers.dtype in FLOATS or numbers.dtype == torch.int8
    )
    updates, shape = InInt8([(2, 150)], [100], 0), (2, 10, 3, 5)
    updates.blocks[0].scales[0, :2] = torch.tensor([0x7FC0], dtype=torch.int16).view(torch.int8)  # NaN
    params, expected = ([torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)] for _ in range(2))
    params = [param.to(memory_format=layout) for param in params]
    counters = [(torch.tensor([7, 3]), elements_of(params[0]))] if dtype == torch.bfloat16 else None
    momenta = [(param.float() + 1).contiguous() for param in params]
    kept, restored = ([momentum.clone() for momentum in momenta] for _ in range(2))
    before = [momentum * 2 for momentum in momenta]
    scales, scales_of_twin = (torch.ones(1, 2, 2).bfloat16().unbind() for _ in range(2))
    scales_before = [torch.full((2, 2), 3.0).bfloat16()]
    fused, twin = fused_elementwise.FusedElementwise(torch.device("cpu")), elementwise.Elementwise()
    for each, weights, own, now in ((fused, params, kept, scales), (twin, expected, restored, scales_of_twin)):
        old = elementwise.OldMomenta(own, before, list(now), scales_before) if guarded else None
        each.apply(weights, updates.blocks, 0.9, 0.1, counters=counters, old_momenta=old)
    assert all_same(params, expected)
    assert all_same([*kept, *scales], [*restored, *scales_of_twin])
    assert same(*(each.numbers(updates.blocks, params, None)[0] for each in (fused, twin)))


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
