"""Which optimizer a rank steps. Several of equal structure over the same ranks must not be taken for one another.

When ranks first step together they agree on a number that no other optimizer has. From then on each says that number, and how
often it was stepped since, with every vote. What they are before that is told by their place among the optimizers of this process
that look alike, in the order in which these were built; a copy comes right behind its original. Places may differ for good
reasons: one rank has a copy more, or an optimizer for something of its own. They say something only between ranks that have
equally many.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from ..params.dtensors import ReplicaGroup, replica_ranks
from ..torch_compat import spec_of

__all__ = ["Optimizer", "Pairing", "Place", "enrol", "place_of"]


class Optimizer(Protocol):
    """What is looked at of an optimizer."""

    param_groups: list[dict[str, Any]]

    @property
    def replica_group(self) -> ReplicaGroup | None:
        """Over which ranks plain tensors are replicated."""
        ...


class _Enrolled(NamedTuple):
    optimizer: weakref.ref[Optimizer]
    descent: tuple[int, ...]  # its number, behind those of what it was copied from or has followed


_Roster = list[_Enrolled]
_numbers = itertools.count()
_rosters: weakref.WeakKeyDictionary[dist.ProcessGroup, _Roster] = weakref.WeakKeyDictionary()
_early: _Roster = []  # built before there was a process group
_lock = threading.Lock()


class Place(NamedTuple):
    """The place of an optimizer among those alive that look like it, and how many these are."""

    at: int
    alike: int


class Pairing(NamedTuple):
    """What this rank's optimizer has in common with those of the other ranks that step with it.

    Attributes:
        number: what they have agreed on; 0 before their first common step, and after loading.
        steps: calls of ``step`` since then, also those that failed.
    """

    number: int = 0
    steps: int = 0

    def proposal(self) -> int:
        """A number for all ranks, from a rank that has none. The largest proposal is taken; 0 proposes nothing."""
        return 0 if self.number else secrets.randbits(60) | 1

    def joined(self, number: int) -> Pairing:
        """All ranks have agreed on ``number``; 0 leaves the one that they have."""
        return Pairing(number) if number else self


def enrol(optimizer: Optimizer, copied: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Takes note of an optimizer when it is built.

    Args:
        optimizer: the new one.
        copied: of a copy, the descent of what it is a copy of, whose place it then takes if that goes.

    Returns:
        Its descent. An optimizer for the parameters of one that is still there descends from that one.
    """
    first = _first(optimizer)
    with _lock:
        roster = _roster()
        roster[:] = [one for one in roster if one.optimizer() is not None]
        for one in roster:
            if not copied and first is not None and (known := one.optimizer()) is not None and _first(known) is first:
                copied = one.descent
        descent = (*copied, next(_numbers))
        roster.append(_Enrolled(weakref.ref(optimizer), descent))
    return descent


def place_of(optimizer: Optimizer | None) -> Place:
    """Its place among those alive; optimizers of the same parameters count as one, since it does not matter which is stepped."""
    assert optimizer is not None, "who plans is alive"
    with _lock:
        roster = _roster()
        enrolled = sorted(_early if roster is _early else [*_early, *roster], key=lambda one: one.descent)
    found = [one.optimizer() for one in enrolled]
    alike = [one for one in found if one is not None and (one is optimizer or _looks_like(optimizer, one))]
    firsts: list[Tensor | None] = []
    for one in alike:
        if not any(known is _first(one) for known in firsts):
            firsts.append(_first(one))
    mine = _first(optimizer)
    return Place(next((k for k, known in enumerate(firsts) if known is mine), 0), len(firsts))


def _roster() -> _Roster:
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return _early if world is None else _rosters.setdefault(world, [])


def _first(optimizer: Optimizer) -> Tensor | None:
    return next((param for group in optimizer.param_groups for param in group["params"]), None)


def _looks_like(one: Optimizer, other: Optimizer) -> bool:
    """Whether ranks could take one for the other: the same names, shapes and layouts, over the same ranks."""
    groups, others = one.param_groups, other.param_groups
    return (
        len(groups) == len(others)
        and all(mine["param_names"] == its["param_names"] for mine, its in zip(groups, others, strict=True))
        and all(_layouts(mine["params"]) == _layouts(its["params"]) for mine, its in zip(groups, others, strict=True))
        and _replicas(one) == _replicas(other)
    )


def _layouts(params: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(param.shape, param.dtype, spec_of(param)) for param in params]


def _replicas(optimizer: Optimizer) -> object:
    try:
        return replica_ranks(optimizer.replica_group)
    except Exception:  # a group that no longer exists: it leads nowhere
        return None
