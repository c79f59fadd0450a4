"""Ranks agree on what they are about to do: one small vote in host memory per step, no wait for a device."""

from __future__ import annotations

import threading
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from ..errors import StateError
from .collectives import all_gather_objects, maximum
from .failures import named_phase
from .groups import turn_of

_T = TypeVar("_T")


class Vote(NamedTuple):
    """What one rank brings to a step, or all ranks together: then each flag says whether it holds on some rank."""

    fingerprint: int | None  # below 2**62, of all that must be equal; -1 if the rank has failed; None if ranks differ
    prepares: bool = False  # the rank must rebuild its buffers
    nonfinite: bool = False  # it has a gradient that is not finite
    has_work: bool = True  # it has more to do than creating state
    activity: int = 0  # how much Muon has to do; the largest of all ranks
    # a random id below 2**62 for this optimizer, the largest of all ranks; 0 if the ranks already share one
    proposed_id: int = 0

    @property
    def unanimous(self) -> bool:
        """All ranks have the same fingerprint."""
        return self.fingerprint is not None


class Agreement:
    """Compares what the ranks of a process group are about to do, and gathers their views where they differ.

    A step holds the turn of the process group from its vote to its end. Another thread that steps another optimizer
    over the same group, clips or gathers state over it, waits. If ranks step in different orders, their votes differ,
    and all of them raise.

    Every rank of the group must call ``decide`` and ``all_gather_objects`` in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._group = group
        self._turn = turn_of(group)
        self._thread: int | None = None  # that has the turn

    def begin_turn(self) -> None:
        """Returns once no other thread of this process steps over the process group."""
        if self._thread == threading.get_ident():
            raise StateError(
                "step() was called inside a step of the same optimizer, by its scheme, its rule or a hook. Let the "
                "one step end before the next begins."
            )
        self._turn.acquire()
        self._thread = threading.get_ident()

    def end_turn(self) -> None:
        """The step is over, or has failed, whether or not it had begun its turn."""
        if self._thread == threading.get_ident():
            self._thread = None
            self._turn.release()

    def decide(self, vote: Vote) -> Vote:
        """Sends the vote, and counts those of all ranks."""
        fingerprint, *others = vote
        assert fingerprint is not None
        with named_phase("agreement", self._group):
            words = maximum((fingerprint, -fingerprint, *map(int, others)), self._group)
        largest, smallest, prepares, nonfinite, has_work, activity, proposed_id = words
        fingerprint = largest if largest == -smallest else None
        return Vote(fingerprint, bool(prepares), bool(nonfinite), bool(has_work), activity, proposed_id)

    def all_gather_objects(self, value: _T) -> dict[int, _T]:
        """Rank → its ``value``. It is slow, and meant for ranks that disagree."""
        return all_gather_objects(value, self._group)
