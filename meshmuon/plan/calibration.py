"""What ``meshmuon doctor --save`` measured on a user's machines, as plain data, and what follows from it.

The file is JSON. ``Calibration`` has the same names and units.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

from .cost import FORMAT, VERSION, CostModel, LinkRate, Rate, RatesReader

_MOST_RANKS = 10**7


@dataclass(frozen=True, slots=True)
class ElementwiseRates:
    """Seconds per element of large float32 tensors, on one rank while all ranks work."""

    momentum: float  # accumulating it, and writing what is orthogonalised
    update: float  # of a parameter
    copy: float
    adamw: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measurements of one run of ``meshmuon doctor``; medians over ranks and pairs of ranks."""

    device: str  # type of the device, such as "cuda"
    device_name: str
    ranks: int
    ranks_per_node: int  # most ranks on one node
    compute_dtype: str  # in which matrices are orthogonalised by default
    products: tuple[Rate, ...]  # matrix products, for each dtype and size
    orthogonalisation: tuple[Rate, ...]  # the default scheme in ``compute_dtype``, by counted FLOPs, for each size
    inside: LinkRate | None  # between two ranks of one node; None if no node has two ranks
    between: LinkRate | None  # between two ranks of different nodes; None on one node
    exchange: LinkRate | None  # an exchange of all ranks with all ranks, as a step makes it; None on one rank
    host_seconds_per_matrix: float  # what each tiny matrix adds to a step; predictions for CPUs use it
    host_seconds_per_step: float  # what a step takes beside its matrices or, on a GPU, launches, and beside its exchanges
    elementwise: ElementwiseRates | None = None  # None in files that were written before it was measured
    exchange_cpu_share: float | None = None  # CPU seconds of an exchange ÷ its seconds, if the device is a CPU; None likewise
    copies: LinkRate | None = None  # between the memory of a device and pinned memory of its host; None on CPU
    seconds_per_peer: float = 0.0  # what each peer adds to an exchange; 0 where ``exchange`` was measured with all of them
    host_seconds_per_launch: float | None = None  # in which the host issues a kernel; None on CPU and in older files

    def cost_model(self) -> CostModel:
        return RatesReader(self.to_json()).cost_model()

    def orthogonalisation_rate(self, size: int) -> float:
        """FLOPs per second on matrices whose shorter side is ``size``; on a logarithmic scale between two sizes."""
        return rate_at(size, ((rate.size, rate.flops_per_second) for rate in self.orthogonalisation))

    @property
    def exchange_busy(self) -> float:
        """The share of an exchange in which the device can do nothing else: 0 unless it is a CPU, where 1 is the worst case."""
        if self.device != "cpu":
            return 0.0
        return 1.0 if self.exchange_cpu_share is None else min(1.0, self.exchange_cpu_share)

    def seconds_per_element(self, kind: str) -> float:
        """Of a kind of elementwise work, by its name in ``ElementwiseRates``; 0 if it was not measured."""
        return 0.0 if self.elementwise is None else float(getattr(self.elementwise, kind))

    def completed(self, exchange: LinkRate, seconds_per_peer: float, elementwise: ElementwiseRates) -> Calibration:
        """With these figures in the place of what was not measured: links on one rank, elementwise work in older files."""
        completed = replace(self, elementwise=self.elementwise or elementwise)
        return completed if self.exchange else replace(completed, exchange=exchange, seconds_per_peer=seconds_per_peer)

    def to_json(self) -> dict[str, Any]:
        """The content of the file. What peers add is there if it is a figure of its own, as in rates that were not measured."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        if not self.seconds_per_peer:
            del content["seconds_per_peer"]
        return content

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads a file: what ``to_json`` returned, or a whole report of ``meshmuon doctor --json``."""
        reader = RatesReader.open(path)
        elementwise = reader.inner("elementwise", "the times of elementwise work")
        return cls(
            device=reader.text("device"),
            device_name=reader.text("device_name"),
            ranks=reader.whole("ranks", _MOST_RANKS),
            ranks_per_node=reader.whole("ranks_per_node", _MOST_RANKS),
            compute_dtype=reader.text("compute_dtype"),
            products=reader.rates("products"),
            orthogonalisation=reader.rates("orthogonalisation"),
            inside=reader.link("inside"),
            between=reader.link("between"),
            exchange=reader.link("exchange"),
            host_seconds_per_matrix=reader.number("host_seconds_per_matrix"),
            host_seconds_per_step=reader.number("host_seconds_per_step"),
            elementwise=None if elementwise is None else _elementwise(elementwise),
            exchange_cpu_share=_given(reader, "exchange_cpu_share"),
            copies=reader.link("copies"),
            seconds_per_peer=_given(reader, "seconds_per_peer") or 0.0,
            host_seconds_per_launch=_given(reader, "host_seconds_per_launch"),
        )


def _given(reader: RatesReader, name: str) -> float | None:
    return None if reader.content.get(name) is None else reader.number(name)


def _elementwise(reader: RatesReader) -> ElementwiseRates:
    return ElementwiseRates(**{field.name: reader.number(field.name) for field in fields(ElementwiseRates)})


def rate_at(size: int, points: Iterable[tuple[int, float]]) -> float:
    """The rate at ``size`` on the line through ``points`` (size, rate), in logarithms of both; outside of them the nearest."""
    ordered = sorted(points)
    if size <= ordered[0][0]:
        return ordered[0][1]
    for (low, at_low), (high, at_high) in pairwise(ordered):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return float(at_low * (at_high / at_low) ** share)
    return ordered[-1][1]
