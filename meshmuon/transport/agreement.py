"""Ranks agree on what they are about to do: one small reduction in host memory per step, no wait for a device."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from .collectives import all_gather_objects
from .failures import named_phase

_T = TypeVar("_T")
_WORDS = struct.Struct("7q")


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank brings to a step."""

    fingerprint: int  # a number below 2**62 made from all that must be equal on all ranks; -1 if the rank has failed
    prepares: bool = False  # it must rebuild its buffers
    nonfinite: bool = False  # it has a gradient that is not finite
    has_work: bool = True  # it has more to do than creating state
    activity: int = 0  # how much Muon has to do; transport only finds the largest
    proposed_id: int = 0  # a random id below 2**62 that it proposes for this optimizer; 0 if the ranks already share one


@dataclass(frozen=True, slots=True)
class Verdict:
    """The votes of all ranks, counted."""

    unanimous: bool  # all fingerprints are equal
    prepares: bool  # some rank must rebuild its buffers
    nonfinite: bool  # some rank has a gradient that is not finite
    has_work: bool  # some rank has more to do than creating state
    activity: int = 0  # the largest of all ranks
    proposed_id: int = 0  # the largest id that was proposed; 0 if no rank proposed one


class Agreement:
    """Compares what the ranks of a process group are about to do, and gathers their views where they differ."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._memory = bytearray(_WORDS.size)  # the tensor's memory: packing and unpacking it here needs no tensor operations
        with torch.inference_mode(False):  # a tensor made inside inference_mode cannot be written outside of it
            self._words = torch.frombuffer(self._memory, dtype=torch.int64)
        self.ranks = dist.get_process_group_ranks(group)

    def decide(self, vote: Vote) -> Verdict:
        """Counts the votes; every rank of the group must call."""
        flags = (vote.prepares, vote.nonfinite, vote.has_work)
        _WORDS.pack_into(self._memory, 0, vote.fingerprint, -vote.fingerprint, *flags, vote.activity, vote.proposed_id)
        with named_phase("agreement", self._group):
            dist.all_reduce(self._words, dist.ReduceOp.MAX, group=self._group)
        largest, smallest, prepares, nonfinite, has_work, activity, proposed_id = _WORDS.unpack_from(self._memory)
        return Verdict(largest == -smallest, bool(prepares), bool(nonfinite), bool(has_work), activity, proposed_id)

    def all_gather_objects(self, value: _T) -> dict[int, _T]:
        """Rank → its ``value``; every rank of the group must call. It is slow, and meant for ranks that disagree."""
        return all_gather_objects(value, self._group)
