"""Ranks agree on what they are about to do: one small vote in host memory per step, no wait for a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_compat import object_device
from .channels import channel_of, reduce, seconds_of
from .collectives import all_gather_objects
from .failures import hang_up, named_phase
from .host_channel import PendingRounds

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

    def __init__(self, agreement: Agreement, vote: Vote) -> None:
        self._group = agreement.group
        assert vote.fingerprint is not None
        flags = (vote.prepares, vote.nonfinite, vote.has_work)
        words = (vote.fingerprint, -vote.fingerprint, *map(int, flags), vote.activity, vote.proposed_id)
        with named_phase("agreement", self._group):
            self._maximum = agreement.start_maximum(words)

    def wait(self) -> Vote:
        """The votes of all ranks, counted."""
        with named_phase("agreement", self._group):
            largest, smallest, prepares, nonfinite, has_work, activity, proposed_id = self._maximum.wait()
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

    A vote travels through host memory: in ⌈log2 W⌉ rounds over a channel of its own (``host_channel.py``), or as an all-reduce of
    the group where there is no channel (``channels.py``). Every rank of the group must call ``start`` and ``all_gather_objects``
    in the same order, and wait for each vote before it does anything else here.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self._words: Tensor | None = None  # of the all-reduce, where there is no channel

    def start(self, vote: Vote) -> PendingVotes:
        """Sends the vote, and returns before those of the other ranks are here."""
        return PendingVotes(self, vote)

    def decide(self, vote: Vote) -> Vote:
        """Counts the votes."""
        return self.start(vote).wait()

    def all_gather_objects(self, value: _T) -> dict[int, _T]:
        """Rank → its ``value``. It is slow, and meant for ranks that disagree."""
        return all_gather_objects(value, self.group)

    def start_maximum(self, words: tuple[int, ...]) -> PendingRounds[tuple[int, ...]] | _ReducedMaximum:
        """Starts to find the largest of each word over all ranks."""
        channel = channel_of(self.group)
        if channel is None:
            return _ReducedMaximum(words, self._reduced_words(len(words)), self.group)
        return channel.start_maximum(words, seconds_of(self.group))

    def _reduced_words(self, count: int) -> Tensor:
        """Made once: a step allocates nothing new."""
        if self._words is None:
            with torch.inference_mode(False):  # a tensor made inside inference_mode cannot be written outside of it
                self._words = torch.empty(count, dtype=torch.int64, device=object_device(self.group))
        return self._words


class _ReducedMaximum:
    """``PendingRounds`` by an all-reduce of the group, for groups without a channel: it waits at once."""

    def __init__(self, words: tuple[int, ...], reduced: Tensor, group: dist.ProcessGroup) -> None:
        self._words = reduced
        for place, word in enumerate(words):
            reduced[place] = word
        reduce(reduced, group, dist.ReduceOp.MAX)

    def advance(self) -> bool:
        """There is nothing left to do."""
        return True

    def wait(self) -> tuple[int, ...]:
        """The largest of each word over all ranks."""
        return tuple(self._words.tolist())
