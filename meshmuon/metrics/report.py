"""From the numbers of a measured step to a plain dict; nothing here touches a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from ..device import Mark
from ..ortho import Scheme, scheme_for
from ..params.lr import lr_factor
from .numbers import PHASES, Column, Measured, Numbers
from .recorder import StepRecorder
from .spectra import bound_of, largest_singular_values

Values: TypeAlias = dict[str, float]

_TOGETHER: Mapping[str, tuple[str, str]] = {
    "gradient_norm": ("norm", "min"),
    "momentum_norm": ("norm", ""),
    "momentum_sigma": ("", "max"),
    "momentum_stable_rank": ("mean", "min"),
    "weight_norm": ("norm", ""),
    "lr": ("mean", ""),
    "update_norm": ("norm", ""),
    "update_rms": ("mean", ""),
    "update_to_weight": ("mean", "max min"),
    "orthogonality": ("mean", "max"),
    "below_bound": ("mean", "max"),
    "weight_sigma": ("", "max"),
    "weight_stable_rank": ("mean", ""),
}
"""What is shown of many matrices together: for each value how it is combined, and which extremes."""


def _values_of(
    row: Sequence[float], measured: Measured, lr: float, relative_sigma: float, *, rounding: str, vectors: bool
) -> dict[str, Any]:
    """What is shown of one matrix, or of one parameter of AdamW, from its row of the table; see docs/metrics.md."""
    gradient, weight, update, momentum = (math.sqrt(square) for square in row[: Column.MOMENTUM + 1])
    update *= abs(lr)
    record, matrices = measured.record, measured.matrices
    values: dict[str, Any] = {"gradient_norm": gradient}
    if matrices is not None:
        values["momentum_norm"] = momentum
        values["momentum_sigma"] = relative_sigma * momentum
        values["momentum_stable_rank"] = _ratio(1.0, relative_sigma**2)
    values["weight_norm"] = weight
    values["lr"] = lr
    values["update_norm"] = update
    values["update_rms"] = update / math.sqrt(measured.elements)
    values["update_to_weight"] = _ratio(update, weight)
    if matrices is None:
        return values
    values["orthogonality"], values["below_bound"] = math.sqrt(row[Column.DEFECTS]), row[Column.DEFECTS + 1]
    values["dtype"], values["rounding"] = str(record.param.dtype).removeprefix("torch."), rounding
    values["rows"], values["cols"] = matrices.rows, matrices.cols
    assert record.scheme is not None
    compute_dtype = record.compute_dtype_of(matrices)
    scheme = scheme_for(record.scheme, matrices.rows, matrices.cols, compute_dtype, record.work_device)
    if isinstance(scheme, Scheme):  # a callable has no bound that is known
        values["bound"] = bound_of(scheme)
    if vectors:
        # Of a weight that was zero when its vector was looked for, less may be found than any matrix of its norm has.
        sigma = max(row[Column.WEIGHT_SIGMA], weight / math.sqrt(min(matrices.rows, matrices.cols)))
        values["weight_sigma"], values["weight_stable_rank"] = sigma, _ratio(weight**2, sigma**2)
    return values


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (math.inf if part else 0.0)


@dataclass(frozen=True)
class Measurement:
    """A measured step, whose numbers may still be on their way to the host."""

    step: int
    numbers: Numbers
    # Tensors in host memory, and numbers that the host knew: "table", "seconds", "logits 0", …, "skipped", "skipped
    # steps", "lr 0", …
    told: Mapping[str, Any]
    threshold: float  # of QK-clip
    idle: frozenset[int]  # indices in ``Plan.params``
    half_iterations: int
    groups: Sequence[Mapping[str, Any]]  # the param groups of the step
    recorder: StepRecorder
    stored: Mark


def report(measurement: Measurement) -> dict[str, Any]:
    """The measurement as plain numbers, strings and dicts; see docs/metrics.md."""
    numbers, told = measurement.numbers, measurement.told
    logits_of_layers = {name.removeprefix("logits "): told[name] for name in told if name.startswith("logits ")}
    content: dict[str, Any] = {
        "step": measurement.step,
        "skipped": bool(told["skipped"]),
        "skipped_steps": int(told["skipped steps"]),
        "weight_half_iterations": measurement.half_iterations,
        "matrices": {},
        "adamw": {},
        "groups": {},
        "kinds": {},
        "qk_clip": {layer: _qk_clip(logits, measurement.threshold) for layer, logits in logits_of_layers.items()},
        "seconds": measurement.recorder.seconds() or {},
        "bytes": {"sent": measurement.recorder.bytes_sent, "reduced": numbers.bytes_reduced},
        "balance": _balance(measurement),
    }
    if content["skipped"]:
        return content
    by_group: dict[int, list[Values]] = {}
    by_kind: dict[str, list[Values]] = {}
    for k, measured in enumerate(numbers.measured):
        matrices, group_index = measured.matrices, measured.record.group_index
        muon = matrices is not None
        stepped = (
            measured.index not in measurement.idle if muon else measured.index in measurement.recorder.adamw_stepped
        )
        if not stepped or not measured.elements:  # there is nothing to say of an empty matrix
            continue
        rows = told["table"][numbers.first_rows[k] :][: measured.rows].double()
        sigmas = largest_singular_values(rows[:, Column.LANCZOS :]).tolist() if muon else [0.0]
        group = measurement.groups[group_index]
        factor = 1.0 if matrices is None else lr_factor(group["adjust_lr_fn"], *matrices.lr_shape)
        rate = factor * float(told[f"lr {group_index}"])
        for name, row, sigma in zip(measured.names, rows.tolist(), sigmas, strict=True):
            values = _values_of(
                row, measured, rate, sigma, rounding=group["rounding"], vectors=numbers.vectors is not None
            )
            content["matrices" if muon else "adamw"][name] = values
            by_group.setdefault(group_index, []).append(values)
            by_kind.setdefault(measured.kind, []).append(values)
    content["groups"] = {str(index): _aggregate(members) for index, members in sorted(by_group.items())}
    content["kinds"] = {name: _aggregate(members) for name, members in by_kind.items()}
    return content


def _aggregate(members: Sequence[Mapping[str, Any]]) -> Values:
    """Norms of all members together, and means, largest and smallest of what cannot be added up."""
    found: Values = {"count": float(len(members))}
    for name, (how, extremes) in _TOGETHER.items():
        values = [member[name] for member in members if name in member]
        if values and how == "norm":
            found[name] = math.sqrt(math.fsum(x * x for x in values))
        elif values and how == "mean":
            found[name] = math.fsum(values) / len(values)
        found |= {
            f"{name}_{extreme}": {"max": max, "min": min}[extreme](values) for extreme in extremes.split() if values
        }
    return found


def _qk_clip(logits: Tensor, threshold: float) -> Values:
    """The largest logit of a layer, the smallest factor of a head, and the number of clipped heads."""
    usable = logits[logits.isfinite()].double()
    largest = float(usable.max()) if usable.numel() else math.nan
    clipped = int((usable > threshold).sum())
    factor = math.sqrt(threshold / largest) if clipped else 1.0
    return {"max_logit": largest, "min_factor": factor, "clipped_heads": float(clipped)}


def _balance(measurement: Measurement) -> dict[str, Any]:
    """The load of the heaviest rank over the mean: as planned, and in seconds of orthogonalisation as they were."""
    seconds = measurement.told["seconds"][:, PHASES.index("orthogonalise")].tolist()
    return {
        "planned": _heaviest(list(measurement.numbers.plan.loads.values())),
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
            found |= {
                f"{singular}/{name}/{what}": float(x) for what, x in values.items() if isinstance(x, (int, float))
            }
    for key in ("seconds", "bytes", "balance"):
        found |= {f"{key}/{what}": float(x) for what, x in metrics[key].items() if isinstance(x, (int, float))}
    return {prefix + name: value for name, value in found.items()}
