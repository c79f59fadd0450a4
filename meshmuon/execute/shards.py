"""Where the elements of a step are: in local tensors of parameters, gradients and momenta, and in views of a buffer.

The buffer is the tensor in which a local batch is orthogonalised, or the one that an exchange sends or receives. Each
element that a rank holds is in one ``MomentumViews`` and in one ``UpdateViews`` of a step. The arithmetic is in
``elementwise``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ..device import copy_to
from ..torch_compat import local_part, local_parts
from .elementwise import OldMomenta
from .rounding import RoundingScratch
from .step_param import MatrixKey, RunningStep, StepParam
from .views import Cut, cut_out

_T = TypeVar("_T")
NONE_FAILED: frozenset[MatrixKey] = frozenset()
"""The failed matrices of a step in which none has failed."""


@dataclass(frozen=True, slots=True)
class ShardView:
    """A cut of a parameter's local tensor, and the view of a buffer that has the same elements in a step.

    Expert 2 of a local (4, 64, 48) tensor has the cut ``(slice(2, 3),)`` and a view of shape (1, 64, 48).
    """

    part_index: int  # in ``RunningStep.params``
    cut: Cut | None  # what it takes of the local tensor; None for all of it
    view: Tensor  # in a buffer, with the shape of the cut
    matrix: int = 0  # number of its matrix in the whole parameter; of the first one, if it has several
    gradient: Tensor | None = None  # of these elements, where it is not in the gradient of the parameter
    memory: int = 0  # of rule state: which of the rules that remember has it

    def of(self, tensor: Tensor) -> Tensor:
        """A view of these elements in ``tensor``, which has the shape of the parameter's local tensor."""
        return tensor if self.cut is None else cut_out(tensor, self.cut)

    @property
    def key(self) -> MatrixKey:
        return self.part_index, self.matrix


FallibleMomenta: TypeAlias = "list[tuple[MatrixKey, Tensor, Tensor]]"
"""Matrices that may fail, their momenta, and copies of what these were before the step."""


class MomentumViews:
    """From gradient and momentum to what is orthogonalised: the only place in which a step accumulates momentum.

    ``unsent`` are shards that another rank, which holds a replica, sends. Only their momentum changes.
    """

    def __init__(
        self, shards: Sequence[ShardView], step_params: Sequence[StepParam], unsent: Sequence[ShardView] = ()
    ) -> None:
        def kind(shard: ShardView) -> Hashable:
            return step_params[shard.part_index].group_index

        self._sent, self._unsent = (grouped(views, kind) for views in (shards, unsent))

    def fill(self, step: RunningStep) -> FallibleMomenta:
        """M ← retain·M + G, and the views get G + momentum·M, or M without Nesterov; those of idle parameters stay.

        Returns the momentum of ``fallible`` parameters as it was, for ``restore``.
        """
        fallible: FallibleMomenta = []
        for sent, groups in ((True, self._sent), (False, self._unsent)):
            for shards in filter(None, (_without(shards, step.idle) for shards in groups)):
                first = step.params[shards[0].part_index]
                momenta = _momenta(shards, step)
                if first.fallible:
                    fallible += [
                        (shard.key, buffer, buffer.clone()) for shard, buffer in zip(shards, momenta, strict=True)
                    ]
                settings, gradients = first.settings, _gradients(shards, step)
                look_ahead = settings.momentum if settings.nesterov else None
                views = [shard.view for shard in shards] if sent else None
                step.elementwise.fill(views, gradients, momenta, settings.retain, look_ahead)
        return fallible


def restore(momenta: FallibleMomenta, failed: AbstractSet[MatrixKey] | None = None) -> None:
    """Gives the matrices that have failed, all unless given, the momentum that they had."""
    for key, buffer, before in momenta:
        if failed is None or key in failed:
            buffer.copy_(before)


