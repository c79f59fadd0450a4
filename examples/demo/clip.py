"""The comparison without and with QK-clip: what the largest attention logits did, in figures, words and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from demo.compare import Findings
from demo.figures import GREY, drawing
from demo.optimizers import CONTENDERS
from demo.train import RunResult

_EXPLANATION = """
Both runs are meshmuon with the same options, weights and bytes; the clipped one has QK-clip. A step's logit is the
largest of all layers, heads and sequences in its forward. The clip answers after that step what its forward has seen:
the first step above the threshold comes before the clip has done anything, and a later one may be above it by what one
update and other bytes add.
"""
_WITH_NORM = """
QK-norm is on: queries and keys are normalised after their projections, so scaling the projections does not change
the logits.
"""


@dataclass(frozen=True, slots=True)
class LogitSummary:
    """The largest attention logits of one run. Steps count from 1; a step's logit is that of its forward, before its
    update.

    Attributes:
        steps: how many there were.
        largest: over all steps, first reached at `largest_at`.
        last: of the last step.
        above: how many steps exceeded the threshold.
        first_above: the first of them, which a clip answers first.
        largest_before: until the first of them, itself included: no clip has acted yet.
        largest_after: in the steps after it, where a clip has acted; None if there are none.
    """

    steps: int
    largest: float
    largest_at: int
    last: float
    above: int
    first_above: int | None
    largest_before: float
    largest_after: float | None


def summarise(logits: Sequence[float], threshold: float) -> LogitSummary | None:
    """The summary of a curve with one logit per step; None if there is none."""
    if not logits:
        return None
    largest = max(logits)
    over = [step for step, logit in enumerate(logits, 1) if logit > threshold]
    first = over[0] if over else len(logits)
    return LogitSummary(
        steps=len(logits),
        largest=largest,
        largest_at=logits.index(largest) + 1,
        last=logits[-1],
        above=len(over),
        first_above=first if over else None,
        largest_before=max(logits[:first]),
        largest_after=max(logits[first:], default=None),
    )


def clip_findings(results: Sequence[RunResult], threshold: float, *, qk_norm: bool) -> Findings:
    """What the runs without and with QK-clip have shown so far."""
    of_all = {result.name: summarise(result.largest_logit, threshold) for result in results}
    summaries = {name: summary for name, summary in of_all.items() if summary is not None}
    return Findings(
        headline=_headline(summaries, threshold),
        log={
            "qk_clip": {"threshold": threshold, "runs": {name: asdict(summary) for name, summary in summaries.items()}}
        },
        section=_section(summaries, threshold, _EXPLANATION + (_WITH_NORM if qk_norm else "")),
        picture="logits.png",
        draw=lambda path: draw_logits(path, results, threshold),
    )


def _headline(summaries: Mapping[str, LogitSummary], threshold: float) -> str:
    sentences = []
    for name, summary in summaries.items():
        which = "With" if CONTENDERS[name].clipped else "Without"
        text = f"{which} QK-clip the largest attention logit of {summary.steps} steps was {summary.largest:.1f}"
        text += f", {summary.largest / threshold:.2f} times the threshold of {threshold:g}"
        sentences.append(
            text + (f"; {summary.above / summary.steps:.0%} of the steps were above it." if summary.above else ".")
        )
    return " ".join(sentences) or "Nothing was trained."


def _section(summaries: Mapping[str, LogitSummary], threshold: float, explanation: str) -> str:
    columns = (
        "run",
        "largest (at step)",
        "last step",
        "first step above",
        "largest until then",
        "largest after it",
        "largest overshoot after it",
        "steps above",
    )
    rows = [f"## Largest attention logits (threshold {threshold:g})\n", f"| {' | '.join(columns)} |"]
    rows.append("|---" + "|--:" * (len(columns) - 1) + "|")
    for name, summary in summaries.items():
        after, overshoot = "–", "–"
        if summary.largest_after is not None:
            after, overshoot = f"{summary.largest_after:.1f}", f"{max(0.0, summary.largest_after / threshold - 1):.1%}"
        largest, last = f"{summary.largest:.1f} ({summary.largest_at})", f"{summary.last:.1f}"
        above = f"{summary.above} of {summary.steps} ({summary.above / summary.steps:.0%})"
        rows.append(
            f"| {CONTENDERS[name].title} | {largest} | {last} | {summary.first_above or 'none'} "
            f"| {summary.largest_before:.1f} | {after} | {overshoot} | {above} |"
        )
    return "\n".join(rows) + "\n" + explanation


def draw_logits(path: Path, results: Sequence[RunResult], threshold: float) -> None:
    """Loss and largest logit over steps, with the threshold."""
    with drawing(path, (11, 4.2), dpi=130) as figure:
        loss, logit = figure.subplots(1, 2)
        for result in results:
            color, steps = CONTENDERS[result.name].color, range(1, result.steps_done + 1)
            loss.plot(steps, result.train_loss, color=color, alpha=0.25, linewidth=0.8)
            points = result.evals
            loss.plot(
                [p.step for p in points], [p.loss for p in points], "o-", color=color, markersize=3, label=result.title
            )
            logit.plot(steps, result.largest_logit, color=color, linewidth=1.2, label=result.title)
            for point in result.resumed:
                for axes in (loss, logit):
                    axes.axvline(point.step, color=color, linestyle=":", linewidth=1.0)
        logit.axhline(threshold, color=GREY, linestyle="--", linewidth=1.0, label=f"threshold {threshold:g}")
        if all(value > 0 for result in results for value in result.largest_logit):
            logit.set_yscale("log")
        loss.set(xlabel="step", ylabel="loss (nats per byte)", title="validation loss (faint: training loss)")
        logit.set(xlabel="step", title="largest attention logit")
        for axes in (loss, logit):
            axes.legend()
