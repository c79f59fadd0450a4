"""Numbers as int8 with one scale per block: the quantiser of what travels and of what is stored in int8.

A block is up to 128 consecutive elements of a row of a matrix: columns 0 to 127, 128 to 255, and so on, counted from the first
column of the whole matrix (its last dim, as stored). The last block of a row may be shorter. A tensor that holds columns
``first`` to ``first + n`` of a matrix touches ``blocks_in(n, first)`` blocks per row. If it holds whole blocks only, it gets the
bits that the whole matrix would get; who cuts a block must know the scale of the whole block.

- ``quantise(numbers, quanta, scales, first)`` writes int8 and the scales, bfloat16 of shape ``scales_shape(shape, first)``.
  They may also be given as their bytes: int8, twice as many in the last dim, at any address.
- ``dequantise(quanta, scales, out, first)`` is quanta · scale, which is exact in float32; ``out`` rounds to its dtype.
- ``round_to_int8(numbers, first)`` is both in place: what arrives after a journey in int8.
- ``scales_from(amax)`` and ``quanta_of(numbers, scales)`` are the halves of ``quantise``, for scales that are found elsewhere.

The scale is amax/127 in float32, rounded up to bfloat16: the range of float32 in 2 bytes per 128 elements (1.6 %).
A quantum is number/scale, rounded to the nearest integer, of two nearest to the even one; with random ``words``, to one of the
two neighbours so that the mean is exact. Numbers of float64 are rounded to float32 first. The ends of the range:

| block | scale | what comes back |
|---|---|---|
| zeros | 2⁻¹²⁶ | zeros; −0 becomes 0 |
| amax below 127·2⁻¹²⁶, subnormal numbers too | 2⁻¹²⁶ | the nearest multiple of 2⁻¹²⁶ |
| amax near the end of float32 | at most 2.68e36, so that 127 · scale is finite | finite; numbers beyond 127 · scale become that |
| a number is infinite or NaN | NaN | NaN in all of the block; the quanta are 0 |

Every operation rounds once (a product, a true division, rounding to an integer), so all kinds of CPU give the same bits, wherever
an element lies; so does the twin in ``list_kernels``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..device import known_to_host
from ..plan import BLOCK as BLOCK  # other rooms read both from here
from ..plan import SCALE_BYTES as SCALE_BYTES
from .rounding import RandomWords, RoundingScratch, chunks_of, noise_from

SCALE_DTYPE = torch.bfloat16

# Numbers of float32: the one nearest to 1/127, the smallest normal one, the largest scale whose 127-fold is finite.
PER_AMAX, LEAST_SCALE, MOST_SCALE = 0.007874015718698502, 2.0**-126, 2.679225179003971e36
ROUNDS = 1.5 * 2**23  # added to a number of less than 2²² in float32, leaves the nearest integer; of two, the even one


@dataclass(frozen=True, slots=True)
class Int8View:
    """Numbers, and where they are in int8: views of shapes (…, rows, cols), the scales as bytes, (…, rows, 2 · blocks)."""

    numbers: Tensor
    quanta: Tensor
    scales: Tensor
    first: int  # column of the whole matrix where they begin, modulo ``BLOCK``
    # For kernels, equal shapes (…, blocks, elements of a block): numbers, quanta, and the first byte of the scale of each.
    parts: tuple[tuple[Tensor, Tensor, Tensor], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parts = []
        for cols, blocks in parts_of(self.numbers.shape[-1], self.first):
            numbers, quanta = blocked(self.numbers[..., cols]), blocked(self.quanta[..., cols])
            scales = self.scales[..., _byte_range(blocks)][..., ::SCALE_BYTES]
            parts.append((numbers, quanta, scales.unsqueeze(-1).expand(numbers.shape)))
        object.__setattr__(self, "parts", tuple(parts))


def blocks_in(cols: int, first: int = 0) -> int:
    """How many blocks ``cols`` columns touch if column ``first`` of the matrix is the first of them."""
    return -(-(first % BLOCK + cols) // BLOCK) if cols else 0


def block_of(columns: Tensor) -> Tensor:
    """The block of each column."""
    return columns // BLOCK


def scales_shape(shape: Sequence[int], first: int = 0) -> tuple[int, ...]:
    """Shape of the scales of a tensor of ``shape``."""
    return (*shape[:-1], blocks_in(shape[-1], first))


def quantise(
    numbers: Tensor,
    quanta: Tensor,
    scales: Tensor,
    first: int = 0,
    words: RandomWords | None = None,
    scratch: RoundingScratch | None = None,
) -> None:
    """Writes ``numbers`` as ``quanta``, int8, and ``scales``, bfloat16. ``words`` are random words for stochastic rounding."""
    scratch = RoundingScratch() if scratch is None else scratch
    for cut in _cuts(numbers):
        rows, quanta_rows, scale_rows = numbers[cut], quanta[cut], scales[cut]
        noise = None if words is None else noise_from(words.cut_out(cut), rows.shape, scratch)
        for cols, blocks in parts_of(numbers.shape[-1], first):
            part = blocked(rows[..., cols])
            if part.dtype != torch.float32:
                part = scratch.take("wide", part.shape, torch.float32, part.device).copy_(part)
            ratios = scratch.take("ratios", part.shape, torch.float32, part.device)
            scale = scales_from(torch.abs(part, out=ratios).amax(-1))
            of_part = None if noise is None else blocked(noise[..., cols])
            blocked(quanta_rows[..., cols]).copy_(quanta_of(part, scale.unsqueeze(-1), of_part, ratios))
            # By its bits: what a NaN becomes in a conversion depends on the CPU.
            narrow = (scale.view(torch.int32) >> 16).to(torch.int16).view(SCALE_DTYPE)
            if scales.dtype == torch.int8:
                scale_rows[..., _byte_range(blocks)] = narrow.view(torch.int8)
            else:
                scale_rows[..., blocks] = narrow


def quanta_of(numbers: Tensor, scales: Tensor, noise: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """The quanta of float32 ``numbers``, as float32: number/scale, rounded; with ``noise``, 16 random bits each, stochastically.

    Broadcast to them, ``scales`` are those of the whole blocks, in float32.
    """
    ratios = torch.div(numbers, scales, out=out)
    if noise is None:
        ratios.add_(ROUNDS).sub_(ROUNDS)  # as ``round_``, and 20 times as fast
    else:  # a multiple of 2⁻¹⁶ and a half of it: an integer stays what it is
        ratios.add_(noise.float().add_(0.5).mul_(2.0**-16)).floor_()
    lost = torch.isnan(scales)
    if not known_to_host(lost) or lost.any():
        ratios.masked_fill_(lost, 0)  # a NaN may become any integer
    return ratios.clamp_(-127, 127)


def dequantise(quanta: Tensor, scales: Tensor, out: Tensor, first: int = 0, scratch: RoundingScratch | None = None) -> None:
    """``out`` ← quanta · scale, computed in float32 and rounded to the dtype of ``out``."""
    scratch = RoundingScratch() if scratch is None else scratch
    for cut in _cuts(quanta):
        quanta_rows, scale_rows, out_rows = quanta[cut], scales[cut], out[cut]
        for cols, blocks in parts_of(quanta.shape[-1], first):
            part, target = blocked(quanta_rows[..., cols]), blocked(out_rows[..., cols])
            numbers = target if out.dtype == torch.float32 else scratch.take("ratios", part.shape, torch.float32, part.device)
            as_bytes = scales.dtype == torch.int8  # which may begin at any address
            scale = scale_rows[..., _byte_range(blocks)].clone().view(SCALE_DTYPE) if as_bytes else scale_rows[..., blocks]
            torch.mul(part, scale.unsqueeze(-1).float(), out=numbers)
            if numbers is not target:
                target.copy_(numbers)


def quantise_views(views: Sequence[Int8View]) -> None:
    """Writes the numbers of each view, which have one dtype and device, as int8."""
    scratch = _kept_scratch(views)
    for view in views:
        quantise(view.numbers, view.quanta, view.scales, view.first, scratch=scratch)


def dequantise_views(views: Sequence[Int8View]) -> None:
    """Writes the int8 of each view as numbers, which have one dtype and device."""
    scratch = _kept_scratch(views)
    for view in views:
        dequantise(view.quanta, view.scales, view.numbers, view.first, scratch=scratch)


_of_thread = threading.local()


def _kept_scratch(views: Sequence[Int8View]) -> RoundingScratch:
    """A CPU's, which each thread keeps: new memory costs more than the work in it. On a device, streams work at the same time."""
    if not known_to_host(views[0].numbers):
        return RoundingScratch()
    if not hasattr(_of_thread, "scratch"):
        _of_thread.scratch = RoundingScratch()
    scratch: RoundingScratch = _of_thread.scratch
    return scratch


