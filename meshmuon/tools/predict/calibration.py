"""How fast a machine is, as plain data: what ``meshmuon doctor --save`` measured.

``Muon(cost_model=FILE)`` takes the rates of products and links from it. The file is JSON. ``Calibration`` has the same
names and units.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import pairwise
from typing import Any, TypeVar

from ...errors import ConfigError
from ...plan.cost import CostModel
from ...plan.rates import FORMAT, LARGEST_RATE, REMEDY, SMALLEST_RATE, VERSION, cost_model_of, read_rates

_LARGEST_SIZE = 2**31
_MOST_RANKS = 10**7
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast matrices are worked on by one rank, while all ranks work."""

    dtype: str
    size: int  # the shorter side
    flops_per_second: float
    length: int | None = None  # the longer side; None if it is as short


@dataclass(frozen=True, slots=True)
class LinkRate:
    """How fast a rank sends, while it receives as much and the other ranks do the same."""

    bytes_per_second: float
    seconds: float  # that an exchange of a few bytes takes


@dataclass(frozen=True, slots=True)
class ElementwiseRates:
    """Seconds per element of large float32 tensors, on one rank while all ranks work."""

    momentum: float  # accumulating it, and writing what is orthogonalised
    update: float  # of a parameter
    copy: float
    adamw: float


_INNER: Mapping[str, tuple[type, str]] = {
    "LinkRate": (LinkRate, "a link"),
    "ElementwiseRates": (ElementwiseRates, "the times of elementwise work"),
}


