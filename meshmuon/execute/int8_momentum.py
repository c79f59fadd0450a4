"""Momentum in int8 while a step works on it: numbers from blocks, and blocks from numbers. ``int8`` says what a
block is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..matrices import MatrixSet, StridedRange
from .int8 import LEAST_SCALE, Int8Blocks, as_stored, block_of, blocks_in, dequantise, quanta_of, quantise, scales_from
from .views import Cut, cut_out


@dataclass(frozen=True, slots=True, eq=False)
class ShardBlocks:
    """The blocks of a shard's matrix of which this rank has the scales, and in which of them the shard's columns
    are.
    """

    of_matrix: slice  # the columns of the local scales
    index: Tensor  # of each column of the shard, all dims as one: its block, counted from the first of the matrix here
    first: int | None  # the first of these, if the columns are whole blocks in order


@dataclass(frozen=True, slots=True, eq=False)
class MomentumBlocks:
    """The scales of a parameter's momentum in int8, and the blocks of the columns that this rank holds."""

    # of the scales, over all ranks: that of the parameter, with the blocks of a row for its columns
    shape: tuple[int, ...]
    index: Tensor  # with the local sizes of the dims that are columns: of each column, its block among the local scales
    # by the columns of a window, None for all: the blocks of its matrices here
    of_matrix: dict[StridedRange | None, slice]
    shared: bool = False  # ranks or shards share blocks: their scales are found before any shard is filled
    # axes of the mesh along which ranks share blocks, and along which scales are replicated
    reduced_axes: tuple[int, ...] = ()
    unseen: bool = False  # some of these ranks have no columns of a matrix, but its scales

    def of_shard(self, part: MatrixSet, cut: Cut | None) -> ShardBlocks:
        """The blocks of a cut of the local tensor that belongs to ``part``."""
        of_matrix = self.of_matrix[None if part.window is None else part.window[1]]
        index = cut_out(self.index, () if cut is None else cut[part.stack_dims + 1 :]).flatten() - of_matrix.start
        first = int(index[0]) if len(index) else 0
        in_order = torch.equal(index, first + block_of(torch.arange(len(index), device=index.device)))
        return ShardBlocks(of_matrix, index, first if in_order and not self.shared else None)

    def scales_of(self, scales: Tensor, stack_dims: int, cut: Cut | None, of_matrix: slice) -> Tensor:
        """A view of those of the local scales that belong to such a cut, (rows, blocks)."""
        rows = scales if cut is None else cut_out(scales, cut[: stack_dims + 1])
        for _ in range(self.index.dim() - 1):
            rows = rows.select(-1, 0)
        return rows[..., of_matrix]


@dataclass(frozen=True, slots=True, eq=False)
class Int8Momentum:
    """The momentum of a shard in int8.

    ``store`` finds the scales of its blocks. Where ranks share blocks, the step has found and stored them before any
    shard is filled, and ``old_scales`` are those that ``quanta`` still have.
    """

    quanta: Tensor  # a cut of the local tensor: rows, then columns, each of one or more dims
    scales: Tensor  # (rows, blocks), with the same dims of rows
    blocks: ShardBlocks
    old_scales: Tensor | None = None  # (rows, blocks)

    @classmethod
    def whole(cls, quanta: Tensor, scales: Tensor, blocks: MomentumBlocks) -> Int8Momentum:
        """All momentum that a rank has of a parameter: its local tensors."""
        everything = slice(None)
        return cls(
            quanta, blocks.scales_of(scales, 0, None, everything), ShardBlocks(everything, blocks.index.flatten(), None)
        )

    def numbers(self) -> Tensor:
        """The momentum in float32, in separate memory."""
        if not self.quanta.numel():  # wrappers give empty shards other shapes
            return self.quanta.float()
        if (blocks := self.as_blocks()) is not None:
            numbers = torch.empty(self.quanta.shape, dtype=torch.float32, device=self.quanta.device)
            dequantise([blocks], [numbers])
            return numbers
        scales = self.scales if self.old_scales is None else self.old_scales
        numbers = self._flat(self.quanta) * scales.float().index_select(-1, self.blocks.index)
        return numbers.view(self.quanta.shape)

    def as_blocks(self) -> Int8Blocks | None:
        """Its blocks, if they are whole and in order, and if its columns can be viewed as one dim and its scales as
        bytes.
        """
        first = self.blocks.first
        if first is None or self.scales.stride(-1) != 1:
            return None
        scales = self.scales[..., first : first + blocks_in(len(self.blocks.index))]
        try:
            return Int8Blocks(self.quanta.view(*scales.shape[:-1], len(self.blocks.index)), scales.view(torch.int8))
        except RuntimeError:
            return None

    def store(self, numbers: Tensor, changed: Tensor | None = None) -> None:
        """Stores ``numbers``. Blocks without a ``changed`` element, if that is given, stay: rounded again, they
        might change.
        """
        if not numbers.numel():
            return
        blocks = self.as_blocks()
        if blocks is not None and changed is None:
            quantise([numbers], [blocks])
            return
        numbers = self._flat(numbers)
        if self.old_scales is None:
            changed = torch.ones_like(numbers) if changed is None else changed.float()
            self.store_scales(self.largest(numbers), self.largest(changed))
        divisors = self.scales.float().clamp_(min=LEAST_SCALE)  # new ones are zeros
        quanta = quanta_of(numbers, divisors.index_select(-1, self.blocks.index))
        self.quanta.copy_(quanta.view(self.quanta.shape))

    def store_scales(self, largest: Tensor, changed: Tensor) -> None:
        """Stores the scales of blocks with these ``largest`` magnitudes where ``changed`` is not 0; both are (rows,
        blocks).
        """
        self.scales.copy_(torch.where(changed > 0, as_stored(scales_from(largest)), self.scales))

    def largest(self, numbers: Tensor) -> Tensor:
        """The largest magnitude of ``numbers`` in each block, (rows, blocks); infinite where one of them is not
        finite.
        """
        blocks = torch.zeros_like(self.scales, dtype=torch.float32)
        if not numbers.numel():
            return blocks
        numbers = self._flat(numbers)
        magnitudes = torch.where(torch.isfinite(numbers), numbers.abs(), torch.inf)
        return blocks.scatter_reduce_(-1, self.blocks.index.expand(numbers.shape), magnitudes, "amax")

    def _flat(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(self.scales.dim() - 1)
