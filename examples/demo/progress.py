"""Progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

SMOOTHING = 0.9
PLAIN_LINES = 10


class Progress(Protocol):
    """What the training loop tells, step by step."""

    def step(self, done: int, loss: float, seconds: float, logit: float | None = None) -> None:
        """`done` steps are complete; the last had training loss `loss` and took `seconds`.

        `logit` is its largest attention logit, where it is watched.
        """

    def evaluated(self, step: int, loss: float) -> None:
        """The validation loss after `step` steps."""


class _Average:
    """Exponential mean that is unbiased from the first value on."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def update(self, value: float) -> float:
        self._sum = SMOOTHING * self._sum + (1 - SMOOTHING) * value
        self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        return self._sum / self._weight


def _shown(logit: float | None, gap: str) -> str:
    return "" if logit is None else f"{gap}largest logit {logit:.1f}"


class PlainProgress:
    """About ten lines per run, for logs and pipes."""

    def __init__(self, title: str, steps: int, tokens_per_step: int, done: int = 0) -> None:
        self.title, self.steps, self.tokens_per_step, self._done_before = title, steps, tokens_per_step, done
        self._every = max(1, steps // PLAIN_LINES)
        self._loss, self._seconds = _Average(), _Average()
        self._begun = time.perf_counter()
        self._valid = float("nan")

    def step(self, done: int, loss: float, seconds: float, logit: float | None = None) -> None:
        loss, seconds = self._loss.update(loss), self._seconds.update(seconds)
        if done % self._every and done != self.steps:
            return
        left = (time.perf_counter() - self._begun) / (done - self._done_before) * (self.steps - done)
        print(
            f"{self.title:>8}  step {done}/{self.steps}  loss {loss:.3f}  valid "
            f"{self._valid:.3f}{_shown(logit, '  ')}  {self.tokens_per_step / seconds:,.0f} tokens/s  "
            f"{1e3 * seconds:.0f} ms/step  ETA {left:.0f} s",
            flush=True,
        )

    def evaluated(self, step: int, loss: float) -> None:
        self._valid = loss
        if step == self.steps or step == self._done_before == 0:
            print(f"{self.title:>8}  validation loss after step {step}: {loss:.4f}", flush=True)


class QuietProgress:
    """Nothing: what processes other than the first show."""

    def step(self, done: int, loss: float, seconds: float, logit: float | None = None) -> None:
        pass

    def evaluated(self, step: int, loss: float) -> None:
        pass


class RichProgress:
    """A live bar."""

    def __init__(self, bar: Bar, title: str, steps: int, tokens_per_step: int, done: int = 0) -> None:
        self.tokens_per_step = tokens_per_step
        self._loss, self._seconds = _Average(), _Average()
        self._bar = bar
        self._task = bar.add_task(title, total=steps, completed=done, loss="-", valid="-", logit="", speed="")

    def step(self, done: int, loss: float, seconds: float, logit: float | None = None) -> None:
        loss, seconds = self._loss.update(loss), self._seconds.update(seconds)
        speed = f"{self.tokens_per_step / seconds:,.0f} tokens/s {1e3 * seconds:.0f} ms/step"
        self._update(completed=done, loss=f"{loss:.3f}", logit=_shown(logit, " "), speed=speed)

    def evaluated(self, step: int, loss: float) -> None:
        self._update(valid=f"{loss:.3f}")

    def _update(self, **fields: Any) -> None:
        self._bar.update(self._task, **fields)


def _rich_bar() -> Bar:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("[bold]{task.description:>8}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]} valid {task.fields[valid]}{task.fields[logit]} {task.fields[speed]} ETA"),
        TimeRemainingColumn(compact=True),
        # The estimate looks back over a minute: evaluations pause the bar now and then.
        speed_estimate_period=60.0,
        expand=True,
    )


@contextmanager
def show_progress(title: str, steps: int, tokens_per_step: int, done: int = 0) -> Iterator[Progress]:
    """A live bar if standard output is a terminal and `rich` is installed, else plain lines.

    `done` steps were made before: the bar starts there, and the estimate of the time left does not count them.
    """
    if sys.stdout.isatty():
        try:
            bar = _rich_bar()
        except ImportError:
            print("Install `rich` for a live progress bar.")
        else:
            with bar:
                yield RichProgress(bar, title, steps, tokens_per_step, done)
            return
    yield PlainProgress(title, steps, tokens_per_step, done)
