"""Timelines in Chrome's trace format, for Perfetto and chrome://tracing: a process per rank, with tracks for device and links."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from .timeline import Phase

_TRACKS = ("device", "links")
_ON_LINKS = ("gather", "scatter")


def trace_events(ranks: Sequence[int], phases: Sequence[Phase]) -> Iterator[dict[str, object]]:
    """What each of ``ranks`` does, without what takes no time; times are in microseconds. Waiting is not an event, but a gap."""
    for at, rank in enumerate(ranks):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for track, name in enumerate(_TRACKS):
            yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
        for kind, wave, start, end in phases:
            if end[at] > start[at] and kind != "wait":
                name = kind if wave is None else f"{kind} {wave}"
                event: dict[str, object] = {"ph": "X", "pid": rank, "tid": int(kind in _ON_LINKS), "name": name, "cat": kind}
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
