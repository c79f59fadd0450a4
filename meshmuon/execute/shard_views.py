"""The elementwise beginning and end of a step: momentum into views of a buffer, and views of a buffer into parameters.

The buffer is the tensor in which a local batch is orthogonalised, or the one that an exchange sends or receives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..torch_compat import local_part, local_parts
from .elementwise import accumulate, apply, fill_with_momentum, look_ahead
from .rounding import RandomWords, RoundingScratch
from .step_param import NONE_IDLE, MatrixKey, StepParam
from .views import Cut, cut_out

_T = TypeVar("_T")
NONE_FAILED: frozenset[MatrixKey] = frozenset()
"""The failed matrices of a step in which none has failed."""


@dataclass(frozen=True, slots=True)
class ShardView:
    """A part of a parameter's local tensor and its view of a buffer.

    Expert 2 of a local (4, 64, 48) tensor has the cut ``(slice(2, 3),)`` and a view of shape (1, 64, 48).
    """

    param_index: int  # index of the parameter in the step's list
    cut: Cut | None  # which part of the local tensor; None for all of it
    view: Tensor  # where the part is in a buffer, with the shape of the part
    matrix: int = 0  # number of its matrix in the whole parameter; of the first one, if it has several

    def of(self, tensor: Tensor) -> Tensor:
        """This part of ``tensor``, which has the shape of the parameter's local tensor."""
        return tensor if self.cut is None else cut_out(tensor, self.cut)


class _UniformViews:
    """Shard views of one param group (for ``fill``), or of one param group, shape and dtype (for ``apply``)."""

    def __init__(self, shards: Sequence[ShardView]) -> None:
        self._shards = shards
        self._indices = [shard.param_index for shard in shards]
        self._has_cuts = any(shard.cut is not None for shard in shards)
        self.first = shards[0].param_index
        self.views = [shard.view for shard in shards]

    def without(self, idle: AbstractSet[int], failed: AbstractSet[MatrixKey] = NONE_FAILED) -> _UniformViews | None:
        """The same without ``idle`` parameters and ``failed`` matrices; None if that leaves nothing."""
        if not idle and not failed:
            return self
        shards = [
            shard for shard in self._shards if shard.param_index not in idle and (shard.param_index, shard.matrix) not in failed
        ]
        if len(shards) == len(self._shards):
            return self
        return _UniformViews(shards) if shards else None

    def params(self, step_params: Sequence[StepParam]) -> list[Tensor]:
        return self._parts([step_params[k].param for k in self._indices])

    def momenta(self, step_params: Sequence[StepParam]) -> list[Tensor]:
        return self._parts([step_params[k].momentum for k in self._indices])

    def words(self, step_params: Sequence[StepParam]) -> list[RandomWords | None]:
        return [step_params[shard.param_index].random_words(shard.cut) for shard in self._shards]

    def grads(self, step_params: Sequence[StepParam]) -> list[Tensor]:
        return self._parts([step_params[k].grad for k in self._indices])

    def _parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """From one tensor for each shard (parameters, gradients, momenta), the parts that the shards view."""
        local = local_parts(tensors)
        return [shard.of(tensor) for shard, tensor in zip(self._shards, local, strict=True)] if self._has_cuts else local


