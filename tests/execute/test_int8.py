"""The quantiser: blocks of 128 elements of a row, a scale of bfloat16 each, the same bits wherever a block lies."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshmuon.execute import int8
from meshmuon.execute.elementwise import Elementwise
from meshmuon.execute.int8 import Int8Blocks, blocks_in, dequantise, quantise, round_to_int8, scales_shape
from meshmuon.plan import BLOCK

TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def in_int8(quanta: Tensor, scales: Tensor, first: int = 0) -> Int8Blocks:
    return Int8Blocks(quanta, scales.view(torch.int8), first)


def quantised(numbers: Tensor) -> tuple[Tensor, Tensor]:
    quanta = torch.empty(numbers.shape, dtype=torch.int8)
    scales = torch.empty(scales_shape(numbers.shape), dtype=torch.bfloat16)
    quantise([numbers], [in_int8(quanta, scales)])
    return quanta, scales


def restored(numbers: Tensor) -> Tensor:
    out = torch.empty(numbers.shape)
    dequantise([in_int8(*quantised(numbers))], [out])
    return out


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def scale_of(amax: float) -> Fraction:
    """The smallest number of bfloat16 from ``amax`` / 127 in float32 on, by search."""
    least = (torch.tensor(amax) / torch.tensor(127.0)).item()
    bits = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    return Fraction(bits[bits.float() >= least * (1 - 2**-24)][0].item())


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_scales_and_quanta_are_those_of_exact_arithmetic(size: float) -> None:
    numbers = seeded(3, 300) * size
    quanta, scales = quantised(numbers)
    for row in range(3):
        for block in range(3):
            of_block = numbers[row, block * BLOCK : (block + 1) * BLOCK]
            scale = scale_of(of_block.abs().max().item())
            assert Fraction(scales[row, block].item()) == scale
            exact = [round(Fraction(number) / scale) for number in of_block.tolist()]  # of two nearest, the even one
            assert quanta[row, block * BLOCK : (block + 1) * BLOCK].tolist() == exact
    assert torch.equal(restored(numbers), quanta.float() * scales.float().repeat_interleave(BLOCK, 1)[:, :300])


def test_halves_go_to_the_even_integer() -> None:
    halves = torch.arange(-127, 128, dtype=torch.float32)[:BLOCK] + 0.5
    halves[0] = -127.0  # the scale is 1
    assert torch.equal(restored(halves[None])[0], halves.round())


@given(cols=st.integers(1, 400), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_tensor_of_whole_blocks_gets_the_bits_of_the_matrix(cols: int, data: st.DataObject) -> None:
    numbers = seeded(4, cols)
    quanta, scales = quantised(numbers)
    starts = list(range(0, cols, BLOCK))
    start = data.draw(st.sampled_from(starts))
    stop = min(cols, start + BLOCK * data.draw(st.integers(1, 4)))
    part, part_scales = quantised(numbers[1:3, start:stop].t().contiguous().t())
    assert torch.equal(part, quanta[1:3, start:stop])
    assert torch.equal(part_scales, scales[1:3, start // BLOCK : start // BLOCK + blocks_in(stop - start)])


@given(cols=st.integers(1, 400), data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_cut_is_restored_and_written_with_the_scales_of_the_blocks_it_touches(
    cols: int, data: st.DataObject
) -> None:
    numbers = seeded(3, cols)
    quanta, scales = quantised(numbers)
    first = data.draw(st.integers(0, cols - 1))
    stop = data.draw(st.integers(first + 1, cols))
    touched = scales[:, first // BLOCK :][:, : blocks_in(stop - first, first)]
    out = torch.empty(3, stop - first)
    dequantise([in_int8(quanta[:, first:stop], touched, first % BLOCK)], [out])
    assert torch.equal(out, restored(numbers)[:, first:stop])
    whole = numbers[:, first // BLOCK * BLOCK : -(-stop // BLOCK) * BLOCK]
    part, scales_of_part = torch.empty(3, stop - first, dtype=torch.int8), torch.empty_like(touched)
    quantise([whole], [in_int8(part, scales_of_part, first % BLOCK)])
    assert torch.equal(part, quanta[:, first:stop])
    assert torch.equal(scales_of_part, touched)
    assert blocks_in(stop - first, first) == (stop - 1) // BLOCK - first // BLOCK + 1


def test_company_and_chunks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [seeded(2, 5, 200), seeded(7, 128), seeded(3, 40, 300), seeded(1, 1)]
    alone = [quantised(tensor) for tensor in tensors]
    for at_once in (1, 300, 10**6):
        monkeypatch.setattr(int8, "_AT_ONCE", at_once)
        beside = [tuple(torch.empty_like(part) for part in parts) for parts in alone]
        quantise(tensors, [in_int8(*parts) for parts in beside])
        assert all(map(torch.equal, sum(beside, ()), sum(alone, ())))
        out = [torch.empty_like(tensor) for tensor in tensors]
        dequantise([in_int8(*parts) for parts in alone], out)
        assert all(map(torch.equal, out, map(restored, tensors)))


def test_zeros_and_tiny_numbers() -> None:
    numbers = torch.zeros(4, BLOCK)
    numbers[1, :4] = torch.tensor([TINY, -TINY, TINY / 4, 0.75 * TINY])  # two of them are subnormal
    numbers[2, :3] = torch.tensor([100.4 * TINY, 2.0**-149, -0.0])
    numbers[3, :2] = torch.tensor([1e-30, 1e-40])
    out = restored(numbers)
    assert quantised(numbers)[1].float()[:3].flatten().tolist() == [TINY] * 3
    assert not out[0].any()
    assert not out[2, 2:].signbit().any()
    assert (out[1, :4] / TINY).tolist() == [1, -1, 0, 1]
    assert (out[2, :3] / TINY).tolist() == [100, 0, 0]
    assert out[3, 0].item() == pytest.approx(1e-30, rel=0.005)
    assert out[3, 1] == 0


def test_huge_numbers_stay_finite() -> None:
    numbers = torch.tensor([[HUGE, -HUGE, HUGE / 2, 1.0] * 32])
    out = restored(numbers)
    assert out.isfinite().all()
    assert out[0, :3].tolist() == pytest.approx([HUGE, -HUGE, HUGE / 2], rel=0.008)


@pytest.mark.parametrize("flaw", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_comes_back_as_nan(flaw: float) -> None:
    numbers = seeded(3, 3 * BLOCK)
    clean = restored(numbers)
    numbers[1, BLOCK + 5] = flaw
    quanta, scales = quantised(numbers)
    out = restored(numbers)
    assert scales[1, 1].view(torch.int16) == 0x7FC0
    assert out[1, BLOCK : 2 * BLOCK].isnan().all()
    assert not quanta[1, BLOCK : 2 * BLOCK].any()
    out[1, BLOCK : 2 * BLOCK] = clean[1, BLOCK : 2 * BLOCK]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_read_as_float32_and_rounded_once(dtype: torch.dtype) -> None:
    numbers = seeded(4, 200).to(dtype)
    expected = restored(numbers.float())
    round_to_int8(numbers)
    assert torch.equal(numbers, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_updates_are_restored_in_the_dtype_in_which_weights_are_formed(dtype: torch.dtype) -> None:
    """One of float32 would be rounded once more when it is multiplied with a rate on a device, beside weights of
    float64.
    """
    (numbers,) = Elementwise().numbers([in_int8(*quantised(seeded(4, 6)))], [torch.empty(4, 2, 3, dtype=dtype)], None)
    assert numbers.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(numbers.flatten(1).float(), restored(seeded(4, 6)))


def test_the_error_is_that_of_half_a_step() -> None:
    numbers = seeded(64, 1024)
    steps = numbers.abs().view(64, -1, BLOCK).amax(-1, keepdim=True) / 127 * (1 + 2**-7)
    assert ((restored(numbers) - numbers).abs().view(64, -1, BLOCK) <= steps / 2).all()


def polar_factor(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def with_spectrum(values: Tensor, cols: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    sides = (torch.randn(size, len(values), generator=generator, dtype=torch.float64) for size in (len(values), cols))
    left, right = (torch.linalg.qr(side)[0] for side in sides)
    return (left * values) @ right.T


SPECTRA = {
    "flat": (torch.ones(256), 0.0075),
    "log-spaced from 1e-2": (torch.logspace(0, -2, 256), 0.07),
    "spiked": (torch.cat([torch.ones(8), torch.full((248,), 0.02)]), 0.06),
    "1/k": (1 / torch.arange(1, 257), 0.08),
    "log-spaced from 1e-3": (torch.logspace(0, -3, 256), 0.37),
}
"""Singular values, and how far the polar factor of the rounded matrix may be from that of the matrix, relative to
its norm.
"""


@pytest.mark.parametrize("name", SPECTRA)
def test_error_of_the_orthogonalised_result(name: str) -> None:
    """In float64, so that it is the same everywhere. Power-of-two scales, or 7 bits, would exceed the bounds."""
    values, bound = SPECTRA[name]
    matrix = with_spectrum(values.double(), 512)
    exact = polar_factor(matrix)
    error = float((polar_factor(restored(matrix).double()) - exact).norm() / exact.norm())
    assert bound / 3 < error < bound
    returned = float((restored(exact).double() - exact).norm() / exact.norm())
    assert 0.004 < returned < 0.0075
