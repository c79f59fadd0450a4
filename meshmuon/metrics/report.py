"""From the numbers of a measured step to a plain dict; nothing here touches a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..device import Mark
from ..ortho import Orthogonalizer, Scheme
from ..plan import Plan
from .packing import PHASES, AdamWColumns, Packing, kind_of
from .recorder import StepRecorder
from .spectra import bound_of, largest_singular_values

Values: TypeAlias = dict[str, float]


@dataclass(frozen=True)
class Measurement:
    """A measured step, whose numbers may still be on their way to the host."""

    step: int
    packing: Packing
    host: Tensor  # what ``Packing.told`` describes, and behind it the logits
    plan: Plan
    rank: int
    idle: frozenset[int]  # indices in ``plan.params``
    stepped: frozenset[int]  # indices of AdamW's parameters that were stepped
    half_iterations: int
    rates: Sequence[float | None]  # lr of each param group; None where only the device knows it
    factors: Sequence[float]  # of the learning rate, for each parameter of the plan
    bytes_sent: int  # by this rank, in exchanges
    logits: Mapping[Any, int]  # layer → number of heads
    threshold: float  # of QK-clip
    recorder: StepRecorder
    stored: Mark

    def part(self, start: int, size: int) -> Tensor:
        """Numbers that lie at ``start`` of the packed tensor, in float64."""
        begin = start - self.packing.told.start
        return self.host[begin : begin + size].double()


def report(measurement: Measurement) -> dict[str, Any]:
    """The measurement as plain numbers, strings and dicts; see docs/metrics.md."""
    packing = measurement.packing
    skipped_steps, skipped, *packed_rates = measurement.part(packing.extras, 2 + packing.groups).tolist()
    rates = [packed if known is None else known for packed, known in zip(packed_rates, measurement.rates, strict=True)]
    content: dict[str, Any] = {
        "step": measurement.step,
        "skipped": bool(skipped),
        "skipped_steps": int(skipped_steps),
        "weight_half_iterations": measurement.half_iterations,
        "matrices": {},
        "adamw": {},
        "groups": {},
        "kinds": {},
        "qk_clip": _qk_clip(measurement),
        "seconds": measurement.recorder.seconds() or {},
        "bytes": {"sent": measurement.bytes_sent, "reduced": packing.bytes_reduced},
        "balance": _balance(measurement),
    }
    if skipped:
        return content
    by_group: dict[str, list[Values]] = {}
    by_kind: dict[str, list[Values]] = {}
    for k, measured in enumerate(packing.matrices):
        if k in measurement.idle:
            continue
        for name, values in zip(measured.names, _matrices(measurement, k, rates[measured.group_index]), strict=True):
            content["matrices"][name] = values
            by_group.setdefault(str(measured.group_index), []).append(values)
            by_kind.setdefault(measured.kind, []).append(values)
    for param, start in zip(packing.adamw, packing.adamw_starts, strict=True):
        if param.index in measurement.stepped:
            values = _adamw(measurement.part(start, AdamWColumns.count).tolist(), param.elements, rates[param.group_index])
            content["adamw"][param.name] = values
            by_group.setdefault(str(param.group_index), []).append(values)
            by_kind.setdefault(f"{kind_of(param.name)} (adamw)", []).append(values)
    content["groups"] = {name: aggregate(members) for name, members in sorted(by_group.items(), key=lambda item: int(item[0]))}
    content["kinds"] = {name: aggregate(members) for name, members in by_kind.items()}
    return content


def _matrices(measurement: Measurement, k: int, rate: float) -> list[dict[str, Any]]:
    """The values of the matrices of parameter ``k`` of the plan."""
    packing, measured = measurement.packing, measurement.packing.matrices[k]
    columns = packing.columns
    numbers = measurement.part(packing.matrix_starts[k], measured.count * columns.count).view(measured.count, columns.count)
    relative = largest_singular_values(_finite(numbers[:, columns.momentum + 1 : columns.defects]))
    sigmas = measurement.part(packing.sigma_starts[k], measured.count).tolist()
    lr, bound = rate * measurement.factors[k], _bound(measured.scheme)
    found = []
    for row, largest, sigma in zip(numbers.tolist(), relative.tolist(), sigmas, strict=True):
        weight, momentum, update = (math.sqrt(row[column]) for column in (columns.weight, columns.momentum, columns.update))
        values: dict[str, Any] = {
            "gradient_norm": math.sqrt(row[columns.gradient]),
            "momentum_norm": momentum,
            "momentum_sigma": largest * momentum,
            "momentum_stable_rank": _ratio(1.0, largest**2),
            "weight_norm": weight,
            "lr": lr,
            **_update(abs(lr) * update, weight, measured.rows * measured.cols),
            "orthogonality": math.sqrt(row[columns.defects]),
            "below_bound": row[columns.defects + 1],
            "dtype": measured.dtype,
            "rounding": measured.rounding,
            "rows": measured.rows,
            "cols": measured.cols,
        }
        if bound is not None:
            values["bound"] = bound
        if packing.vectors:
            # Of a weight that was zero when its vector was looked for, less may be found than any matrix of its norm has.
            sigma = max(sigma, weight / math.sqrt(min(measured.rows, measured.cols)))
            values |= {"weight_sigma": sigma, "weight_stable_rank": _ratio(weight**2, sigma**2)}
        found.append(values)
    return found


def _finite(coefficients: Tensor) -> Tensor:
    """LAPACK refuses infinities and NaN, which a broken run has."""
    return torch.where(coefficients.isfinite().all(1, keepdim=True), coefficients, torch.zeros_like(coefficients))


def _bound(scheme: Scheme | Orthogonalizer) -> float | None:
    """The bound of a scheme; a callable has none that is known."""
    return bound_of(scheme) if isinstance(scheme, Scheme) else None


def _adamw(row: Sequence[float], elements: int, rate: float) -> Values:
    weight = math.sqrt(row[AdamWColumns.weight])
    return {
        "gradient_norm": math.sqrt(row[AdamWColumns.gradient]),
        "weight_norm": weight,
        "lr": rate,
        **_update(abs(rate) * math.sqrt(row[AdamWColumns.update]), weight, elements),
    }


def _update(norm: float, weight: float, elements: int) -> Values:
    return {"update_norm": norm, "update_rms": norm / math.sqrt(max(1, elements)), "update_to_weight": _ratio(norm, weight)}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (math.inf if part else 0.0)


_NORMS = ("gradient_norm", "momentum_norm", "weight_norm", "update_norm")
_MEANS = ("lr", "update_rms", "update_to_weight", "momentum_stable_rank", "weight_stable_rank", "orthogonality", "below_bound")
_LARGEST = ("update_to_weight", "momentum_sigma", "weight_sigma", "orthogonality", "below_bound")
_SMALLEST = ("update_to_weight", "momentum_stable_rank", "gradient_norm")


def aggregate(members: Sequence[Mapping[str, Any]]) -> Values:
    """Norms of all members together, and means, largest and smallest of what cannot be added up."""

    def of(key: str) -> list[float]:
        return [member[key] for member in members if key in member]

    found: Values = {"count": float(len(members))}
    found |= {key: math.sqrt(math.fsum(x * x for x in of(key))) for key in _NORMS if of(key)}
    found |= {key: math.fsum(of(key)) / len(of(key)) for key in _MEANS if of(key)}
    found |= {f"{key}_max": max(of(key)) for key in _LARGEST if of(key)}
    found |= {f"{key}_min": min(of(key)) for key in _SMALLEST if of(key)}
    return found


def _qk_clip(measurement: Measurement) -> dict[str, Values]:
    """Per layer the largest logit, the smallest factor of a head, and how many heads were clipped."""
    start = measurement.packing.told.stop
    found: dict[str, Values] = {}
    for layer, heads in measurement.logits.items():
        logits, start = measurement.part(start, heads), start + heads
        usable = logits[logits.isfinite()]
        largest = float(usable.max()) if usable.numel() else math.nan
        clipped = int((usable > measurement.threshold).sum())
        factor = math.sqrt(measurement.threshold / largest) if clipped else 1.0
        found[str(layer)] = {"max_logit": largest, "min_factor": factor, "clipped_heads": float(clipped)}
    return found


def _balance(measurement: Measurement) -> dict[str, Any]:
    """The load of the heaviest rank over the mean: as planned, and in seconds of orthogonalisation as they were."""
    packing, loads = measurement.packing, list(measurement.plan.loads.values())
    seconds = measurement.part(packing.seconds, len(PHASES) * len(packing.ranks)).view(len(packing.ranks), len(PHASES))
    of_ranks = seconds[:, PHASES.index("orthogonalise")].tolist()
    return {
        "planned": _heaviest(loads),
        "measured": _heaviest(of_ranks),
        "seconds_by_rank": {str(rank): one for rank, one in zip(packing.ranks, of_ranks, strict=True)},
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
