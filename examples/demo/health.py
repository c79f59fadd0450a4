"""The health of a run: what meshmuon measures at every tenth step, as a page of plots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from demo.figures import drawing
from meshmuon import Muon

EVERY = 10
PICTURE = "health.png"


class HealthLog:
    """Writes down the measurements of one run, as JSON can hold them.

    Args:
        optimizer: any optimizer; only meshmuon measures.
        points: where measurements go.
    """

    def __init__(self, optimizer: object, points: list[dict[str, Any]]) -> None:
        self._optimizer = optimizer if isinstance(optimizer, Muon) else None
        self._points = points
        self._seen = 0

    def after_step(self, step: int) -> None:
        """Looks for a new measurement after step number `step`, from 1 on."""
        metrics = {} if self._optimizer is None else self._optimizer.metrics()
        if not metrics or metrics["step"] == self._seen:
            return
        self._seen = metrics["step"]
        kinds = {name: _numbers(values) for name, values in metrics["kinds"].items() if "(adamw)" not in name}
        self._points.append({"step": step, "kinds": kinds})


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    """What is plotted of a kind of matrices; a weight that is still zero has no ratio."""
    return {key: values[key] if math.isfinite(values[key]) else None for key, _ in PANELS if key in values}


def section(title: str, points: Sequence[Mapping[str, Any]], *, drawn: bool) -> str:
    """The part of the report about one run's health; empty if nothing was measured or drawn."""
    if not points or not drawn:
        return ""
    return (
        f"## Health of the {title} run\n\n"
        f"Measured at every {EVERY}th step where the matrices are whole; docs/metrics.md says how.\n\n"
        f"![health]({PICTURE})\n"
    )


PANELS = (
    ("update_to_weight", "update ÷ weight"),
    ("gradient_norm", "gradient norm"),
    ("update_rms", "rms of an update"),
    ("momentum_sigma_max", "largest singular value of the momentum"),
)


def draw_health(path: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """One page: four values by kind of matrix."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    with drawing(path, (10, 7.2), dpi=120) as figure:
        axes = figure.subplots(2, 2).flatten()
        kinds = list(dict.fromkeys(kind for point in points for kind in point["kinds"]))
        for axis, (key, title) in zip(axes, PANELS, strict=True):
            for number, kind in enumerate(kinds):
                steps, values = _series(points, kind, key)
                axis.plot(steps, values, color=f"C{number}", linewidth=1.4, label=_short(kind))
            axis.set(title=title, xlabel="step", yscale="log")
            # Plain numbers, also where the curves span less than a power of ten.
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.yaxis.set_minor_locator(NullLocator())
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)


def _series(points: Iterable[Mapping[str, Any]], kind: str, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a kind of matrices, without steps at which it has none."""
    found = [(int(point["step"]), point["kinds"].get(kind, {}).get(key)) for point in points]
    known = [(step, float(value)) for step, value in found if value is not None]
    return [step for step, _ in known], [value for _, value in known]


def _short(kind: str) -> str:
    """Without what all kinds have in common."""
    return kind.removeprefix("layers.*.").removesuffix(".weight")
