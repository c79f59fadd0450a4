"""From the numbers of a measured step to a plain dict; nothing here touches a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..device import Mark
from ..params.lr import lr_factor
from .numbers import Column, Measured, Numbers
from .spectra import largest_singular_values

Values: TypeAlias = dict[str, float]

_TOGETHER: Mapping[str, tuple[str, str]] = {
    "gradient_norm": ("norm", "min"),
    "momentum_norm": ("norm", ""),
    "momentum_sigma": ("", "max"),
    "weight_norm": ("norm", ""),
    "lr": ("mean", ""),
    "update_rms": ("mean", ""),
    "update_to_weight": ("mean", "max min"),
}
"""What is shown of many matrices together: for each value how it is combined, and which extremes."""


def _values_of(row: Sequence[float], measured: Measured, lr: float, relative_sigma: float) -> Values:
    """What is shown of one matrix, or of one parameter of AdamW, from its row of the table; see docs/metrics.md."""
    gradient, weight, update, momentum = (math.sqrt(square) for square in row[: Column.MOMENTUM + 1])
    update *= abs(lr)
    of_momentum = (
        {} if measured.matrices is None else {"momentum_norm": momentum, "momentum_sigma": relative_sigma * momentum}
    )
    return {
        "gradient_norm": gradient,
        **of_momentum,
        "weight_norm": weight,
        "lr": lr,
        "update_rms": update / math.sqrt(measured.elements),
        "update_to_weight": _ratio(update, weight),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (math.inf if part else 0.0)


@dataclass(frozen=True)
class Measurement:
    """A measured step, whose numbers may still be on their way to the host."""

    step: int
    numbers: Numbers
    # Tensors in host memory, and numbers that the host knew: "table", "skipped", "skipped steps", "lr 0", …
    told: Mapping[str, Any]
    idle: frozenset[int]  # indices in ``Plan.params``
    groups: Sequence[Mapping[str, Any]]  # the param groups of the step
    adamw_stepped: AbstractSet[int]  # indices of the parameters that AdamW stepped
    stored: Mark


def report(measurement: Measurement) -> dict[str, Any]:
    """The measurement as plain numbers, strings and dicts; see docs/metrics.md."""
    numbers, told = measurement.numbers, measurement.told
    content: dict[str, Any] = {
        "step": measurement.step,
        "skipped": bool(told["skipped"]),
        "skipped_steps": int(told["skipped steps"]),
        "matrices": {},
        "adamw": {},
        "groups": {},
        "kinds": {},
    }
    if content["skipped"]:
        return content
    by_group: dict[int, list[Values]] = {}
    by_kind: dict[str, list[Values]] = {}
    for k, measured in enumerate(numbers.measured):
        matrices, group_index = measured.matrices, measured.record.group_index
        muon = matrices is not None
        stepped = measured.index not in measurement.idle if muon else measured.index in measurement.adamw_stepped
        if not stepped or not measured.elements:  # there is nothing to say of an empty matrix
            continue
        rows = told["table"][numbers.first_rows[k] :][: measured.rows].double()
        sigmas = largest_singular_values(rows[:, Column.LANCZOS :]).tolist() if muon else [0.0]
        group = measurement.groups[group_index]
        factor = 1.0 if matrices is None else lr_factor(group["adjust_lr_fn"], *matrices.lr_shape)
        rate = factor * float(told[f"lr {group_index}"])
        for name, row, sigma in zip(measured.names, rows.tolist(), sigmas, strict=True):
            values = _values_of(row, measured, rate, sigma)
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


def flat(metrics: Mapping[str, Any], *, prefix: str = "muon/", matrices: bool = False) -> dict[str, float]:
    """The numbers of ``optimizer.metrics()`` under one name each, for loggers: ``muon/group/0/update_to_weight``.

    Args:
        metrics: what ``optimizer.metrics()`` returned; an empty dict gives an empty one.
        prefix: what all names begin with.
        matrices: also the numbers of every single matrix and parameter.
    """
    if not metrics:
        return {}
    found = {name: float(metrics[name]) for name in ("skipped", "skipped_steps")}
    parts = {"groups": "group", "kinds": "kind", **({"matrices": "matrix", "adamw": "adamw"} if matrices else {})}
    for key, singular in parts.items():
        for name, values in metrics[key].items():
            found |= {f"{singular}/{name}/{what}": value for what, value in values.items()}
    return {prefix + name: value for name, value in found.items()}
