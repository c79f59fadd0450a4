"""When every rank does what in a step: the waves of a plan in the order in which a step really runs them, with times.

A rank has a device that works and links that send. The links serve exchanges in the order in which they were started. An exchange
begins when all ranks have started it, and ends for all of them when the slowest has ended: that is cautious where a few ranks
have more to send than the others. On GPUs links and device work at the same time, and the device waits only for what it needs.
On CPUs the cores that compute also copy what is sent and received: that part of an exchange takes the rank's time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from typing import NamedTuple, TypeAlias

from .order import Action, pipeline_order

Seconds: TypeAlias = "Sequence[float]"
"""One number for each rank of the step, in its order."""


class Span(NamedTuple):
    """Something that one rank does; times are in seconds from the beginning of the step."""

    kind: str  # "host", "momentum", "gather", "local", "orthogonalise", "scatter", "copy", "adamw", "update", "wait"
    wave: int | None
    start: float
    end: float

    @property
    def on_links(self) -> bool:
        """Whether the links are busy with it, not the device."""
        return self.kind in ("gather", "scatter")


@dataclass(frozen=True, slots=True)
class WaveSeconds:
    """What each rank needs for each part of a wave, before anything waits for anything."""

    momentum: Seconds  # momentum, and filling the buffer that is sent
    gather: Seconds
    orthogonalise: Seconds  # assembling the matrices that it owns, orthogonalising them, cutting them into pieces
    scatter: Seconds
    update: Seconds


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """What each rank needs for each part of a step."""

    ranks: tuple[int, ...]
    waves: tuple[WaveSeconds, ...]
    local: Seconds  # matrices that stay where they are: all that is done with them
    adamw: Seconds
    host: Seconds  # before the first wave: looking at parameters, agreeing with the other ranks; 0 if the host runs ahead
    busy: float  # share of an exchange that takes the device's time: 0 if links work by themselves, 1 if nothing is hidden
    in_flight: int  # most waves between their first and their last exchange
    gathered_ahead: int | None = None  # as in ``pipeline_order``
    host_ahead: Seconds = ()  # of a host that issues work for its device: the step ends when both have ended


class Phase(NamedTuple):
    """A span on all ranks: ``start[k]`` and ``end[k]`` are those of ``ranks[k]``."""

    kind: str
    wave: int | None
    start: Seconds
    end: Seconds


@dataclass(frozen=True)
class Timeline:
    """A step on all of its ranks."""

    ranks: tuple[int, ...]
    phases: tuple[Phase, ...]  # in the order in which the host issues them
    host_ahead: Seconds = ()  # as in ``StepSeconds``
    overlaps: bool = True  # whether links work beside the device, at least in part

    @cached_property
    def ends(self) -> dict[int, float]:
        """Rank → when it has ended."""
        last = list(self.host_ahead) or [0.0] * len(self.ranks)
        for phase in self.phases:
            last = list(map(max, last, phase.end))
        return dict(zip(self.ranks, last, strict=True))

    @property
    def seconds(self) -> float:
        """Seconds of the step on its slowest rank."""
        return max(self.ends.values(), default=0.0)

    @property
    def slowest(self) -> int:
        """The first rank that ends last."""
        ends = self.ends
        return max(ends, key=lambda rank: ends[rank])

    def spans(self, rank: int) -> list[Span]:
        """What ``rank`` does, without what takes no time."""
        at = self.ranks.index(rank)
        spans = (Span(phase.kind, phase.wave, phase.start[at], phase.end[at]) for phase in self.phases)
        return [span for span in spans if span.end > span.start]

    def totals(self, rank: int) -> dict[str, float]:
        """Kind → seconds of ``rank`` in all spans of the kind."""
        totals: dict[str, float] = {}
        for span in self.spans(rank):
            totals[span.kind] = totals.get(span.kind, 0.0) + span.end - span.start
        return totals

    @cached_property
    def waited(self) -> list[float]:
        """Seconds in which the device of each rank waits for an exchange."""
        total = [0.0] * len(self.ranks)
        for phase in self.phases:
            if phase.kind == "wait":
                total = [sum(times) - start for *times, start in zip(total, phase.end, phase.start, strict=True)]
        return total

    @cached_property
    def exchanging(self) -> float:
        """Seconds of all exchanges, each on the rank that takes longest."""
        exchanges = (phase for phase in self.phases if phase.kind in ("gather", "scatter"))
        return sum(max(map(sub, phase.end, phase.start), default=0.0) for phase in exchanges)

    @property
    def waited_for(self) -> float:
        """Of these, what the slowest rank waited for: all of them if its cores do the sending."""
        if not self.overlaps or not self.ranks:
            return self.exchanging
        return min(self.exchanging, self.waited[self.ranks.index(self.slowest)])

    @property
    def hidden(self) -> float:
        """Of these, what passed while the slowest rank had other work."""
        return self.exchanging - self.waited_for


def timeline_of(step: StepSeconds) -> Timeline:
    """Walks through a step."""
    walk = _Walk(step)
    walk.work("host", None, step.host)
    for action, wave in pipeline_order(len(step.waves), max(1, step.in_flight), gathered_ahead=step.gathered_ahead):
        if action is Action.LOCAL:
            walk.work("local", None, step.local)
        elif action is Action.DURING_LAST_SCATTER:
            walk.work("adamw", None, step.adamw)
        else:
            _TURNS[action](walk, wave, step.waves[wave])
    return Timeline(step.ranks, tuple(walk.phases), step.host_ahead, overlaps=step.busy < 1.0)


class _Walk:
    """The clocks of all ranks, while one action after the other is taken."""

    def __init__(self, step: StepSeconds) -> None:
        self._busy = step.busy
        self._now = [0.0] * len(step.ranks)  # when each rank's device is free
        self._links_free = 0.0
        self._arrivals: dict[tuple[str, int], float] = {}
        self.phases: list[Phase] = []

    def work(self, kind: str, wave: int | None, seconds: Seconds) -> None:
        """The device of each rank is busy."""
        start, self._now = self._now, [now + more for now, more in zip(self._now, seconds, strict=True)]
        self.phases.append(Phase(kind, wave, start, self._now))

    def send(self, kind: str, wave: int, seconds: Seconds) -> None:
        """All ranks start an exchange."""
        if self._busy == 1.0:
            self.work(kind, wave, seconds)
            self._arrivals[kind, wave] = max(self._now, default=0.0)
            return
        begin = max(self._links_free, max(self._now, default=0.0))
        if self._busy:
            self.work("copy", wave, [self._busy * more for more in seconds])
        arrival = max(begin + max(seconds, default=0.0), max(self._now, default=0.0))
        self._links_free = self._arrivals[kind, wave] = arrival
        self.phases.append(Phase(kind, wave, [begin] * len(self._now), [begin + more for more in seconds]))

    def wait(self, kind: str, wave: int) -> None:
        """All ranks wait for what an exchange brings."""
        arrival = self._arrivals[kind, wave]
        start, self._now = self._now, [max(now, arrival) for now in self._now]
        self.phases.append(Phase("wait", wave, start, self._now))


def _gather(walk: _Walk, wave: int, seconds: WaveSeconds) -> None:
    walk.work("momentum", wave, seconds.momentum)
    walk.send("gather", wave, seconds.gather)


def _compute(walk: _Walk, wave: int, seconds: WaveSeconds) -> None:
    walk.wait("gather", wave)
    walk.work("orthogonalise", wave, seconds.orthogonalise)
    walk.send("scatter", wave, seconds.scatter)


def _finish(walk: _Walk, wave: int, seconds: WaveSeconds) -> None:
    walk.wait("scatter", wave)
    walk.work("update", wave, seconds.update)


_TURNS: Mapping[Action, Callable[[_Walk, int, WaveSeconds], None]] = {
    Action.GATHER: _gather,
    Action.COMPUTE: _compute,
    Action.FINISH: _finish,
}
