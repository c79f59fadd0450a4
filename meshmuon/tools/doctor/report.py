"""The report: tables with ``rich`` on a terminal, plain text elsewhere, JSON for tools."""

from __future__ import annotations

import io
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

import meshmuon

from .catalog import MEASUREMENTS
from .check import STATUSES, Check, Outcome

if TYPE_CHECKING:
    from rich.table import Table

FORMAT, VERSION = "meshmuon doctor", 1
_WIDTH = 120
_MARKS = {"passed": "✔", "failed": "✘", "skipped": "-", "not run": "?"}
_PLAIN_MARKS = {"passed": "ok  ", "failed": "FAIL", "skipped": "-   ", "not run": "?   "}
_COLOURS = {"passed": "green", "failed": "bold red", "skipped": "dim", "not run": "yellow"}


def _section(name: str) -> str:
    return "measurements" if name in MEASUREMENTS else "checks"


def heading(ranks: int) -> str:
    """The first line."""
    return f"meshmuon doctor {meshmuon.__version__} on {ranks} {'rank' if ranks == 1 else 'ranks'}"


def closing(outcomes: Sequence[Outcome], seconds: float) -> str:
    """The last line."""
    counts = Counter(outcome.status for outcome in outcomes)
    parts = [f"{counts[status]} {status}" for status in STATUSES if counts[status]]
    return f"{', '.join(parts)} in {seconds:.0f} s"


class PlainReport:
    """Lines of text, for pipes, logs and bug reports."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._marks = _MARKS if _can_write(stream, "✔✘") else _PLAIN_MARKS
        self._last_section = ""
        self.is_read = True

    def title(self, ranks: int, environment: Mapping[str, str]) -> None:
        """Heading and environment."""
        self._line(heading(ranks))
        self._line("\nenvironment")
        for name, value in environment.items():
            self._line(_indented(f"  {name:<10} ", value))

    def begin(self, check: Check) -> None:
        """The heading of the section."""
        if _section(check.name) != self._last_section:
            self._last_section = _section(check.name)
            self._line(f"\n{self._last_section}")

    def end(self, outcome: Outcome) -> None:
        """One line, or a few."""
        head = f"  {self._marks[outcome.status]} {outcome.name:<17} {outcome.seconds:5.1f} s  "
        self._line(_indented(head, outcome.detail))
        if outcome.advice:
            self._line(_indented(" " * len(head), f"What to do: {outcome.advice}"))

    def close(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        """The last line."""
        self._line(f"\n{closing(outcomes, seconds)}")

    def _line(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        if not self.is_read:
            return
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            # The checks go on: other ranks are in them, and files may be asked for.
            self.is_read = False
            print("meshmuon doctor: whoever read the output has stopped reading. Use --json FILE.", file=sys.stderr)


def _can_write(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _indented(head: str, text: str) -> str:
    return textwrap.fill(head + text, _WIDTH, subsequent_indent=" " * len(head), break_long_words=False, break_on_hyphens=False)


class RichReport:
    """Tables on a terminal, and a line that says what is running."""

    is_read = True

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._status = self._console.status("starting")

    def title(self, ranks: int, environment: Mapping[str, str]) -> None:
        """Heading and environment."""
        from rich.text import Text

        table = self._table(heading(ranks), ("", ""))
        for name, value in environment.items():
            table.add_row(name, Text(value))  # as it is: rich would take [kernels] for a style
        self._console.print(table)
        self._status.start()

    def begin(self, check: Check) -> None:
        """What is running."""
        self._status.update(f"{check.name}: {check.title}")

    def end(self, outcome: Outcome) -> None:
        """One line while others still run; the tables come at the end."""
        colour, mark = _COLOURS[outcome.status], _MARKS[outcome.status]
        self._console.print(f"[{colour}]{mark}[/] {outcome.name:<17} {outcome.seconds:5.1f} s  {outcome.title}")

    def close(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        """The tables and the last line."""
        from rich.text import Text

        self._status.stop()
        for section in ("checks", "measurements"):
            chosen = [outcome for outcome in outcomes if _section(outcome.name) == section]
            if not chosen:
                continue
            table = self._table(section, ("", "name", "seconds", "what was found"))
            for outcome in chosen:
                text = Text(outcome.detail)
                if outcome.advice:
                    text.append(f"\nWhat to do: {outcome.advice}", style="bold")
                mark = Text(_MARKS[outcome.status], style=_COLOURS[outcome.status])
                table.add_row(mark, outcome.name, f"{outcome.seconds:.1f}", text)
            self._console.print(table)
        self._console.print(closing(outcomes, seconds))

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
    """The whole report for tools."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "passed": all(outcome.status in ("passed", "skipped") for outcome in outcomes),
        "ranks": ranks,
        "seconds": round(seconds, 3),
        "environment": dict(environment),
        "checks": [{**asdict(outcome), "seconds": round(outcome.seconds, 3)} for outcome in outcomes],
        "calibration": calibration,
    }
