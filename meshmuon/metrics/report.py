"""From the numbers of a measured step to a plain dict; nothing here touches a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..device import Mark
from ..ortho import Scheme
from ..plan import Plan
from .numbers import PHASES, Column, Measured, Numbers
from .recorder import StepRecorder
from .spectra import bound_of, largest_singular_values

Values: TypeAlias = dict[str, float]


class _Row:
    """What is known of one matrix, or of one parameter of AdamW."""

    def __init__(self, row: Sequence[float], measured: Measured, lr: float, relative_sigma: float, *, vectors: bool) -> None:
        self.measured, self.lr, self.relative_sigma = measured, lr, relative_sigma
        self.gradient, self.weight, update = (math.sqrt(square) for square in row[:3])
        self.update = abs(lr) * update
        self.momentum, self.below_bound = math.sqrt(row[Column.MOMENTUM]), row[Column.DEFECTS + 1]
        self.orthogonality = math.sqrt(row[Column.DEFECTS])
        self.weight_sigma: float | None = None
        if vectors and measured.muon:
            # Of a weight that was zero when its vector was looked for, less may be found than any matrix of its norm has.
            self.weight_sigma = max(
                row[Column.WEIGHT_SIGMA], self.weight / math.sqrt(min(measured.matrices.rows, measured.matrices.cols))
            )

    @property
    def bound(self) -> float | None:
        """That of the scheme; a callable has none that is known."""
        return bound_of(self.measured.scheme) if isinstance(self.measured.scheme, Scheme) else None


class Metric(NamedTuple):
    """A value of a matrix: how it follows from what was measured, and what is shown of many matrices together."""

    name: str
    value: Callable[[_Row], Any]  # None if a matrix has none
    together: Literal["norm", "mean", None] = None
    extremes: tuple[Callable[[Sequence[float]], float], ...] = ()
    adamw: bool = False  # whether parameters of AdamW have it too


METRICS = (
    Metric("gradient_norm", lambda row: row.gradient, "norm", (min,), adamw=True),
    Metric("momentum_norm", lambda row: row.momentum, "norm"),
    Metric("momentum_sigma", lambda row: row.relative_sigma * row.momentum, None, (max,)),
    Metric("momentum_stable_rank", lambda row: _ratio(1.0, row.relative_sigma**2), "mean", (min,)),
    Metric("weight_norm", lambda row: row.weight, "norm", adamw=True),
    Metric("lr", lambda row: row.lr, "mean", adamw=True),
    Metric("update_norm", lambda row: row.update, "norm", adamw=True),
    Metric("update_rms", lambda row: row.update / math.sqrt(row.measured.elements), "mean", adamw=True),
    Metric("update_to_weight", lambda row: _ratio(row.update, row.weight), "mean", (max, min), adamw=True),
    Metric("orthogonality", lambda row: row.orthogonality, "mean", (max,)),
    Metric("below_bound", lambda row: row.below_bound, "mean", (max,)),
    Metric("dtype", lambda row: row.measured.dtype),
    Metric("rounding", lambda row: row.measured.rounding),
    Metric("rows", lambda row: row.measured.matrices.rows),
    Metric("cols", lambda row: row.measured.matrices.cols),
    Metric("bound", lambda row: row.bound),
    Metric("weight_sigma", lambda row: row.weight_sigma, None, (max,)),
    Metric("weight_stable_rank", lambda row: row.weight_sigma and _ratio(row.weight**2, row.weight_sigma**2), "mean"),
)
"""The values of ``metrics()["matrices"]`` and ``["adamw"]``, in the order in which they are shown; see docs/metrics.md."""


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (math.inf if part else 0.0)


@dataclass(frozen=True)
class Measurement:
    """A measured step, whose numbers may still be on their way to the host."""

    step: int
    numbers: Numbers
    told: Mapping[str, Tensor]  # in host memory: "table", "seconds", "logits 0", …, and scalars that only the device knew
    known: Mapping[str, float]  # scalars that the host knew: "skipped steps", "skipped", "lr 0", …
    layers: Sequence[str]  # that have logits
    threshold: float  # of QK-clip
    plan: Plan
    idle: frozenset[int]  # indices in ``plan.params``
    half_iterations: int
    factors: Sequence[float]  # of the learning rate, for each of ``numbers.measured``
    recorder: StepRecorder
    stored: Mark

    def scalar(self, name: str) -> float:
        """One of ``known``, or of ``told`` if only the device knew it."""
        return self.known[name] if name in self.known else float(self.told[name])


def report(measurement: Measurement) -> dict[str, Any]:
    """The measurement as plain numbers, strings and dicts; see docs/metrics.md."""
    numbers = measurement.numbers
    content: dict[str, Any] = {
        "step": measurement.step,
        "skipped": bool(measurement.scalar("skipped")),
        "skipped_steps": int(measurement.scalar("skipped steps")),
        "weight_half_iterations": measurement.half_iterations,
        "matrices": {},
        "adamw": {},
        "groups": {},
        "kinds": {},
        "qk_clip": {
            layer: _qk_clip(measurement.told[f"logits {k}"], measurement.threshold) for k, layer in enumerate(measurement.layers)
        },
        "seconds": measurement.recorder.seconds() or {},
        "bytes": {"sent": measurement.recorder.bytes_sent, "reduced": numbers.bytes_reduced},
        "balance": _balance(measurement),
    }
    if content["skipped"]:
        return content
    by_group: dict[int, list[Values]] = {}
    by_kind: dict[str, list[Values]] = {}
    for k, measured in enumerate(numbers.measured):
        stepped = (
            measured.index not in measurement.idle if measured.muon else measured.index in measurement.recorder.adamw_stepped
        )
        if not stepped or not measured.elements:  # there is nothing to say of an empty matrix
            continue
        rows = measurement.told["table"][numbers.first_rows[k] : numbers.first_rows[k] + measured.matrices.count].double()
        sigmas = largest_singular_values(_finite(rows[:, Column.LANCZOS :])).tolist() if measured.muon else [0.0]
        lr = measurement.scalar(f"lr {measured.group_index}") * measurement.factors[k]
        for name, row, sigma in zip(measured.names, rows.tolist(), sigmas, strict=True):
            found = _Row(row, measured, lr, sigma, vectors=bool(numbers.vector_starts))
            shown = {metric.name: metric.value(found) for metric in METRICS if measured.muon or metric.adamw}
            values = {metric: value for metric, value in shown.items() if value is not None}
            content["matrices" if measured.muon else "adamw"][name] = values
            by_group.setdefault(measured.group_index, []).append(values)
            by_kind.setdefault(measured.kind, []).append(values)
    content["groups"] = {str(index): aggregate(members) for index, members in sorted(by_group.items())}
    content["kinds"] = {name: aggregate(members) for name, members in by_kind.items()}
    return content


def _finite(coefficients: Tensor) -> Tensor:
    """LAPACK refuses infinities and NaN, which a broken run has."""
    return torch.where(coefficients.isfinite().all(1, keepdim=True), coefficients, torch.zeros_like(coefficients))


def aggregate(members: Sequence[Mapping[str, Any]]) -> Values:
    """Norms of all members together, and means, largest and smallest of what cannot be added up."""
    found: Values = {"count": float(len(members))}
    for metric in METRICS:
        values = [member[metric.name] for member in members if metric.name in member]
        if values and metric.together == "norm":
            found[metric.name] = math.sqrt(math.fsum(x * x for x in values))
        elif values and metric.together == "mean":
            found[metric.name] = math.fsum(values) / len(values)
        found |= {f"{metric.name}_{extreme.__name__}": extreme(values) for extreme in metric.extremes if values}
    return found


def _qk_clip(logits: Tensor, threshold: float) -> Values:
    """The largest logit of a layer, the smallest factor of a head, and how many heads were clipped."""
    usable = logits[logits.isfinite()].double()
    largest = float(usable.max()) if usable.numel() else math.nan
    clipped = int((usable > threshold).sum())
    factor = math.sqrt(threshold / largest) if clipped else 1.0
    return {"max_logit": largest, "min_factor": factor, "clipped_heads": float(clipped)}


def _balance(measurement: Measurement) -> dict[str, Any]:
    """The load of the heaviest rank over the mean: as planned, and in seconds of orthogonalisation as they were."""
    seconds = measurement.told["seconds"][:, PHASES.index("orthogonalise")].tolist()
    return {
        "planned": _heaviest(list(measurement.plan.loads.values())),
        "measured": _heaviest(seconds),
        "seconds_by_rank": dict(zip(map(str, measurement.numbers.ranks), seconds, strict=True)),
    }


def _heaviest(loads: Sequence[float]) -> float:
    mean = math.fsum(loads) / max(1, len(loads))
    return max(loads, default=0.0) / mean if mean else 1.0


def flat(metrics: Mapping[str, Any], *, prefix: str = "muon/", matrices: bool = False) -> dict[str, float]:
    """The numbers of ``optimizer.metrics()`` under one name each, for loggers: ``muon/group/0/update_to_weight``.

    Args:
        metrics: what ``optimizer.metrics()`` returned; an empty dict gives an empty one.
        prefix: what all names begin with.
        matrices: also the numbers of every single matrix and parameter.
    """
    if not metrics:
        return {}
    found = {name: float(metrics[name]) for name in ("skipped", "skipped_steps", "weight_half_iterations")}
    parts: list[tuple[str, str]] = [("groups", "group"), ("kinds", "kind"), ("qk_clip", "qk_clip")]
    parts += [("matrices", "matrix"), ("adamw", "adamw")] if matrices else []
    for key, singular in parts:
        for name, values in metrics[key].items():
            found |= {f"{singular}/{name}/{what}": float(x) for what, x in values.items() if isinstance(x, (int, float))}
    for key in ("seconds", "bytes", "balance"):
        found |= {f"{key}/{what}": float(x) for what, x in metrics[key].items() if isinstance(x, (int, float))}
    return {prefix + name: value for name, value in found.items()}
