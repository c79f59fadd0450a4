"""Views into local tensors: ``Cut`` and ``LocalWindow`` say which rows and columns a part of a fused weight has
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..layout import Ranges, local_indices
from ..matrices import StridedRange, Window

Cut: TypeAlias = "tuple[slice | StridedRange, ...]"
"""What to take of each dim of a tensor, from the first on. Only the last entry may be a range of several blocks.

The cut ``(slice(2, 3), StridedRange(0, 4, 3, 6))`` of an (8, 18, 5) tensor takes three blocks of 4 rows of matrix 2: a
view of shape (1, 3, 4, 5). One view holds all blocks, however many there are.
"""


def cut_out(tensor: Tensor, cut: Cut) -> Tensor:
    """A view of what ``cut`` takes; a range of several blocks becomes two dims, (blocks, indices of a block)."""
    slices: Any = cut
    last = cut[-1] if cut else None
    if not isinstance(last, StridedRange):
        return tensor[slices]
    dim = len(cut) - 1
    covered = tensor[(*slices[:-1], slice(last.start, last.stop))]
    return covered.unfold(dim, last.size, last.period).movedim(-1, dim + 1)


def cut_out_of_broadcast(tensor: Tensor, cut: Cut) -> Tensor:
    """``cut_out`` of a tensor that is broadcast along its dims of size 1, which stay as they are."""
    fitting = tuple(slice(None) if size == 1 else part for size, part in zip(tensor.shape, cut, strict=False))
    of_blocks = bool(cut) and isinstance(cut[-1], StridedRange)
    taken = cut_out(tensor, fitting)
    return taken.unsqueeze(len(cut)) if of_blocks and isinstance(fitting[-1], slice) else taken


def window_of(tensor: Tensor, window: Window, stack_dims: int) -> Tensor:
    """A view of the rows and columns of ``window`` in a whole parameter, whose first ``stack_dims`` dims count
    matrices.
    """
    return cut_out(tensor, _cut(tuple(slice(None) for _ in range(stack_dims)), *window))


@dataclass(frozen=True, slots=True)
class LocalWindow:
    """Where the rows and columns of a window are in a local tensor.

    Rows 12 to 24 of a fused (36, D) weight over 2 ranks: rows 12 to 18 of rank 0's local tensor, rows 0 to 6 of rank
    1's.
    """

    rows: tuple[StridedRange, ...]
    cols: tuple[StridedRange, ...]  # of the first dim of columns, if there are several

    @classmethod
    def of(cls, window: Window, rows_held: Ranges, cols_held: Ranges) -> LocalWindow:
        """The window of a rank that holds these rows and columns."""
        return cls(local_indices(rows_held, window[0]), local_indices(cols_held, window[1]))

    def shape(self, stack: Sequence[int], more: Sequence[int]) -> torch.Size:
        """Shape of what is inside; ``stack`` are the sizes of the dims before the rows, ``more`` those after the
        columns.
        """
        lengths = (sum(part.length for part in parts) for parts in (self.rows, self.cols))
        return torch.Size((*stack, *lengths, *more))

    def cuts(self, stack: tuple[slice, ...], inside: Tensor) -> Iterator[tuple[Cut, Tensor]]:
        """Cuts that together take what is inside, each with its view of ``inside``, a tensor of ``shape``."""
        dim = len(stack)
        for rows, of_rows in _placed(self.rows, inside, dim):
            for cols, of_both in _placed(self.cols, of_rows, dim + 1):
                cut = _cut(stack, rows, cols)
                last = cut[-1]
                blocks = (last.count, last.size) if isinstance(last, StridedRange) else None
                yield cut, of_both if blocks is None else torch.unflatten(of_both, len(cut) - 1, blocks)


def _placed(parts: Sequence[StridedRange], tensor: Tensor, dim: int) -> Iterator[tuple[StridedRange, Tensor]]:
    """Each of ``parts`` with its place in ``dim`` of ``tensor``, where they follow each other."""
    yield from zip(parts, torch.split(tensor, [part.length for part in parts], dim), strict=True)


def _cut(stack: tuple[slice, ...], rows: StridedRange, cols: StridedRange) -> Cut:
    of_rows, of_cols = _entry(rows), _entry(cols)
    # A window cuts outputs only: where the rows are several blocks, all columns are inside.
    return (*stack, of_rows) if isinstance(of_rows, StridedRange) else (*stack, of_rows, of_cols)


def _entry(part: StridedRange) -> slice | StridedRange:
    if part.count == 1:
        return slice(part.start, part.stop)
    return slice(part.start, part.stop, part.period) if part.size == 1 else part
