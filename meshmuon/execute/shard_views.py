"""The two elementwise ends of a step: momentum into views of a buffer, and views of a buffer into parameters.

Where the buffer is does not matter here: the stage in which a local batch is orthogonalised, or what an exchange sends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .elementwise import accumulate, all_add_alike, apply, look_ahead
from .step_param import StepParam, local_part

__all__ = ["GradLifetime", "ShardView", "ShardViews", "grouped"]

_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ShardView:
    """A part of a parameter's local tensor and its view in a buffer; ``cut`` is None for all of the local tensor."""

    param_index: int
    cut: tuple[slice, ...] | None
    view: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a local tensor."""
        return tensor if self.cut is None else tensor[self.cut]


class _UniformViews:
    """Parts whose parameters have a group, or a group and a shape, in common."""

    def __init__(self, parts: Sequence[ShardView], step_params: Sequence[StepParam]) -> None:
        self._parts = parts
        self.first = parts[0].param_index
        self.views = [part.view for part in parts]
        self.add_alike = all_add_alike([local_part(step_params[part.param_index].param) for part in parts], self.views)

    def params(self, step_params: Sequence[StepParam]) -> list[Tensor]:
        """The parts of the parameters."""
        return [part.of(local_part(step_params[part.param_index].param)) for part in self._parts]

    def buffers(self, step_params: Sequence[StepParam]) -> list[Tensor]:
        """The parts of their momentum."""
        return [part.of(local_part(step_params[part.param_index].momentum_buffer)) for part in self._parts]

    def grads(self, step_params: Sequence[StepParam]) -> list[Tensor]:
        """The parts of their gradients."""
        return [part.of(local_part(step_params[part.param_index].grad)) for part in self._parts]


class ShardViews:
    """Parts that are filled and applied together, grouped once by what their parameters have in common."""

    def __init__(self, parts: Sequence[ShardView], step_params: Sequence[StepParam]) -> None:
        self._by_group = [
            _UniformViews(some, step_params) for _, some in grouped(parts, lambda part: step_params[part.param_index].group_index)
        ]
        shapes = grouped(
            parts, lambda part: (step_params[part.param_index].group_index, step_params[part.param_index].matrices.lr_shape)
        )
        self._by_shape = [_UniformViews(some, step_params) for _, some in shapes]

    def fill(self, step_params: Sequence[StepParam]) -> None:
        """Writes each parameter's update before orthogonalisation into its view."""
        for alike in self._by_group:
            settings = step_params[alike.first].settings
            if settings.nesterov:
                look_ahead(alike.views, alike.grads(step_params), alike.buffers(step_params), settings.momentum)
            else:
                torch._foreach_copy_(alike.views, alike.buffers(step_params))

    def apply(self, step_params: Sequence[StepParam]) -> None:
        """p ← p·decay − rate·factor·view for each parameter."""
        for alike in self._by_shape:
            first = step_params[alike.first]
            settings, factor = first.settings, first.settings.adjust(*first.matrices.lr_shape)
            rate, how = settings.rate * factor, {"cautious": settings.cautious, "alike": alike.add_alike}
            apply(alike.params(step_params), alike.views, settings.decay, rate, **how)


class GradLifetime:
    """Which parameters a batch or a wave is the first (``begins``) and the last (``ends``) of a step to read gradients of."""

    def __init__(self, begins: Sequence[int] = (), ends: Sequence[int] = ()) -> None:
        self.begins, self.ends = tuple(begins), tuple(ends)
        self._groups: list[list[int]] | None = None

    def accumulate(self, step_params: Sequence[StepParam]) -> None:
        """M ← momentum·M + G for the parameters that begin here."""
        if self._groups is None:
            self._groups = [some for _, some in grouped(self.begins, lambda k: step_params[k].group_index)]
        for some in self._groups:
            buffers = [local_part(step_params[k].momentum_buffer) for k in some]
            accumulate(buffers, [local_part(step_params[k].grad) for k in some], step_params[some[0]].settings.retain)

    def gradients(self, step_params: Sequence[StepParam]) -> Iterator[Tensor]:
        """The gradients that ``free_gradients`` will free."""
        return (local_part(step_params[k].grad) for k in self.ends)

    def free_gradients(self, step_params: Sequence[StepParam]) -> None:
        """Gives the gradients' memory back where the group asks for it."""
        for k in self.ends:
            one = step_params[k]
            if one.settings.free_grad:
                one.param.grad = None


def grouped(things: Iterable[_T], key: Callable[[_T], _K]) -> list[tuple[_K, list[_T]]]:
    """Things with equal keys together, in order of first appearance."""
    groups: dict[_K, list[_T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return list(groups.items())