def round_to_int8(numbers: Tensor, first: int = 0, words: RandomWords | None = None) -> None:
    """Replaces ``numbers`` by what comes back from int8."""
    scratch = RoundingScratch()
    quanta = torch.empty(numbers.shape, dtype=torch.int8, device=numbers.device)
    scales = torch.empty(scales_shape(numbers.shape, first), dtype=SCALE_DTYPE, device=numbers.device)
    quantise(numbers, quanta, scales, first, words, scratch)
    dequantise(quanta, scales, numbers, first, scratch)


def _byte_range(blocks: slice) -> slice:
    return slice(SCALE_BYTES * blocks.start, SCALE_BYTES * blocks.stop)


def scales_from(amax: Tensor) -> Tensor:
    """The scale of each block, as float32 numbers of bfloat16, from its largest magnitude."""
    scale = (amax * PER_AMAX).clamp_(LEAST_SCALE, MOST_SCALE)
    scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-(1 << 16))  # up to the next number of bfloat16
    return scale.masked_fill_(~torch.isfinite(amax), math.nan)


def _cuts(tensor: Tensor) -> Iterator[tuple[slice, ...]]:
    """Whole rows, as many at a time as a cache holds; four times the usual chunk, since the work has many small parts."""
    return chunks_of(tensor.shape[:-1], tensor.device, unit=-(-tensor.shape[-1] // 4)) if tensor.numel() else iter(())


def parts_of(cols: int, first: int) -> Iterator[tuple[slice, slice]]:
    """Columns in blocks of equal length, and the numbers of these blocks: the cut first one, whole ones, a short last one."""
    start, block = 0, 0
    head = min(cols, -first % BLOCK)
    for length in (head, (cols - head) // BLOCK * BLOCK, (cols - head) % BLOCK):
        if length:
            count = max(1, length // BLOCK)
            yield slice(start, start + length), slice(block, block + count)
            start, block = start + length, block + count


def blocked(part: Tensor) -> Tensor:
    """A view of columns from ``parts_of``: (…, blocks, elements of a block)."""
    return torch.unflatten(part, -1, (max(1, part.shape[-1] // BLOCK), -1))
