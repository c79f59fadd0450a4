"""Which parameters a plan covers. A parameter without a gradient stays in the plan until leaving it out saves
enough work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

# A new plan and its buffers cost a few steps' time. Spread over this many steps, that is a few per cent of each of
# them, even if the parameter comes back right afterwards and is planned again.
LONG_IDLE_STEPS = 100
# Idle parameters stay in the plan while they are a smaller part of its FLOPs than this: leaving them out would save
# little.
IDLE_SHARE = 0.1
NOT_PLANNED = -1  # instead of a number of idle steps


@dataclass(frozen=True, slots=True)
class PlannedSet:
    """The parameters that a plan covers, and for how long each of them has had no gradient on any rank.

    Ranks that have agreed on the same gradients in every step have the same sets. Each method returns a set and changes
    nothing: a set is kept only once the step that it was made for takes place.
    """

    # FLOPs of Muon's parameters, by index: first those that several ranks know of, then those that only this rank knows
    # of. Each rank judges the two separately, since ranks must come to the same result for the first.
    flops: tuple[Mapping[int, float], Mapping[int, float]]
    indices: frozenset[int] = frozenset()  # the parameters that the plan covers
    # idle parameter → the clock at its first step without a gradient
    idle_since: Mapping[int, int] = field(default_factory=dict)
    clock: int = 0  # steps so far

    def covering(self, active: AbstractSet[int]) -> PlannedSet:
        """The set for a step on ``active`` parameters: with all of them, and without those that are not worth
        keeping.
        """
        leaving = self._not_worth_keeping() - active
        if not leaving and active <= self.indices:
            return self
        return replace(self, indices=self.indices - leaving | active)

    def after_step(self, active: AbstractSet[int]) -> PlannedSet:
        """The set after a step in which exactly the ``active`` parameters had a gradient."""
        idle = self.indices - active
        idle_since = {index: self.idle_since.get(index, self.clock) for index in idle} if idle else {}
        return replace(self, idle_since=idle_since, clock=self.clock + 1)

    def idle_steps(self, shared: Iterable[int]) -> tuple[int, ...]:
        """How many steps each parameter has been idle, up to now; ``NOT_PLANNED`` for those outside of the set."""
        begins = ((index, self.idle_since.get(index, self.clock)) for index in shared)
        return tuple(self.clock - begin if index in self.indices else NOT_PLANNED for index, begin in begins)

    def merged(self, shared: Sequence[int], idle_steps: Iterable[Sequence[int]]) -> PlannedSet:
        """The set of all ranks together. It covers each of the ``shared`` parameters that is planned on any rank.

        ``idle_steps`` has, from each rank, the result of ``idle_steps(shared)``. The smallest count of any rank holds
        for all.
        """
        indices, idle_since = set(self.indices.difference(shared)), dict(self.idle_since)
        for index, column in zip(shared, zip(*idle_steps, strict=True), strict=True):
            if steps := [count for count in column if count != NOT_PLANNED]:
                indices.add(index)
                idle_since[index] = self.clock - min(steps)
        return replace(
            self, indices=self.indices if indices == self.indices else frozenset(indices), idle_since=idle_since
        )

    def _not_worth_keeping(self) -> frozenset[int]:
        """Those that have been idle for ``LONG_IDLE_STEPS``, if they are at least ``IDLE_SHARE`` of the plan's
        FLOPs.
        """
        long_ago = self.clock - LONG_IDLE_STEPS
        long_idle = frozenset(index for index, begin in self.idle_since.items() if begin <= long_ago)
        leaving = frozenset[int]()
        for flops in self.flops if long_idle else ():
            total = sum(flops[index] for index in self.indices if index in flops)
            candidates = long_idle & flops.keys()
            if sum(flops[index] for index in candidates) >= IDLE_SHARE * total:
                leaving |= candidates
        return leaving
