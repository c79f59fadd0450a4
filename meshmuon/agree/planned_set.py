"""Which parameters a plan covers. Gradients come and go from step to step; the plan stays, and changes only where that pays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

# A new plan and its buffers cost a few steps' time. Spread over this many steps, that is a few per cent of each of them, even if
# the parameter comes back right afterwards and is planned again.
LONG_IDLE_STEPS = 100
# A plan that covers less idle work than this hardly gains from leaving it out: neither time nor memory.
IDLE_SHARE = 0.1
NOT_PLANNED = -1  # in the place of a number of idle steps


@dataclass(frozen=True, slots=True)
class PlannedSet:
    """The parameters that a plan covers, and for how long each of them has had no gradient on any rank.

    Ranks that have agreed on the same gradients in every step have the same sets. Each method returns a set and changes nothing:
    a set is kept only once the step that it was made for takes place.
    """

    # FLOPs of Muon's parameters, by index: first those that several ranks know of, then those that only this rank knows of.
    # Each rank judges the two separately, since ranks must come to the same result for the first.
    flops: tuple[Mapping[int, float], Mapping[int, float]]
    members: frozenset[int] = frozenset()  # indices of the parameters
    idle_since: Mapping[int, int] = field(default_factory=dict)  # member → the clock at its first step without a gradient
    clock: int = 0  # steps so far

    def covering(self, active: AbstractSet[int]) -> PlannedSet:
        """The set for a step on ``active`` parameters: with all of them, and without those that are not worth keeping."""
        leaving = self._not_worth_keeping() - active
        if not leaving and active <= self.members:
            return self
        return replace(self, members=self.members - leaving | active)

    def after_step(self, active: AbstractSet[int]) -> PlannedSet:
        """The set after a step in which exactly the ``active`` parameters had a gradient."""
        idle = self.members - active
        idle_since = {index: self.idle_since.get(index, self.clock) for index in idle} if idle else {}
        return replace(self, idle_since=idle_since, clock=self.clock + 1)

    def idle_steps(self, indices: Iterable[int]) -> tuple[int, ...]:
        """How many steps each parameter has been idle, up to now; ``NOT_PLANNED`` for those outside of the set."""
        begins = ((index, self.idle_since.get(index, self.clock)) for index in indices)
        return tuple(self.clock - begin if index in self.members else NOT_PLANNED for index, begin in begins)

    def merged(self, indices: Sequence[int], idle_steps: Iterable[Sequence[int]]) -> PlannedSet:
        """The set of all ranks together: a parameter is planned if it is on any rank, and idle for the shortest of their times.

        ``idle_steps`` has, from each rank, the result of ``idle_steps(indices)``.
        """
        members, idle_since = set(self.members.difference(indices)), dict(self.idle_since)
        for index, column in zip(indices, zip(*idle_steps, strict=True), strict=True):
            if steps := [count for count in column if count != NOT_PLANNED]:
                members.add(index)
                idle_since[index] = self.clock - min(steps)
        return replace(self, members=self.members if members == self.members else frozenset(members), idle_since=idle_since)

    def _not_worth_keeping(self) -> frozenset[int]:
        """The members that have been idle for long, if they are a considerable part of the work."""
        long_ago = self.clock - LONG_IDLE_STEPS
        long_idle = frozenset(index for index, begin in self.idle_since.items() if begin <= long_ago)
        leaving = frozenset[int]()
        for flops in self.flops if long_idle else ():
            total = sum(flops[index] for index in self.members if index in flops)
            candidates = long_idle & flops.keys()
            if sum(flops[index] for index in candidates) >= IDLE_SHARE * total:
                leaving |= candidates
        return leaving
