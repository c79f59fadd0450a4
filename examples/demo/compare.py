"""Arithmetic of meshmuon against AdamW: the same step, the same time, and how soon one reaches the other's loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from demo.train import EvalPoint, RunResult


@dataclass(frozen=True, slots=True)
class Findings:
    """What a comparison, of whatever, puts into the report.

    Attributes:
        headline: how it went, in a sentence or two.
        log: its entries in log.json.
        section: its part of the page, in Markdown.
        picture: name of the file of its plot.
        draw: draws the plot.
    """

    headline: str
    log: dict[str, Any]
    section: str
    picture: str
    draw: Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Validation losses of the two runs where both can be read; None where they cannot.

    At equal time the run that needs longer is read between two of its evaluations, in the middle of its lr
    schedule, which flatters the other one.
    """

    step: int
    muon_at_step: float
    adamw_at_step: float
    seconds: float
    muon_at_time: float
    adamw_at_time: float
    adamw_best: float
    muon_steps_to_adamw_best: float | None
    muon_seconds_to_adamw_best: float | None
    adamw_steps: int
    adamw_seconds: float

    @property
    def muon_wins(self) -> bool:
        return self.muon_at_step < self.adamw_at_step


def compare(muon: RunResult, adamw: RunResult) -> Comparison | None:
    """Compare as far as both runs went; None if they share no evaluation after the first step."""
    at_adamw = {point.step: point.loss for point in adamw.evals}
    shared = [point for point in muon.evals if point.step > 0 and point.step in at_adamw]
    if not shared:
        return None
    seconds = min(muon.evals[-1].seconds, adamw.evals[-1].seconds)
    best = min(point.loss for point in adamw.evals)
    reached = first_reach(muon.evals, best)
    return Comparison(
        step=shared[-1].step,
        muon_at_step=shared[-1].loss,
        adamw_at_step=at_adamw[shared[-1].step],
        seconds=seconds,
        muon_at_time=loss_at(muon.evals, seconds),
        adamw_at_time=loss_at(adamw.evals, seconds),
        adamw_best=best,
        muon_steps_to_adamw_best=None if reached is None else reached[0],
        muon_seconds_to_adamw_best=None if reached is None else reached[1],
        adamw_steps=adamw.evals[-1].step,
        adamw_seconds=adamw.evals[-1].seconds,
    )


def loss_at(points: Sequence[EvalPoint], seconds: float) -> float:
    """The loss after `seconds` of training, read off the straight line between two evaluations."""
    for before, after in pairwise(points):
        if before.seconds <= seconds <= after.seconds:
            share = (seconds - before.seconds) / max(after.seconds - before.seconds, 1e-12)
            return before.loss + share * (after.loss - before.loss)
    raise ValueError(f"no evaluations around {seconds:.1f} s")


def first_reach(points: Sequence[EvalPoint], loss: float) -> tuple[float, float] | None:
    """Step and seconds at which the line through the evaluations first comes down to `loss`."""
    for before, after in pairwise(points):
        if after.loss <= loss <= before.loss:
            share = (before.loss - loss) / max(before.loss - after.loss, 1e-12)
            return (
                before.step + share * (after.step - before.step),
                before.seconds + share * (after.seconds - before.seconds),
            )
    return None
