"""The timeline of a step: the waves of a plan in the order in which a step runs them, with times for every rank.

A rank has a device that works and links that send. The links serve exchanges in the order in which they were started.
An exchange begins when all ranks have started it, and ends for all of them when the slowest has ended: that is cautious
where a few ranks have more to send than the others. On GPUs links and device work at the same time, and the device
waits only for what it needs. On CPUs the cores that compute also copy what is sent and received, and this share of an
exchange takes the rank's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from typing import NamedTuple, TypeAlias

from ...plan import Action, pipeline_order

Seconds: TypeAlias = "Sequence[float]"
"""One number for each rank of the step, in its order."""
ON_LINKS = ("gather", "scatter")
"""The kinds of spans in which the links are busy; where cores send, the device is."""


class RankSpan(NamedTuple):
    """One activity of one rank; times are in seconds from the beginning of the step."""

    kind: str  # "host", "momentum", "gather", "local", "orthogonalise", "scatter", "copy", "adamw", "update", "wait"
    wave: int | None
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class WaveSeconds:
    """Seconds of each rank for the work of a wave, without waiting."""

    momentum: Seconds  # momentum, and filling the buffer that is sent
    gather: Seconds
    orthogonalise: Seconds  # assembling the matrices that it owns, orthogonalising them, cutting them into pieces
    scatter: Seconds
    update: Seconds


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of each rank for the work of a step, without waiting."""

    ranks: tuple[int, ...]
    waves: tuple[WaveSeconds, ...]
    local: Seconds  # all work on matrices that stay where they are
    adamw: Seconds
    # before the first wave: looking at parameters, agreeing with the other ranks; 0 if the host runs ahead
    host: Seconds
    # share of an exchange that takes the device's time: 0 if links work by themselves, 1 if nothing is hidden
    busy: float
    in_flight: int  # most waves between their first and their last exchange
    gathered_ahead: int | None = None  # as in ``pipeline_order``
    host_ahead: Seconds = ()  # of a host that issues work for its device: the step ends when both have ended
    launches: Sequence[int] = ()  # kernels that it issues; empty on CPU
    slower_beside_exchange: float = 0.0  # slowdown of orthogonalising while the links are busy, as a share


class Phase(NamedTuple):
    """A span on all ranks: ``start[k]`` and ``end[k]`` are those of ``ranks[k]``."""

    kind: str
    wave: int | None
    start: Seconds
    end: Seconds


@dataclass(frozen=True)
class Timeline:
    """A step on all of its ranks."""

    work: StepSeconds
    phases: tuple[Phase, ...]  # in the order in which the host issues them

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.work.ranks

    @property
    def overlaps(self) -> bool:
        """Whether links work beside the device, at least in part."""
        return self.work.busy < 1.0

    @cached_property
    def ends(self) -> dict[int, float]:
        last = list(self.work.host_ahead) or [0.0] * len(self.ranks)
        for phase in self.phases:
            last = list(map(max, last, phase.end))
        return dict(zip(self.ranks, last, strict=True))

    @property
    def seconds(self) -> float:
        return max(self.ends.values(), default=0.0)

    @cached_property
    def bound(self) -> float:
        """A lower bound for any order of these waves: on some rank the time of its links, its work and the exposed time
        of the first gather and of the last scatter, or one of its waves from momentum to update, which run one after
        the other. Local matrices and the momentum of other waves hide the first gather, AdamW and the updates of other
        waves the last scatter.
        """
        step = self.work
        bound = max(step.host_ahead, default=0.0)
        for k in range(len(step.ranks)):
            links = sum(wave.gather[k] + wave.scatter[k] for wave in step.waves)
            work = step.host[k] + step.local[k] + step.adamw[k] + step.busy * links
            work += sum(wave.momentum[k] + wave.orthogonalise[k] + wave.update[k] for wave in step.waves)
            if step.waves:
                before, after = step.local[k] + sum(w.momentum[k] for w in step.waves[1:]), step.adamw[k]
                after += sum(w.update[k] for w in step.waves[:-1])
                edges = max(0.0, step.waves[0].gather[k] - before) + max(0.0, step.waves[-1].scatter[k] - after)
                work += (1 - step.busy) * edges
            parts = ((w.momentum[k], w.gather[k], w.orthogonalise[k], w.scatter[k], w.update[k]) for w in step.waves)
            bound = max(bound, links, work, step.host[k] + max(map(sum, parts), default=0.0))
        return bound

    @cached_property
    def slowest(self) -> int:
        """The critical rank: of those that end last, the first that waits least. The others wait for it."""
        waited = dict(zip(self.ranks, self.waited, strict=True))
        return max(self.ranks, key=lambda rank: (self.ends[rank], -waited[rank]))

    def spans(self, rank: int) -> list[RankSpan]:
        """The spans of ``rank``, without empty ones."""
        at = self.ranks.index(rank)
        spans = (RankSpan(phase.kind, phase.wave, phase.start[at], phase.end[at]) for phase in self.phases)
        return [span for span in spans if span.end > span.start]

    def totals(self, rank: int) -> dict[str, float]:
        totals: dict[str, float] = {}
        for span in self.spans(rank):
            totals[span.kind] = totals.get(span.kind, 0.0) + span.end - span.start
        return totals

    @cached_property
    def seconds_by_kind(self) -> dict[str, float]:
        """Kind → seconds of the slowest rank, which add up to ``seconds``; exchanges that overlap with work are left
        out.

        "wait" is for exchanges in flight, "others" for ranks that start them late.
        """
        if not self.ranks:
            return {}
        totals = self.totals(self.slowest)
        by_kind = {kind: taken for kind, taken in totals.items() if not self.overlaps or kind not in ON_LINKS}
        if waited := by_kind.pop("wait", 0.0):
            exchanges = [phase for phase in self.phases if self.overlaps and phase.kind in ON_LINKS]
            busy = [(min(phase.start), max(phase.end)) for phase in exchanges]
            waits = [span for span in self.spans(self.slowest) if span.kind == "wait"]
            for_links = sum(
                max(0.0, min(end, span.end) - max(begin, span.start)) for span in waits for begin, end in busy
            )
            by_kind |= {"wait": for_links, "others": max(0.0, waited - for_links)}
        behind = self.seconds - sum(by_kind.values())  # the host still issues work, and the device waits for it
        if behind > 1e-9 * self.seconds:
            by_kind["host"] = by_kind.get("host", 0.0) + behind
        return {kind: taken for kind, taken in by_kind.items() if taken > 1e-9 * self.seconds}

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
        exchanges = (phase for phase in self.phases if phase.kind in ON_LINKS)
        return sum(max(map(sub, phase.end, phase.start), default=0.0) for phase in exchanges)

    @property
    def waited_for(self) -> float:
        """Seconds that the slowest rank spends on exchanges: it waits for them, or its cores copy."""
        return sum(self.seconds_by_kind.get(kind, 0.0) for kind in ("wait", "copy", *ON_LINKS))

    @property
    def hidden(self) -> float:
        """Seconds of exchanges in which the slowest rank had other work."""
        return max(0.0, self.exchanging - self.waited_for) if self.overlaps else 0.0