class ShardViews:
    """Shards that are filled and applied together, grouped once by what their parameters have in common.

    ``scratch`` is where parameters of 16 bits are formed. ``filled_once`` are the parameters of which every local element goes
    into exactly one buffer in a step. ``fill`` accumulates their momentum, and ``GradientReads`` that of the others before it.
    That of ``fallible`` parameters is accumulated by ``apply``.
    """

    def __init__(
        self,
        shards: Sequence[ShardView],
        step_params: Sequence[StepParam],
        scratch: RoundingScratch | None = None,
        filled_once: AbstractSet[int] = frozenset(),
    ) -> None:
        def fill_key(shard: ShardView) -> Hashable:
            return step_params[shard.param_index].group_index, shard.param_index in filled_once

        def apply_key(shard: ShardView) -> Hashable:
            step_param = step_params[shard.param_index]
            return step_param.group_index, step_param.matrix_set.lr_shape, step_param.param.dtype

        self._scratch = RoundingScratch() if scratch is None else scratch
        self._filled_once = filled_once
        self._by_group = [_UniformViews(members) for members in grouped(shards, fill_key)]
        self._by_shape = [_UniformViews(members) for members in grouped(shards, apply_key)]

    def fill(self, step_params: Sequence[StepParam], idle: AbstractSet[int] = NONE_IDLE) -> None:
        """Writes what will be orthogonalised (momentum, with Nesterov's look-ahead if asked for) into the views.

        The views of ``idle`` parameters keep what they have.
        """
        for uniform in filter(None, (views.without(idle) for views in self._by_group)):
            settings, views, momenta = step_params[uniform.first].settings, uniform.views, uniform.momenta(step_params)
            momentum, fallible = settings.momentum if settings.nesterov else None, step_params[uniform.first].fallible
            if fallible:  # ``apply`` accumulates the momentum itself, once the update is known
                momenta = [buffer.clone() for buffer in momenta]
            if fallible or uniform.first in self._filled_once:
                grads = uniform.grads(step_params)
                fill_with_momentum(views, grads, momenta, settings.retain, momentum)
            elif momentum is not None:
                look_ahead(views, uniform.grads(step_params), momenta, momentum)
            else:
                torch._foreach_copy_(views, momenta)

    def apply(
        self,
        step_params: Sequence[StepParam],
        idle: AbstractSet[int] = NONE_IDLE,
        failed: AbstractSet[MatrixKey] = NONE_FAILED,
        *,
        stores_momentum: bool = True,
    ) -> None:
        """p ← p·decay − rate·factor·view for each parameter, except ``idle`` ones and ``failed`` matrices.

        Of ``fallible`` parameters it also accumulates the momentum, unless ``stores_momentum`` is false.
        """
        for uniform in filter(None, (views.without(idle, failed) for views in self._by_shape)):
            first = step_params[uniform.first]
            if first.fallible and stores_momentum:
                accumulate(uniform.momenta(step_params), uniform.grads(step_params), first.settings.retain)
            settings, factor = first.settings, first.settings.adjust(*first.matrix_set.lr_shape)
            apply(
                uniform.params(step_params),
                uniform.views,
                settings.decay,
                settings.rate * factor,
                cautious=settings.cautious,
                words=None if first.counter is None else uniform.words(step_params),
                scratch=self._scratch,
            )


class GradientReads:
    """The parameters whose gradients a wave or a local batch is the first or the last to read in a step.

    Experts (8, D, D) in batches of 4: the first batch reads the gradient first, the second batch reads it last and frees it. The
    first batch accumulates the momentum of all 8 experts, unless ``ShardViews.fill`` does so, in each batch for its own experts:
    that is the case for parameters ``filled_once``.
    """

    def __init__(
        self, first_here: Sequence[int] = (), last_here: Sequence[int] = (), filled_once: AbstractSet[int] = frozenset()
    ) -> None:
        self.first_here, self.last_here = tuple(first_here), tuple(last_here)
        self._filled_once = filled_once
        self._groups: list[list[int]] | None = None

    def accumulate_momentum(self, step_params: Sequence[StepParam], idle: AbstractSet[int] = NONE_IDLE) -> None:
        """M ← momentum·M + G for those in ``first_here`` that are neither ``idle`` nor ``filled_once``."""
        if self._groups is None:
            first_here = (k for k in self.first_here if k not in self._filled_once)
            self._groups = grouped(first_here, lambda k: (step_params[k].group_index, step_params[k].param.device))
        for indices in self._groups:
            if idle and not (indices := [k for k in indices if k not in idle]):
                continue
            momenta = [local_part(step_params[k].momentum) for k in indices]
            accumulate(momenta, [local_part(step_params[k].grad) for k in indices], step_params[indices[0]].settings.retain)

    def gradients(self, step_params: Sequence[StepParam], idle: AbstractSet[int] = NONE_IDLE) -> Iterator[Tensor]:
        """The gradients that ``free_gradients`` will free; ``idle`` parameters have none."""
        return (local_part(step_params[k].grad) for k in self.last_here if k not in idle)

    def free_gradients(self, step_params: Sequence[StepParam]) -> None:
        """Frees the gradients of ``last_here`` where the param group asks for it."""
        free_gradients([step_params[k] for k in self.last_here])


def free_gradients(step_params: Iterable[StepParam]) -> None:
    """Frees the gradients of those parameters whose param group asks for it."""
    for step_param in step_params:
        if step_param.settings.free_grad:
            step_param.param.grad = None


def grouped(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Items with equal keys together, in order of first appearance."""
    groups: dict[Hashable, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
