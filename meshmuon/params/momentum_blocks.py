"""The scales of momentum in int8: one for each block of a row of a matrix, as ``execute/int8.py`` defines it.

The scales of a parameter have its shape, with the number of blocks of a row for the columns: (96, 300) has scales of
(96, 3), a filter (32, 16, 3, 3) of (32, 2, 1, 1), experts (8, 96, 300) of (8, 96, 3). Where parts of a fused weight
divide the columns, the blocks of each part follow those of the part before. The scales are placed like the parameter.
If that would cut a block, or separate it from its scale, every rank has the scales of its rows whole, and ranks that
share rows reduce them at every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..execute import MomentumBlocks, int8
from ..layout import Layout, Ranges, Sharded
from ..matrices import MatrixSet, StridedRange
from .dtensors import as_dtensor, own_layout


def momentum_blocks(param: Tensor, matrix_sets: Sequence[MatrixSet]) -> MomentumBlocks:
    """The blocks of a parameter with these matrices."""
    layout, rank = own_layout(param)
    return _momentum_blocks(tuple(param.shape), tuple(matrix_sets), layout, rank, int8.BLOCK, param.device)


def scale_placements(param: Tensor, blocks: MomentumBlocks) -> tuple[Any, ...]:
    """torch's placements of the scales; none for a plain tensor."""
    sharded = as_dtensor(param)
    if sharded is None:
        return ()
    from torch.distributed.tensor import Replicate

    return tuple(
        Replicate() if axis in blocks.reduced_axes else placement for axis, placement in enumerate(sharded.placements)
    )


@lru_cache(maxsize=1024)
def _momentum_blocks(
    shape: tuple[int, ...],
    matrix_sets: tuple[MatrixSet, ...],
    layout: Layout | None,
    rank: int,
    block: int,
    device: torch.device,
) -> MomentumBlocks:
    first = matrix_sets[0].stack_dims + 1  # the first dim that is columns
    block_of, spans = _block_of_columns(matrix_sets, math.prod(shape[first:]), block)
    block_of, count = block_of.view(shape[first:]), max(span.stop for span in spans.values())
    scales_shape = (*shape[:first], count, *[1] * (len(shape) - first - 1))
    if layout is None:
        return MomentumBlocks(scales_shape, block_of.to(device), spans)
    axes = tuple(k for k, cut in enumerate(layout.placements) if isinstance(cut, Sharded) and cut.dim >= first)
    scales = Layout(scales_shape, layout.mesh, layout.placements)
    index = _taken(block_of, layout.held_ranges(rank)[first:])
    if axes and not _same_cuts(block_of, layout, scales, first):
        shards = [
            _taken(block_of, ranges) for ranges in product(*(layout.cuts(dim) for dim in range(first, len(shape))))
        ]
        unseen = any(
            not ((held >= span.start) & (held < span.stop)).any() for held in shards for span in spans.values()
        )
        return MomentumBlocks(scales_shape, index.to(device), spans, shared=True, reduced_axes=axes, unseen=unseen)
    held = _taken(_numbers(count), scales.held_ranges(rank)[first : first + 1])
    place = torch.zeros_like(_numbers(count)).index_copy_(0, held, _numbers(len(held)))
    here = {
        window: [k for k, b in enumerate(held.tolist()) if span.start <= b < span.stop]
        for window, span in spans.items()
    }
    spans = {window: slice(min(places, default=0), max(places, default=-1) + 1) for window, places in here.items()}
    return MomentumBlocks(scales_shape, place[index].to(device), spans, shared=bool(axes) and len(spans) > 1)


def _block_of_columns(
    matrix_sets: Sequence[MatrixSet], cols: int, block: int
) -> tuple[Tensor, dict[StridedRange | None, slice]]:
    """The block of each column, and the blocks of each window of columns. Blocks count from the first column of
    each matrix.
    """
    spans: dict[StridedRange | None, slice] = {}
    block_of, count = _numbers(cols), 0
    for window in dict.fromkeys(None if part.window is None else part.window[1] for part in matrix_sets):
        strided = window or StridedRange(0, cols)
        positions = _numbers(strided.length)
        columns = strided.start + positions // strided.size * strided.period + positions % strided.size
        block_of[columns] = count + positions // block
        spans[window] = slice(count, count := count + -(-strided.length // block))
    return block_of, spans


def _same_cuts(block_of: Tensor, layout: Layout, scales: Layout, first: int) -> bool:
    """Whether every rank holds all columns of those blocks whose scales it holds, in the same order, and no others."""
    if any(layout.axes(dim) for dim in range(first + 1, len(layout.shape))):
        return False
    sizes = torch.bincount(block_of.flatten(), minlength=scales.shape[first])
    for ranges, scale_ranges in zip(layout.cuts(first), scales.cuts(first), strict=True):
        held = _taken(_numbers(scales.shape[first]), (scale_ranges,))
        blocks, counts = torch.unique(_taken(block_of, (ranges,)), return_counts=True)
        if not torch.equal(blocks, held.sort().values) or not torch.equal(counts, sizes[blocks]):
            return False
    return True


def _taken(tensor: Tensor, ranges: Sequence[Ranges]) -> Tensor:
    """What a rank that holds these ranges of the first dims holds of ``tensor``."""
    for dim, of_dim in enumerate(ranges):
        tensor = tensor.index_select(dim, torch.cat([_numbers(0), *(_numbers(stop)[start:] for start, stop in of_dim)]))
    return tensor


def _numbers(count: int) -> Tensor:
    return torch.arange(count, device="cpu")  # whatever torch's default device is
