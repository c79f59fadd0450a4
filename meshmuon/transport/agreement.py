"""Ranks agree on what they are about to do: one small vote in host memory per step, no wait for a device."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from ..torch_compat import object_device
from .collectives import all_gather_objects, channel_of, reduce_largest, seconds_of
from .failures import hang_up, named_phase
from .host_channel import PendingRounds, Rounds

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank brings to a step, or all ranks together: then each flag says whether it holds on some rank."""

    fingerprint: int | None  # below 2**62, of all that must be equal; -1 if the rank has failed; None if ranks differ
    prepares: bool = False  # the rank must rebuild its buffers
    nonfinite: bool = False  # it has a gradient that is not finite
    has_work: bool = True  # it has more to do than creating state
    activity: int = 0  # how much Muon has to do; the largest of all ranks
    proposed_id: int = 0  # a random id below 2**62 for this optimizer, the largest of all ranks; 0 if the ranks already share one

    @property
    def unanimous(self) -> bool:
        """All ranks have the same fingerprint."""
        return self.fingerprint is not None


class PendingVotes:
    """Votes on their way. ``wait`` is called once."""

    def __init__(self, vote: Vote, group: dist.ProcessGroup) -> None:
        assert vote.fingerprint is not None
        self._group = group
        with named_phase("agreement", group):
            self._maximum = start_maximum((-vote.fingerprint, *map(int, astuple(vote))), group)

    def wait(self) -> Vote:
        """The votes of all ranks, counted."""
        with named_phase("agreement", self._group):
            smallest, largest, prepares, nonfinite, has_work, activity, proposed_id = self._maximum.wait()
        fingerprint = largest if largest == -smallest else None
        return Vote(fingerprint, bool(prepares), bool(nonfinite), bool(has_work), activity, proposed_id)

    def advance(self) -> None:
        """Lets other ranks hear what has arrived here meanwhile; does not wait."""
        with named_phase("agreement", self._group):
            self._maximum.advance()

    def abandon(self) -> None:
        """Leaves the vote. Ranks that wait for this one get an error at once, where they can be told."""
        hang_up(self._group)


class Agreement:
    """Compares what the ranks of a process group are about to do, and gathers their views where they differ.

    Every rank of the group must call ``start`` and ``all_gather_objects`` in the same order, and wait for each vote before it
    does anything else here.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def start(self, vote: Vote) -> PendingVotes:
        """Sends the vote, and returns before those of the other ranks are here."""
        return PendingVotes(vote, self.group)

    def decide(self, vote: Vote) -> Vote:
        """Counts the votes."""
        return self.start(vote).wait()

    def all_gather_objects(self, value: _T) -> dict[int, _T]:
        """Rank → its ``value``. It is slow, and meant for ranks that disagree."""
        return all_gather_objects(value, self.group)


def start_maximum(words: tuple[int, ...], group: dist.ProcessGroup) -> PendingRounds[tuple[int, ...]]:
    """Starts to find the largest of each word over all ranks: in ⌈log2 W⌉ rounds over the channel of the group, if it has one."""
    channel = channel_of(group)
    return PendingRounds(_reduced(words, group), 0.0) if channel is None else channel.start_maximum(words, seconds_of(group))


def _reduced(words: tuple[int, ...], group: dist.ProcessGroup) -> Rounds[tuple[int, ...]]:
    """By an all-reduce of the group, which waits at once, where there is no channel."""
    yield from ()
    with torch.inference_mode(False):
        reduced = torch.tensor(words, dtype=torch.int64, device=object_device(group))
    reduce_largest(reduced, group, phase="agreement")
    return tuple(reduced.tolist())