class UpdateViews:
    """From what was orthogonalised to the weights. ``scratch`` is where parameters of 16 bits are formed.

    If updates are guarded, momenta are copied to ``slot`` of it, which no other wave or batch in flight has. It is
    taken at once.
    """

    def __init__(
        self,
        shards: Sequence[ShardView],
        step_params: Sequence[StepParam],
        scratch: RoundingScratch | None = None,
        slot: int | None = None,
    ) -> None:
        def kind(shard: ShardView) -> Hashable:
            step_param = step_params[shard.part_index]
            return step_param.group_index, step_param.matrix_set.lr_shape, step_param.param.dtype

        self._groups = grouped(shards, kind)
        self._scratch = RoundingScratch() if scratch is None else scratch
        self._slot = slot
        sizes: Counter[tuple[torch.dtype, torch.device]] = Counter()
        for shard in shards if slot is not None else ():
            if (momentum := step_params[shard.part_index].momentum_buffer) is not None:
                sizes[momentum.dtype, momentum.device] += shard.view.shape.numel()
        for (dtype, device), size in sizes.items():
            self._scratch.take(f"momentum {slot}", (size,), dtype, device)

    def copy_momenta(self, step: RunningStep) -> list[OldMomenta] | None:
        """Copies of the momenta before the step, for ``apply``; None if updates are not guarded."""
        if self._slot is None:
            return None
        shards = [_without(shards, step.idle) for shards in self._groups]
        momenta = [_momenta(of_group, step) for of_group in shards]
        copied = [buffer for buffers in momenta for buffer in buffers]
        before = dict[Tensor, Tensor]()
        for of_dtype in grouped(copied, lambda buffer: buffer.dtype):
            copies = self._scratch.take_like(f"momentum {self._slot}", of_dtype, of_dtype[0].dtype)
            step.elementwise.copy(copies, of_dtype)
            before |= zip(of_dtype, copies, strict=True)
        return [OldMomenta(buffers, [before[buffer] for buffer in buffers]) for buffers in momenta]

    def apply(
        self,
        step: RunningStep,
        failed: AbstractSet[MatrixKey] = NONE_FAILED,
        old_momenta: Sequence[OldMomenta] | None = None,
    ) -> None:
        """p ← p·decay − rate·factor·view for each parameter, except idle ones and ``failed`` matrices.

        With ``old_momenta``, matrices whose update is not finite keep weights and momentum.
        """
        for number, group in enumerate(self._groups):
            shards, of_group = _without(group, step.idle, failed), None if old_momenta is None else old_momenta[number]
            if not shards:
                continue
            if of_group is not None and failed:
                of_group = of_group.chosen([shard.key not in failed for shard in _without(group, step.idle)])
            first = step.params[shards[0].part_index]
            settings, factor = first.settings, first.settings.adjust(*first.matrix_set.lr_shape)
            counters = (
                None
                if first.counter is None
                else [step.params[shard.part_index].counted(shard.cut) for shard in shards]
            )
            step.elementwise.apply(
                _weights(shards, step),
                [shard.view for shard in shards],
                settings.decay,
                settings.rate * factor,
                cautious=settings.cautious,
                counters=counters,
                scratch=self._scratch,
                old_momenta=of_group,
            )


def load_rule_state(shards: Sequence[ShardView], step: RunningStep) -> None:
    """Copies stored numbers into the shards' views, except those of idle parameters."""
    if shards := _without(shards, step.idle):
        step.elementwise.copy([shard.view for shard in shards], [_stored(shard, step) for shard in shards])


def store_rule_state(shards: Sequence[ShardView], step: RunningStep) -> None:
    """Copies the shards' views into the stored numbers, except for idle parameters and where the skip mask forbids
    it.
    """
    targets, values = list[Tensor](), list[Tensor]()
    for shard in _without(shards, step.idle):
        target, skip_mask = _stored(shard, step), step.params[shard.part_index].settings.skip_mask
        value = copy_to(shard.view, target.device)
        targets.append(target)
        values.append(value if skip_mask is None else torch.where(skip_mask, target, value))
    if targets:
        step.elementwise.copy(targets, values)


def _stored(shard: ShardView, step: RunningStep) -> Tensor:
    return shard.of(local_part(step.params[shard.part_index].rule_state[shard.memory]))


def _without(
    shards: Sequence[ShardView], idle: AbstractSet[int], failed: AbstractSet[MatrixKey] = NONE_FAILED
) -> Sequence[ShardView]:
    if not idle and not failed:
        return shards
    return [shard for shard in shards if shard.part_index not in idle and shard.key not in failed]


def _gradients(shards: Sequence[ShardView], step: RunningStep) -> list[Tensor]:
    own = [shard.gradient for shard in shards if shard.gradient is not None]
    return own or _cuts(shards, [step.params[shard.part_index].grad for shard in shards])


def _momenta(shards: Sequence[ShardView], step: RunningStep) -> list[Tensor]:
    return _cuts(shards, [step.params[shard.part_index].momentum for shard in shards])


def _weights(shards: Sequence[ShardView], step: RunningStep) -> list[Tensor]:
    return _cuts(shards, [step.params[shard.part_index].param for shard in shards])


def _cuts(shards: Sequence[ShardView], tensors: list[Tensor]) -> list[Tensor]:
    """From one tensor for each shard (parameters, gradients, momenta), the elements of the shard."""
    return [shard.of(tensor) for shard, tensor in zip(shards, local_parts(tensors), strict=True)]


def grouped(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Items with equal keys together, in order of first appearance."""
    groups: dict[Hashable, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
