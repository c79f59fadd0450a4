"""Stacks: many small tensors of one shape, copied into one tensor so that one operation works on all of them.

A CPU spends more time on starting an operation on an 8 × 8 matrix than on its elements. Copying many of them into a stack is one
operation, and so is everything that is then done to the stack. Only copying back takes one operation per tensor again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from copy import copy

import torch
from torch import Tensor

from ..ortho import Workspace
from .portions import PORTION

MOST_ELEMENTS = 1024  # of a small tensor: larger ones take longer to copy than their operations take to start
FEWEST_TENSORS = 8  # that are worth stacking


class SmallStacks:
    """Memory in ``workspace`` for stacks of small tensors, which all have the shape and dtype of ``views``.

    A stack has as many tensors as there are views, or as fit into the cache. All ``SmallStacks`` of a workspace share three
    buffers. The constructor only makes the workspace large enough. The buffers are taken at the first use, when all users of the
    workspace have been built and it grows no more. What is in the buffers is not needed after the call that has filled them.
    """

    def __init__(self, views: Sequence[Tensor], workspace: Workspace) -> None:
        self._workspace, self._dtype = workspace, views[0].dtype
        self.capacity = min(len(views), max(1, PORTION // views[0].numel()))
        self._shape = (self.capacity, *views[0].shape)
        self._taken: dict[str, tuple[Tensor, list[Tensor]]] = {}  # what ``memory`` returns for full stacks
        self._stacked_views = stacked_view(views)
        for name in ("grads", "momenta", "views"):
            self._take(name)

    def for_other_views(self) -> SmallStacks:
        """The same memory for other views, which are not taken to follow each other in memory."""
        stacks = copy(self)
        stacks._stacked_views = None
        return stacks

    def memory(self, name: str, count: int) -> tuple[Tensor, list[Tensor]]:
        """A stack of ``count`` tensors in the buffer called ``name``, and each of its tensors."""
        taken = self._taken.get(name)
        if taken is None:
            stacked = self._take(name)
            taken = self._taken[name] = stacked, list(stacked.unbind())
        stacked, members = taken
        return (stacked, members) if count == self.capacity else (stacked[:count], members[:count])

    def views(self, start: int, stop: int) -> Tensor | None:
        """The views from ``start`` to ``stop`` as one tensor, if they follow each other in memory."""
        return None if self._stacked_views is None else self._stacked_views[start:stop]

    def spans(self, count: int) -> Iterator[tuple[int, int]]:
        """The beginning and the end of each stack when there are ``count`` tensors."""
        return ((start, min(count, start + self.capacity)) for start in range(0, count, self.capacity))

    def _take(self, name: str) -> Tensor:
        with torch.inference_mode(False):  # what is made inside inference_mode cannot be written outside of it
            return self._workspace.take(f"small {name}", self._shape, self._dtype, torch.device("cpu"))


def small_kind(tensor: Tensor) -> Hashable:
    """Shape and dtype, which tensors must have in common to be stacked; None for a tensor that is not small."""
    small = tensor.device.type == "cpu" and 0 < tensor.numel() <= MOST_ELEMENTS
    return (tensor.shape, tensor.dtype) if small else None


def stacked_view(views: Sequence[Tensor]) -> Tensor | None:
    """Contiguous views of one shape that follow each other in memory, as one tensor (len(views), …); None if they do not."""
    first, size = views[0], views[0].numel()
    start, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for k, view in enumerate(views):
        if not view.is_contiguous() or view.storage_offset() != start + k * size or view.untyped_storage().data_ptr() != storage:
            return None
    return first.as_strided((len(views), *first.shape), (size, *first.stride()))