@dataclass(frozen=True, slots=True, repr=False)
class Calibration:
    """The measurements of one run of ``meshmuon doctor``; medians over ranks and pairs of ranks."""

    device: str  # type of the device, such as "cuda"
    device_name: str
    ranks: int
    ranks_per_node: int  # most ranks on one node
    compute_dtype: str  # in which matrices are orthogonalised by default
    products: tuple[Rate, ...]  # matrix products, for each dtype and size
    # the default scheme in ``compute_dtype``, by counted FLOPs, for each size or shape
    orthogonalisation: tuple[Rate, ...]
    inside: LinkRate | None  # between two ranks of one node; None if no node has two ranks
    between: LinkRate | None  # between two ranks of different nodes; None on one node
    exchange: LinkRate | None  # an exchange of all ranks with all ranks, as a step makes it; None on one rank
    host_seconds_per_matrix: float  # what each tiny matrix adds to a step; predictions for CPUs use it
    # what a step takes beside its matrices or, on a GPU, launches, and beside its exchanges
    host_seconds_per_step: float
    elementwise: ElementwiseRates
    # CPU seconds of an exchange ÷ its seconds, if the device is a CPU, else None
    exchange_cpu_share: float | None = None
    copies: LinkRate | None = None  # between the memory of a device and pinned memory of its host; None on CPU
    # what each peer adds to an exchange; 0 where ``exchange`` was measured with all of them
    seconds_per_peer: float = 0.0
    host_seconds_per_launch: float | None = None  # in which the host issues a kernel; None on CPU
    alone: tuple[Rate, ...] = ()  # as ``orthogonalisation``, of a single matrix; empty if that is as fast as a batch
    slower_beside_exchange: float = 0.0  # what products take longer while the links are busy, as a share

    def __repr__(self) -> str:
        return f"Calibration({self.device_name!r}, {hashlib.sha256(repr(asdict(self)).encode()).hexdigest()[:8]})"

    def cost_model(self) -> CostModel:
        """What plans weigh: the same as of its file."""
        return cost_model_of(self.to_json())

    def orthogonalisation_rate(self, size: int, length: int | None = None) -> float:
        """FLOPs per second on a further matrix of a batch, by its shorter and its longer side."""
        return _rate_of_shape(self.orthogonalisation, size, length or size)

    def rate_alone(self, size: int, length: int | None = None) -> float:
        """The same of a matrix that has a batch for itself; never above the rate of a batch."""
        batched = self.orthogonalisation_rate(size, length)
        return min(batched, _rate_of_shape(self.alone, size, length or size)) if self.alone else batched

    @property
    def exchange_busy(self) -> float:
        """The share of an exchange in which the device can do nothing else: 0 unless it is a CPU, where 1 is the
        worst case.
        """
        if self.device != "cpu":
            return 0.0
        return 1.0 if self.exchange_cpu_share is None else min(1.0, self.exchange_cpu_share)

    def seconds_per_element(self, kind: str) -> float:
        """Of a kind of elementwise work, by its name in ``ElementwiseRates``."""
        return float(getattr(self.elementwise, kind))

    def to_json(self) -> dict[str, Any]:
        """The content of the file, without what is described rather than measured where there is none of it."""
        described = ("seconds_per_peer", "alone", "slower_beside_exchange")
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return {name: value for name, value in content.items() if value or name not in described}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads a file: what ``to_json`` returned, or a whole report of ``meshmuon doctor --json``."""
        return _read(cls, read_rates(path))


def _rate_of_shape(rates: Sequence[Rate], size: int, length: int) -> float:
    """The rate of the nearest shape, where square matrices count as measured at every size."""
    size, length = max(1, size), max(1, length)  # a matrix may be empty
    squares = [(rate.size, rate.flops_per_second) for rate in rates if rate.length is None]
    nearest = (length / size, rate_at(size, squares)) if squares else (math.inf, 0.0)
    for rate in rates:
        if rate.length is not None:
            apart = max(size / rate.size, rate.size / size, length / rate.length, rate.length / length)
            nearest = min(nearest, (apart, rate.flops_per_second), key=lambda pair: pair[0])
    return nearest[1]


def rate_at(size: int, points: Iterable[tuple[int, float]]) -> float:
    """The rate at ``size`` on the line through ``points`` (size, rate), in logarithms of both; outside of them the
    nearest.
    """
    ordered = sorted(points)
    if size <= ordered[0][0]:
        return ordered[0][1]
    for (low, at_low), (high, at_high) in pairwise(ordered):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            rate = at_low * (at_high / at_low) ** share
            return float(f"{rate:.9g}")  # the last bit differs between mathematical libraries, and plans must not
    return ordered[-1][1]


def _read(cls: type[_Read], content: Mapping[str, Any], where: str = "") -> _Read:
    """Each field of a dataclass by its type. One that has a default may be missing; ``where`` is before names in
    errors.
    """
    values: dict[str, Any] = {}
    for entry in fields(cls):  # type: ignore[arg-type]
        value = content.get(entry.name)
        if entry.default is MISSING or value not in (None, []):
            values[entry.name] = _read_field(str(entry.type), value, where + entry.name)
    return cls(**values)


def _read_field(kind: str, value: Any, name: str) -> Any:
    kind, _, optional = kind.partition(" | ")
    if optional and value is None:
        return None
    if kind == "str":
        return _checked(value, name, "text", isinstance(value, str))
    if kind == "int":
        most = _MOST_RANKS if name.startswith("ranks") else _LARGEST_SIZE
        whole = _is_number(value) and 1 <= value <= most and value == int(value)
        return int(_checked(value, name, f"a whole number from 1 to {most}", whole))
    if kind == "float":
        _checked(value, name, "a positive number", _is_number(value) and 0 < value < math.inf)
        bounds = f"between {SMALLEST_RATE:g} and {LARGEST_RATE:g}"
        return float(_checked(value, name, bounds, SMALLEST_RATE <= value <= LARGEST_RATE))
    if kind == "tuple[Rate, ...]":
        is_list = isinstance(value, Sequence) and bool(value) and all(isinstance(row, Mapping) for row in value)
        rows = _checked(value, name, "a list of rates", is_list)
        return tuple(_read(Rate, row, f"{name}[{k}].") for k, row in enumerate(rows))
    cls, what = _INNER[kind]
    return _read(
        cls, _checked(value, name, what + (" or null" if optional else ""), isinstance(value, Mapping)), f"{name}."
    )


def _checked(value: Any, name: str, expected: str, fits: bool) -> Any:
    if not fits:
        bits = value.bit_length() if type(value) is int else 0
        given = f"a number of {bits} bits" if bits > 999 else repr(value)[:120]
        raise ConfigError(f"its {name} is {given} and must be {expected}. {REMEDY}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
