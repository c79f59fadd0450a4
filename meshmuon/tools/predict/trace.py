"""Timelines in Chrome's trace format, for Perfetto and chrome://tracing: a process per rank, with tracks for device
and links.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from ...plan import Plan
from .calibration import Calibration
from .prediction import predict
from .timeline import ON_LINKS, Phase

_TRACKS = ("device", "links")


def trace_events(ranks: Sequence[int], phases: Sequence[Phase]) -> Iterator[dict[str, object]]:
    """The spans of each of ``ranks`` without empty ones, in microseconds. Waiting is not an event, but a gap."""
    for at, rank in enumerate(ranks):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for track, name in enumerate(_TRACKS):
            yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
        for kind, wave, start, end in phases:
            if end[at] > start[at] and kind != "wait":
                name = kind if wave is None else f"{kind} {wave}"
                event: dict[str, object] = {
                    "ph": "X",
                    "pid": rank,
                    "tid": int(kind in ON_LINKS),
                    "name": name,
                    "cat": kind,
                }
                yield event | {"ts": start[at] * 1e6, "dur": (end[at] - start[at]) * 1e6}


def write_trace(timelines: Iterable[tuple[Sequence[int], Sequence[Phase]]], file: TextIO) -> None:
    """Writes timelines, each with its ranks, event by event: thousands of ranks have hundreds of thousands."""
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    separator = "\n"
    for ranks, phases in timelines:
        for event in trace_events(ranks, phases):
            file.write(separator + json.dumps(event))
            separator = ",\n"
    file.write("\n]}\n")


def trace_plan(plan: Plan, machine: Calibration | str | os.PathLike[str]) -> str:
    """The step of a plan as a timeline: write it to a file and open that in Perfetto or chrome://tracing.

    ``machine`` is what ``meshmuon doctor --save`` measured, or the name of its file.
    """
    calibration = machine if isinstance(machine, Calibration) else Calibration.load(machine)
    output = io.StringIO()
    write_trace([(plan.ranks, predict(plan, calibration).phases)], output)
    return output.getvalue()
