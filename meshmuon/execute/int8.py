"""Numbers as int8 with one scale per block: the quantiser of what travels and of what is stored in int8.

A block is up to 128 consecutive elements of a row of a matrix: columns 0 to 127, 128 to 255, and so on, counted from
the first column of the whole matrix (its last dim, as stored). The last block of a row may be shorter. Columns
``first`` to ``first + n`` touch ``blocks_in(n, first)`` blocks per row. Whole blocks get the bits that the whole matrix
would get. Who writes a part of a block must know all of it.

- ``quantise(numbers, into)`` writes lists of numbers as quanta and scales.
- ``dequantise(of, out)`` is quanta · scale, which is exact in float32; ``out`` rounds to its dtype.
- ``round_to_int8(numbers)`` is both in place: what arrives after a journey in int8.
- ``scales_from(largest)`` and ``quanta_of(numbers, scales)`` are the halves of ``quantise``, for scales that are found
  elsewhere.

The scale is amax/127 in float32, rounded up to bfloat16: the range of float32 in 2 bytes per 128 elements (1.6 %).
A quantum is number/scale, rounded to the nearest integer, of two nearest to the even one. Numbers of float64 are
rounded to float32 first. The ends of the range:

| block | scale | what comes back |
|---|---|---|
| zeros | 2⁻¹²⁶ | zeros; −0 becomes 0 |
| amax below 127·2⁻¹²⁶, subnormal numbers too | 2⁻¹²⁶ | the nearest multiple of 2⁻¹²⁶ |
| amax near the end of float32 | at most 2.68e36, so that 127 · scale is finite | finite; numbers beyond 127 · scale become that |
| a number is infinite or NaN | NaN | NaN in all of the block; the quanta are 0 |

Every operation rounds once (a product, a true division, rounding to an integer), so all kinds of CPU give the same
bits, wherever an element lies; so does the twin in ``list_kernels``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..device import known_to_host
from ..plan import BLOCK as BLOCK  # other rooms read both from here
from ..plan import SCALE_BYTES as SCALE_BYTES
from .rounding import cuts_within, scratch_for, together

SCALE_DTYPE = torch.bfloat16

# Numbers of float32: the one nearest to 1/127, the smallest normal one, the largest scale whose 127-fold is finite.
PER_AMAX, LEAST_SCALE, MOST_SCALE = 0.007874015718698502, 2.0**-126, 2.679225179003971e36
ROUNDS = 1.5 * 2**23  # added to a number of less than 2²² in float32, leaves the nearest integer; of two, the even one


@dataclass(frozen=True, slots=True, eq=False)
class Int8Blocks:
    """Where numbers are in int8: views, the columns of which are one dim."""

    quanta: Tensor  # (…, rows, cols)
    scales: Tensor  # as bytes, which may begin at any address: (…, rows, 2 · blocks)
    first: int = 0  # column of the whole matrix where they begin, modulo ``BLOCK``

    @property
    def dtype(self) -> torch.dtype:
        return self.quanta.dtype

    @property
    def device(self) -> torch.device:
        return self.quanta.device

    @property
    def shape(self) -> torch.Size:
        return self.quanta.shape

    def __getitem__(self, rows: tuple[slice, ...]) -> Int8Blocks:
        return Int8Blocks(self.quanta[rows], self.scales[rows], self.first)

    def part_of(self, numbers: Tensor) -> Tensor:
        """What is for these elements in numbers that may also have the rest of the blocks that are cut."""
        return (
            numbers[..., self.first : self.first + self.shape[-1]] if numbers.shape[-1] != self.shape[-1] else numbers
        )

    def by_length(self, numbers: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
        """The length of blocks, and their ``numbers``, quanta and scales: of a cut first one, of whole ones, of a
        short one.
        """
        if not self.first and not self.shape[-1] % BLOCK:
            yield BLOCK, (numbers, self.quanta, self.scales)
            return
        for length, cols, blocks in parts_of(self.shape[-1], self.first):
            scales = self.scales[..., SCALE_BYTES * blocks.start : SCALE_BYTES * blocks.stop]
            yield length, (numbers[..., cols], self.quanta[..., cols], scales)


Numbers: TypeAlias = "Tensor | Int8Blocks"


def blocks_in(cols: int, first: int = 0) -> int:
    """How many blocks ``cols`` columns touch if column ``first`` of the matrix is the first of them."""
    return -(-(first % BLOCK + cols) // BLOCK) if cols else 0


def block_of(columns: Tensor) -> Tensor:
    """The block of each column."""
    return columns // BLOCK


def scales_shape(shape: Sequence[int], first: int = 0) -> tuple[int, ...]:
    """Shape of the scales of a tensor of ``shape``."""
    return (*shape[:-1], blocks_in(shape[-1], first))


def quantise(numbers: Sequence[Tensor], into: Sequence[Int8Blocks]) -> None:
    """Writes ``numbers``. They have the rest of the blocks that ``into`` cuts; if it cuts none, any dims of columns."""
    for chunk in _chunks([n.flatten(target.quanta.dim() - 1) for n, target in zip(numbers, into, strict=True)], into):
        cut = [k for k, (rows, target) in enumerate(chunk) if rows.shape != target.shape]
        whole = [target for _, target in chunk]
        if cut:
            for k, quanta in zip(cut, _in_one("cut blocks", [chunk[k][0] for k in cut], torch.int8)[1], strict=True):
                whole[k] = Int8Blocks(quanta, whole[k].scales)
        for length, (parts, quanta_of_parts, scales) in _by_length([rows for rows, _ in chunk], whole):
            ratios, of_parts = _in_one("numbers", parts, torch.float32)
            torch._foreach_copy_(of_parts, parts)
            ratios = ratios.view(-1, length)
            scale = scales_from(torch.maximum(ratios.amax(-1), ratios.amin(-1).neg_()))
            quanta_of(ratios, scale.unsqueeze(-1), out=ratios)
            torch._foreach_copy_(quanta_of_parts, of_parts)
            narrow, of_parts = _in_one("scales", scales, torch.int8)
            narrow.view(SCALE_DTYPE).copy_(as_stored(scale))
            torch._foreach_copy_(scales, of_parts)
        for k in cut:
            chunk[k][1].quanta.copy_(chunk[k][1].part_of(whole[k].quanta))


def quanta_of(numbers: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """The quanta of float32 ``numbers``, as float32; ``scales``, broadcast to them, are those of the whole blocks
    in float32.
    """
    ratios = torch.div(numbers, scales, out=out).round_()
    if known_to_host(scales) and scales.max() < MOST_SCALE:  # neither NaN nor one whose 127-fold is exceeded
        return ratios
    return ratios.masked_fill_(torch.isnan(scales), 0).clamp_(-127, 127)  # a NaN may become any integer


def dequantise(of: Sequence[Int8Blocks], out: Sequence[Tensor]) -> None:
    """``out`` ← quanta · scale, computed in float32 and rounded to the dtype of ``out``. Its columns may be several
    dims.
    """
    for chunk in _chunks([target.view(source.shape) for target, source in zip(out, of, strict=True)], of):
        for length, (targets, quanta, scales) in _by_length(
            [rows for rows, _ in chunk], [source for _, source in chunk]
        ):
            numbers, of_parts = _in_one("numbers", targets, torch.float32)
            torch._foreach_copy_(of_parts, quanta)
            narrow, of_scales = _in_one("scales", scales, torch.int8)
            torch._foreach_copy_(of_scales, scales)
            numbers.view(-1, length).mul_(narrow.view(SCALE_DTYPE).unsqueeze(-1))
            torch._foreach_copy_(targets, of_parts)


def round_to_int8(numbers: Tensor) -> None:
    """Replaces ``numbers``, whole rows of matrices, by what comes back from int8."""
    scratch = scratch_for(numbers.device)
    for rows in (numbers[cut] for cut in row_cuts(numbers)):
        scales = (*rows.shape[:-1], SCALE_BYTES * blocks_in(rows.shape[-1]))
        sizes = {"int8 rounded": rows.shape, "int8 scales of rounded": scales}
        quanta, of_quanta = (scratch.take(name, size, torch.int8, rows.device) for name, size in sizes.items())
        quantise([rows], [Int8Blocks(quanta, of_quanta)])
        dequantise([Int8Blocks(quanta, of_quanta)], [rows])


_AT_ONCE = 1 << 19  # elements


def _chunks(numbers: Sequence[Tensor], blocks: Sequence[Int8Blocks]) -> Iterator[list[tuple[Tensor, Int8Blocks]]]:
    """Whole rows of numbers and of their blocks. Large tensors are cut, small ones share a chunk: each takes many
    operations.
    """
    rows = (
        (of_tensor[cut], of_blocks[cut]) if cut else (of_tensor, of_blocks)
        for of_tensor, of_blocks in zip(numbers, blocks, strict=True)
        for cut in row_cuts(of_tensor)
    )
    return together(rows, lambda pair: pair[0].numel(), _AT_ONCE)


def row_cuts(numbers: Numbers) -> Iterator[tuple[slice, ...]]:
    """Whole rows, as many as ``_AT_ONCE`` has."""
    return cuts_within(numbers.shape[:-1], max(1, _AT_ONCE // numbers.shape[-1])) if numbers.shape.numel() else iter(())


_Lists: TypeAlias = "tuple[list[Tensor], list[Tensor], list[Tensor]]"


def _by_length(numbers: Sequence[Tensor], blocks: Sequence[Int8Blocks]) -> Iterable[tuple[int, _Lists]]:
    """Lists of what ``Int8Blocks.by_length`` has, for each length of blocks."""
    lists: dict[int, _Lists] = {}
    for tensor, of_tensor in zip(numbers, blocks, strict=True):
        for length, parts in of_tensor.by_length(tensor):
            for part, of_length in zip(parts, lists.setdefault(length, ([], [], [])), strict=True):
                of_length.append(part)
    return lists.items()


def _in_one(name: str, like: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Scratch for all these tensors, one after the other, and its views for each."""
    sizes, device = [tensor.numel() for tensor in like], like[0].device
    flat = scratch_for(device).take(f"int8 {name}", (sum(sizes),), dtype, device)
    return flat, [part.view(tensor.shape) for part, tensor in zip(torch.split(flat, sizes), like, strict=True)]


def scales_from(largest: Tensor) -> Tensor:
    """The scale of each block, as float32 numbers of bfloat16, from its largest magnitude."""
    scale = (largest * PER_AMAX).clamp_(LEAST_SCALE, MOST_SCALE)
    scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-(1 << 16))  # up to the next number of bfloat16
    return scale.masked_fill_(~torch.isfinite(largest), math.nan)


def as_stored(scales: Tensor) -> Tensor:
    """Scales of float32 as bfloat16, by their bits: what a NaN becomes in a conversion depends on the CPU."""
    return (scales.view(torch.int32) >> 16).to(torch.int16).view(SCALE_DTYPE)


def parts_of(cols: int, first: int = 0) -> Iterator[tuple[int, slice, slice]]:
    """Blocks of equal length, their columns and their numbers: the cut first one, whole ones, a short last one."""
    start, block = 0, 0
    head = min(cols, -first % BLOCK)
    for width in (head, (cols - head) // BLOCK * BLOCK, (cols - head) % BLOCK):
        if width:
            count = max(1, width // BLOCK)
            yield width // count, slice(start, start + width), slice(block, block + count)
            start, block = start + width, block + count
