"""The health of a run: what meshmuon measures at every tenth step, as a page of plots and as alarms in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from demo.figures import drawing
from meshmuon import Muon
from meshmuon.metrics import Health

EVERY = 10
KEPT = ("gradient_norm", "update_to_weight", "momentum_stable_rank", "weight_sigma_max", "below_bound", "orthogonality")
PICTURE = "health.png"


class HealthLog:
    """Writes down the measurements of one run, as JSON can hold them.

    Args:
        optimizer: any optimizer; only meshmuon measures.
        points: where measurements go.
        alarms: where alarms go, as text.
    """

    def __init__(self, optimizer: object, points: list[dict[str, Any]], alarms: list[str]) -> None:
        self._optimizer = optimizer if isinstance(optimizer, Muon) else None
        self._health = Health()
        self._points, self._alarms = points, alarms
        self._seen = 0

    def after_step(self, step: int) -> None:
        """Looks for a new measurement after step number `step`, from 1 on."""
        metrics = {} if self._optimizer is None else self._optimizer.metrics()
        if not metrics or metrics["step"] == self._seen:
            return
        self._seen = metrics["step"]
        kinds = {name: _numbers(values) for name, values in metrics["kinds"].items() if "(adamw)" not in name}
        self._points.append(
            {"step": step, "kinds": kinds, "seconds": metrics["seconds"], "balance": metrics["balance"]}
        )
        self._alarms += [f"step {step}: {alarm.text}" for alarm in self._health.check(metrics)]


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    """What is plotted of a kind of matrices; a weight that is still zero has no ratio."""
    return {key: values[key] if math.isfinite(values[key]) else None for key in KEPT if key in values}


def section(title: str, points: Sequence[Mapping[str, Any]], alarms: Sequence[str], *, drawn: bool) -> str:
    """The part of the report about one run's health; empty if nothing was measured."""
    if not points:
        return ""
    lines = [
        f"## Health of the {title} run\n",
        f"Measured at every {EVERY}th step where the matrices are whole; docs/metrics.md says how.\n",
    ]
    if drawn:
        lines.append(f"![health]({PICTURE})\n")
    lines += [f"- **{alarm}**" for alarm in alarms] if alarms else ["No alarm was raised."]
    return "\n".join(lines) + "\n"


PANELS = (
    ("update_to_weight", "update ÷ weight", "log"),
    ("gradient_norm", "gradient norm", "log"),
    ("momentum_stable_rank", "stable rank of the momentum", "linear"),
    ("weight_sigma_max", "largest singular value of the weights", "linear"),
    ("below_bound", "share of directions below the scheme's bound", "linear"),
)


def draw_health(path: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """One page: five values by kind of matrix, and where the seconds of a step go."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    with drawing(path, (13, 7.2), dpi=120) as figure:
        axes = figure.subplots(2, 3).flatten()
        kinds = list(dict.fromkeys(kind for point in points for kind in point["kinds"]))
        for axis, (key, title, scale) in zip(axes, PANELS, strict=False):
            for number, kind in enumerate(kinds):
                steps, values = _series(points, kind, key)
                axis.plot(steps, values, color=f"C{number}", linewidth=1.4, label=_short(kind))
            axis.set(title=title, xlabel="step", yscale=scale)
            if scale == "linear":
                axis.set_ylim(bottom=0)
            else:  # plain numbers, also where the curves span less than a power of ten
                axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axis.yaxis.set_minor_locator(NullLocator())
        _draw_seconds(axes[-1], points)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)


def _draw_seconds(axis: Any, points: Sequence[Mapping[str, Any]]) -> None:
    """Milliseconds of each phase on the first process, one on top of the other, without what measuring takes."""
    measured = [point for point in points if point["seconds"]]
    phases = [name for name in (measured[0]["seconds"] if measured else {}) if name != "metrics"]
    used = [name for name in phases if any(point["seconds"][name] > 0 for point in measured)]
    if used:
        stacks = [[1e3 * max(0.0, point["seconds"][name]) for point in measured] for name in used]
        greys = [str(0.3 + 0.5 * k / max(1, len(used) - 1)) for k in range(len(used))]
        axis.stackplot([point["step"] for point in measured], stacks, labels=used, colors=greys)
        axis.legend(loc="upper right", fontsize=8, reverse=True)
    axis.set(title="milliseconds of an optimizer step", xlabel="step")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def _series(points: Iterable[Mapping[str, Any]], kind: str, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a kind of matrices, without steps at which it has none."""
    found = [(int(point["step"]), point["kinds"].get(kind, {}).get(key)) for point in points]
    known = [(step, float(value)) for step, value in found if value is not None]
    return [step for step, _ in known], [value for _, value in known]


def _short(kind: str) -> str:
    """Without what all kinds have in common."""
    return kind.removeprefix("layers.*.").removesuffix(".weight")
