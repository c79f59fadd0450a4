"""The report: tables with ``rich`` on a terminal, plain text elsewhere, JSON for tools."""

from __future__ import annotations

import io
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

import meshmuon

from ...plan import counted
from .context import STATUSES, Check, Outcome

if TYPE_CHECKING:
    from rich.table import Table

FORMAT, VERSION = "meshmuon doctor", 1
_WIDTH = 120
_MARKS = {"passed": "✔", "failed": "✘", "skipped": "-", "not run": "?"}
_PLAIN_MARKS = {"passed": "ok  ", "failed": "FAIL", "skipped": "-   ", "not run": "?   "}
_COLOURS = {"passed": "green", "failed": "bold red", "skipped": "dim", "not run": "yellow"}


def _heading(ranks: int) -> str:
    return f"meshmuon doctor {meshmuon.__version__} on {counted(ranks, 'rank')}"


def _closing(outcomes: Sequence[Outcome], seconds: float) -> str:
    counts = Counter(outcome.status for outcome in outcomes)
    parts = [f"{counts[status]} {status}" for status in STATUSES if counts[status]]
    return f"{', '.join(parts)} in {seconds:.0f} s"


class PlainReport:
    """Lines of text, for pipes, logs and bug reports."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._encoding = stream, stream.encoding or "utf-8"
        self._marks = _MARKS if "✔✘".encode(self._encoding, "ignore") else _PLAIN_MARKS
        self._section = ""
        self.is_read = True

    def title(self, ranks: int, environment: Mapping[str, str]) -> None:
        self._write(_heading(ranks))
        self._write("\nenvironment")
        for name, value in environment.items():
            self._write(_indented(f"  {name:<10} ", value))

    def begin(self, check: Check) -> None:
        if check.section != self._section:
            self._section = check.section
            self._write(f"\n{self._section}")

    def end(self, outcome: Outcome) -> None:
        head = f"  {self._marks[outcome.status]} {outcome.check.name:<17} {outcome.seconds:5.1f} s  "
        self._write(_indented(head, outcome.detail))
        if outcome.advice:
            self._write(_indented(" " * len(head), f"What to do: {outcome.advice}"))

    def close(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        self._write(f"\n{_closing(outcomes, seconds)}")

    def _write(self, line: str) -> None:
        if not self.is_read:
            return
        try:
            self._stream.write(line.encode(self._encoding, "replace").decode(self._encoding) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            # The checks go on: other ranks are in them, and files may be asked for.
            self.is_read = False
            print("meshmuon doctor: the other end of the pipe has stopped reading. Use --json FILE.", file=sys.stderr)


def _indented(head: str, text: str) -> str:
    return textwrap.fill(head + text, _WIDTH, subsequent_indent=" " * len(head), break_long_words=False, break_on_hyphens=False)


class RichReport:
    """A line that says what is running, and tables at the end."""

    is_read = True

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._status = self._console.status("starting")

    def title(self, ranks: int, environment: Mapping[str, str]) -> None:
        from rich.text import Text

        table = self._table(_heading(ranks), ("", ""))
        for name, value in environment.items():
            table.add_row(name, Text(value))  # as it is: rich would take [kernels] for a style
        self._console.print(table)
        self._status.start()

    def begin(self, check: Check) -> None:
        self._status.update(f"{check.name}: {check.title}")

    def end(self, outcome: Outcome) -> None:
        colour, mark, check = _COLOURS[outcome.status], _MARKS[outcome.status], outcome.check
        self._console.print(f"[{colour}]{mark}[/] {check.name:<17} {outcome.seconds:5.1f} s  {check.title}")

    def close(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        from rich.text import Text

        self._status.stop()
        for section in dict.fromkeys(outcome.check.section for outcome in outcomes):
            table = self._table(section, ("", "name", "seconds", "what was found"))
            for outcome in outcomes:
                text = Text(outcome.detail)
                if outcome.advice:
                    text.append(f"\nWhat to do: {outcome.advice}", style="bold")
                mark = Text(_MARKS[outcome.status], style=_COLOURS[outcome.status])
                if outcome.check.section == section:
                    table.add_row(mark, outcome.check.name, f"{outcome.seconds:.1f}", text)
            self._console.print(table)
        self._console.print(_closing(outcomes, seconds))

    def _table(self, title: str, columns: Sequence[str]) -> Table:
        from rich.table import Table

        table = Table(title=title, title_justify="left", show_header=any(columns))
        for column in columns:
            table.add_column(column, justify="right" if column == "seconds" else "left")
        return table


Reporter: TypeAlias = "PlainReport | RichReport"


def report_for(rank: int, stream: TextIO | None = None) -> Reporter:
    """Tables if rank 0 writes to a terminal and ``rich`` is installed, plain text if not; what other ranks write is dropped."""
    stream = stream or sys.stdout
    if rank == 0 and stream is sys.stdout and stream.isatty() and find_spec("rich") is not None:
        return RichReport()
    return PlainReport(io.StringIO() if rank else stream)


def report_as_json(
    ranks: int, environment: Mapping[str, str], outcomes: Sequence[Outcome], seconds: float, calibration: Any
) -> dict[str, Any]:
    checks = [
        {
            "name": outcome.check.name,
            "title": outcome.check.title,
            "status": outcome.status,
            "seconds": round(outcome.seconds, 3),
            "detail": outcome.detail,
            "advice": outcome.advice,
            "figures": outcome.figures,
        }
        for outcome in outcomes
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "passed": all(outcome.status in ("passed", "skipped") for outcome in outcomes),
        "ranks": ranks,
        "seconds": round(seconds, 3),
        "environment": dict(environment),
        "checks": checks,
        "calibration": calibration,
    }
