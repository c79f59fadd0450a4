"""Ranks agree on what they are about to do: one small reduction in host memory per step, no wait for a device."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from .data_parallel import everyone
from .failures import named_phase

__all__ = ["Agreement", "Verdict", "Vote"]

_T = TypeVar("_T")
_PHASE = "agreement"
_WORDS = struct.Struct("6q")


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank brings to a step.

    Attributes:
        token: what it is about to do, as a number below 2**62.
        prepares: it must make its buffers anew.
        nonfinite: it has a gradient that must not be stepped with.
        busy: it has more to do than creating state.
        number: what it proposes to call what it is about to do from now on, below 2**62; 0 for nothing.
    """

    token: int
    prepares: bool = False
    nonfinite: bool = False
    busy: bool = True
    number: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the votes of all ranks make together.

    They are unanimous or not; of the rest it tells whether any rank said so, and the largest number that was proposed.
    """

    unanimous: bool
    prepares: bool
    nonfinite: bool
    busy: bool
    number: int = 0


class Agreement:
    """Compares a number over the ranks of a group, and collects what differs when it does."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._memory = bytearray(_WORDS.size)  # written and read without a tensor operation per word
        with torch.inference_mode(False):  # made inside inference_mode it could never be written outside
            self._words = torch.frombuffer(self._memory, dtype=torch.int64)
        self.ranks = dist.get_process_group_ranks(group)

    def decide(self, vote: Vote) -> Verdict:
        """Every rank's vote counted; every rank of the group must call."""
        words = (vote.token, -vote.token, vote.prepares, vote.nonfinite, vote.busy, vote.number)
        _WORDS.pack_into(self._memory, 0, *words)
        with named_phase(_PHASE, self._group):
            dist.all_reduce(self._words, dist.ReduceOp.MAX, group=self._group)
        largest, smallest, prepares, nonfinite, busy, number = _WORDS.unpack_from(self._memory)
        return Verdict(largest == -smallest, bool(prepares), bool(nonfinite), bool(busy), number)

    def everyone(self, fact: _T) -> dict[int, _T]:
        """Every rank's ``fact``; slow, for when ranks disagree."""
        return everyone(fact, self._group)
