"""The two elementwise ends of a step: momentum into views of a buffer, and views of a buffer into parameters.

Where the buffer is does not matter here: the stage in which a local batch is orthogonalised, or what an exchange sends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .work import Work, local_part

__all__ = ["Part", "Parts", "Touch", "apply", "grouped"]

_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a parameter's local tensor and its view in a buffer; ``cut`` is None for all of the local tensor."""

    work: int
    cut: tuple[slice, ...] | None
    view: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a local tensor."""
        return tensor if self.cut is None else tensor[self.cut]


class Parts:
    """Parts that are filled and applied together, grouped once by what their parameters have in common."""

    def __init__(self, parts: Sequence[Part], work: Sequence[Work]) -> None:
        self._parts = parts
        self._by_group = grouped(parts, lambda part: work[part.work].group)
        self._by_shape = grouped(parts, lambda part: (work[part.work].group, work[part.work].matrices.lr_shape))

    def fill(self, work: Sequence[Work]) -> None:
        """Writes each parameter's update before orthogonalisation into its view."""
        for _, parts in self._by_group:
            settings = work[parts[0].work].settings
            views = [part.view for part in parts]
            buffers = [part.of(local_part(work[part.work].momentum_buffer)) for part in parts]
            if settings.nesterov:
                torch._foreach_copy_(views, [part.of(local_part(work[part.work].grad)) for part in parts])
                torch._foreach_add_(views, buffers, alpha=settings.momentum)
            else:
                torch._foreach_copy_(views, buffers)

    def apply(self, work: Sequence[Work]) -> None:
        """p ← p·decay − rate·factor·view for each parameter."""
        for _, parts in self._by_shape:
            first = work[parts[0].work]
            settings, matrices = first.settings, first.matrices
            params = [part.of(local_part(work[part.work].param)) for part in parts]
            factor = settings.adjust(*matrices.lr_shape)
            apply(params, [part.view for part in parts], settings.decay, settings.rate * factor, cautious=settings.cautious)


@dataclass(frozen=True, slots=True)
class Touch:
    """Which parameters a batch or a wave is the first (``begins``) and the last (``ends``) of a step to read gradients of."""

    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    def accumulate(self, work: Sequence[Work]) -> None:
        """M ← momentum·M + G for the parameters that begin here."""
        for _, members in grouped((work[k] for k in self.begins), lambda one: one.group):
            buffers = [local_part(one.momentum_buffer) for one in members]
            torch._foreach_mul_(buffers, members[0].settings.retain)
            torch._foreach_add_(buffers, [local_part(one.grad) for one in members])

    def gradients(self, work: Sequence[Work]) -> list[Tensor]:
        """The gradients that ``free_gradients`` will free."""
        return [local_part(work[k].grad) for k in self.ends]

    def free_gradients(self, work: Sequence[Work]) -> None:
        """Gives the gradients' memory back where the group asks for it."""
        for k in self.ends:
            if work[k].settings.free_grad:
                work[k].param.grad = None


def grouped(things: Iterable[_T], key: Callable[[_T], _K]) -> list[tuple[_K, list[_T]]]:
    """Things with equal keys together, in order of first appearance."""
    groups: dict[_K, list[_T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return list(groups.items())


def apply(
    params: list[Tensor], updates: list[Tensor], decay: float | Tensor, rate: float | Tensor, *, cautious: bool = False
) -> None:
    """p ← p·decay − rate·update, without waiting for the device when lr is a tensor there.

    ``cautious``: only elements whose update brings them nearer to zero, or which have none, decay.
    """
    if cautious:
        for param, update in zip(params, updates, strict=True):
            same_way = (param * update).mul_(rate) >= 0
            decayed = param * decay
            param.copy_(torch.where(same_way, decayed, param, out=decayed))
    else:
        torch._foreach_mul_(params, decay)
    if isinstance(rate, Tensor):
        torch._foreach_mul_(updates, rate)
        torch._foreach_add_(updates, 0.0)  # −0 becomes 0: at rate 0 a weight of −0 keeps its sign
        torch._foreach_sub_(params, updates)
    else:
        torch._foreach_add_(params, updates, alpha=-rate)