def timeline_of(step: StepSeconds) -> Timeline:
    walk = _Walk(step)
    walk.work("host", None, step.host)
    order = pipeline_order(len(step.waves), max(1, step.in_flight), gathered_ahead=step.gathered_ahead)
    for action, wave in order:
        if action is Action.LOCAL:
            walk.orthogonalise("local", None, step.local)
        elif action is Action.DURING_LAST_SCATTER:
            walk.work("adamw", None, step.adamw)
        elif action is Action.GATHER:
            walk.work("momentum", wave, step.waves[wave].momentum)
            walk.send("gather", wave, step.waves[wave].gather)
        elif action is Action.COMPUTE:
            walk.wait("gather", wave)
            walk.orthogonalise("orthogonalise", wave, step.waves[wave].orthogonalise)
            walk.send("scatter", wave, step.waves[wave].scatter)
        else:
            walk.wait("scatter", wave)
            walk.work("update", wave, step.waves[wave].update)
    return Timeline(step, tuple(walk.phases))


class _Walk:
    """The clocks of all ranks, while one action after the other is taken."""

    def __init__(self, step: StepSeconds) -> None:
        self._busy, self._slower = step.busy, step.slower_beside_exchange
        self._now = [0.0] * len(step.ranks)  # when each rank's device is free
        self._links_free = 0.0
        self._arrivals: dict[tuple[str, int], float] = {}
        self.phases: list[Phase] = []

    def orthogonalise(self, kind: str, wave: int | None, seconds: Seconds) -> None:
        """Work that is slower while an exchange is in flight."""
        beside = (max(0.0, min(more, self._links_free - now)) for now, more in zip(self._now, seconds, strict=True))
        self.work(kind, wave, [more + self._slower * shared for more, shared in zip(seconds, beside, strict=True)])

    def work(self, kind: str, wave: int | None, seconds: Seconds) -> None:
        start, self._now = self._now, [now + more for now, more in zip(self._now, seconds, strict=True)]
        self.phases.append(Phase(kind, wave, start, self._now))

    def send(self, kind: str, wave: int, seconds: Seconds) -> None:
        """An exchange that begins when the devices and the links of all ranks are free."""
        if self._busy == 1.0:
            self.work(kind, wave, seconds)
            self._arrivals[kind, wave] = max(self._now, default=0.0)
            return
        begin = max(self._links_free, max(self._now, default=0.0))
        if self._busy:
            self.work("copy", wave, [self._busy * more for more in seconds])
        arrival = max(begin + max(seconds, default=0.0), max(self._now, default=0.0) if self._busy else 0.0)
        self._links_free = self._arrivals[kind, wave] = arrival
        self.phases.append(Phase(kind, wave, [begin] * len(self._now), [begin + more for more in seconds]))

    def wait(self, kind: str, wave: int) -> None:
        arrival = self._arrivals[kind, wave]
        start, self._now = self._now, [max(now, arrival) for now in self._now]
        self.phases.append(Phase("wait", wave, start, self._now))
