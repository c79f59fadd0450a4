"""The report: a table in plain text, with colours and progress on a terminal if ``rich`` is installed, and JSON for
tools.
"""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

import meshmuon

from ...plan import counted
from .context import STATUSES, Check, Outcome

if TYPE_CHECKING:
    from rich.console import Console

FORMAT, VERSION = "meshmuon doctor", 1
_WIDTH = 120
_NAMED = 21  # characters up to the end of a check's name
_MARKS = {"passed": "✔", "failed": "✘", "skipped": "-", "not run": "?"}
_PLAIN_MARKS = {"passed": "ok  ", "failed": "FAIL", "skipped": "-   ", "not run": "?   "}
_COLOURS = {"passed": "green", "failed": "bold red", "skipped": "dim", "not run": "yellow"}


class Report:
    """Lines of text on ``stream``, None on ranks that report nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream, self._encoding = stream, stream.encoding or "utf-8" if stream else "utf-8"
        self._marks = _MARKS if "✔✘".encode(self._encoding, "ignore") else _PLAIN_MARKS
        self._section, self._width = "", _WIDTH
        self._console: Console | None = None
        if stream is not None and stream.isatty() and find_spec("rich") is not None:
            from rich.console import Console

            self._console = Console(file=stream, highlight=False)
            self._width = self._console.width
            self._progress = self._console.status("starting")
        self.is_read = True

    def title(self, ranks: int, environment: Mapping[str, str]) -> None:
        self._write(f"meshmuon doctor {meshmuon.__version__} on {counted(ranks, 'rank')}")
        self._write("\nenvironment")
        for name, value in environment.items():
            self._write(self._indented(f"  {name:<10} ", value))

    def begin(self, check: Check) -> None:
        if check.section != self._section:
            self._section = check.section
            self._write(f"\n{self._section}")
        if self._console is not None:
            self._progress.update(f"{check.name}: {check.title}")
            self._progress.start()

    def end(self, outcome: Outcome) -> None:
        head = f"  {self._marks[outcome.status]} {outcome.check.name:<17} {outcome.seconds:5.1f} s  "
        self._write(self._indented(head, outcome.detail), _COLOURS[outcome.status])
        if outcome.advice:
            self._write(self._indented(" " * len(head), f"What to do: {outcome.advice}"))

    def close(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        if self._console is not None:
            self._progress.stop()
        counts = Counter(outcome.status for outcome in outcomes)
        parts = [f"{counts[status]} {status}" for status in STATUSES if counts[status]]
        self._write(f"\n{', '.join(parts)} in {seconds:.0f} s")

    def _indented(self, head: str, text: str) -> str:
        indent = " " * len(head)
        return textwrap.fill(
            head + text, self._width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )

    def _write(self, line: str, style: str = "") -> None:
        if self._stream is None or not self.is_read:
            return
        line = line.encode(self._encoding, "replace").decode(self._encoding)
        try:
            if self._console is not None:
                from rich.text import Text

                text = Text(line)  # as it is: rich would take [kernels] for a style
                text.stylize(style, 0, _NAMED)
                self._console.print(text)
            else:
                self._stream.write(f"{line}\n")
                self._stream.flush()
        except BrokenPipeError:
            # The checks go on: other ranks are in them, and files may be asked for.
            self.is_read = False
            print("meshmuon doctor: the other end of the pipe has stopped reading. Use --json FILE.", file=sys.stderr)


def report_as_json(
    ranks: int, environment: Mapping[str, str], outcomes: Sequence[Outcome], seconds: float, calibration: Any
) -> dict[str, Any]:
    checks = [
        {"name": outcome.check.name, "title": outcome.check.title}
        | {key: getattr(outcome, key) for key in ("status", "seconds", "detail", "advice", "figures")}
        | {"seconds": round(outcome.seconds, 3)}
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
