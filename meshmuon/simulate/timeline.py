"""When every rank does what in a step: the order of ``pipeline_order``, with times.

A rank has a device that works and links that send. The device waits only for the results of an exchange. The links serve one
exchange after the other, in the order in which they were started. An exchange begins when all ranks have started it and ends for
all of them when the slowest has ended: that is cautious where few ranks have more to send than the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO

import torch
from torch import Tensor

from ..execute.pipeline import Action, pipeline_order
from .work import StageWork


class Span(NamedTuple):
    """Something that ranks do; times are (ranks,) in seconds from the beginning of the step."""

    name: str  # momentum, gather, orthogonalise, scatter, update, local or adamw
    wave: int | None
    start: Tensor
    end: Tensor

    @property
    def on_links(self) -> bool:
        """Whether links are busy with it, not the device."""
        return self.name in ("gather", "scatter")


@dataclass(frozen=True)
class Timeline:
    """A step of one stage."""

    spans: tuple[Span, ...]
    end: Tensor  # (ranks,): when each rank has ended
    waited: Tensor  # (ranks,): seconds in which its device waited for an exchange
    exchanging: float  # seconds in which the links were busy
    host: Tensor  # (ranks,): seconds of the host, which are in ``end`` where the device had less to do

    @property
    def seconds(self) -> float:
        """Seconds of the step on its slowest rank."""
        return float(self.end.max()) if self.end.numel() else 0.0

    @property
    def waited_for(self) -> float:
        """Seconds of exchanges that the slowest rank waited for."""
        return min(self.exchanging, float(self.waited[int(self.end.argmax())])) if self.end.numel() else 0.0

    @property
    def hidden(self) -> float:
        """Seconds of exchanges during which the slowest rank had other work."""
        return self.exchanging - self.waited_for


def timeline_of(work: StageWork, in_flight: int) -> Timeline:
    """The timeline of a stage with ``in_flight`` waves at the same time."""
    waves, count = work.orthogonalise.shape
    now = torch.zeros(count, dtype=torch.float64)
    waited = torch.zeros(count, dtype=torch.float64)
    links_free, exchanging = 0.0, 0.0
    arrivals: dict[tuple[str, int], float] = {}
    spans: list[Span] = []

    def busy(name: str, wave: int | None, seconds: Tensor) -> None:
        nonlocal now
        spans.append(Span(name, wave, now, now + seconds))
        now = now + seconds

    def start(name: str, wave: int, seconds: Tensor) -> None:
        nonlocal links_free, exchanging
        duration = float(seconds.max())
        begin = max(links_free, float(now.max()))
        links_free = begin + duration
        exchanging += duration
        arrivals[name, wave] = links_free
        spans.append(Span(name, wave, torch.full_like(now, begin), torch.full_like(now, begin) + seconds))

    def wait(name: str, wave: int) -> None:
        nonlocal now, waited
        arrived = torch.clamp(now, min=arrivals[name, wave])
        waited = waited + (arrived - now)
        now = arrived

    for action, wave in pipeline_order(waves, max(1, in_flight)):
        if action is Action.GATHER:
            busy("momentum", wave, work.momentum[wave])
            start("gather", wave, work.gather[wave])
        elif action is Action.LOCAL:
            busy("local", None, work.local)
        elif action is Action.COMPUTE:
            wait("gather", wave)
            busy("orthogonalise", wave, work.orthogonalise[wave])
            start("scatter", wave, work.scatter[wave])
        elif action is Action.DURING_LAST_SCATTER:
            busy("adamw", None, work.adamw)
        else:
            wait("scatter", wave)
            busy("update", wave, work.update[wave])
    end = torch.maximum(now, work.host)  # the host runs ahead of the device, unless it is the slower one
    return Timeline(tuple(spans), end, waited, exchanging, work.host)


def trace_events(timeline: Timeline, ranks: Sequence[int]) -> Iterator[dict[str, object]]:
    """Events of Chrome's trace format: one process per rank, with a track for its device and one for its links."""
    starts = [span.start.tolist() for span in timeline.spans]
    ends = [span.end.tolist() for span in timeline.spans]
    for at, rank in enumerate(ranks):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        for track, name in enumerate(("device", "links")):
            yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
        for span, start, end in zip(timeline.spans, starts, ends, strict=True):
            if end[at] > start[at]:
                title = span.name if span.wave is None else f"{span.name} {span.wave}"
                event: dict[str, object] = {"ph": "X", "pid": rank, "tid": int(span.on_links), "name": title, "cat": span.name}
                yield event | {"ts": start[at] * 1e6, "dur": (end[at] - start[at]) * 1e6}


def write_trace(timelines: Sequence[tuple[Timeline, Sequence[int]]], file: TextIO) -> None:
    """Writes the timelines of all stages, each with its ranks, event by event: thousands of ranks have millions."""
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    separator = "\n"
    for timeline, ranks in timelines:
        for event in trace_events(timeline, ranks):
            file.write(separator + json.dumps(event))
            separator = ",\n"
    file.write("\n]}\n")
