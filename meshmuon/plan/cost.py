"""What computing and sending cost, in one unit: FLOPs of the device that orthogonalises.

``Muon(cost_model=FILE)`` names a file of rates that ``meshmuon doctor --save`` measured, or ``meshmuon plan --save-rates`` wrote.
Only what a plan weighs is read here: how fast matrices are orthogonalised, and the links between ranks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import ConfigError, shown
from ..layout import ShardedMatrix
from .nodes import Crossings

FORMAT, VERSION = "meshmuon calibration", 1  # of the file
_LARGEST = 1e30  # costs stay finite when they are multiplied by bytes and added up
_SMALLEST_RATE, _LARGEST_RATE = 1e-15, 1e24  # what lies outside was not measured on a computer
_LARGEST_SIZE = 2**31
_REMEDY = "Write the file with torchrun ... -m meshmuon doctor --save FILE."


@dataclass(frozen=True, slots=True, repr=False)
class CostModel:
    """How a device's links compare with its matrix units.

    Attributes:
        flops_per_byte: FLOPs of orthogonalisation in the time that a rank needs to send or receive one byte.
        flops_per_exchange: FLOPs in the time that an exchange of no bytes takes.
        between_flops_per_byte: the first between ranks of different nodes; None if it is the same there.
        between_flops_per_exchange: the second for an exchange between ranks of several nodes; None if it is the same there.
        host_flops_per_byte: the first between the memory of a device and that of its host, for weights that are there; None if
            it is the same as between ranks.
    """

    flops_per_byte: float
    flops_per_exchange: float
    between_flops_per_byte: float | None = None
    between_flops_per_exchange: float | None = None
    host_flops_per_byte: float | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, low = getattr(self, entry.name), 1 if entry.name.endswith("exchange") else 0
            if value is None and entry.default is None:
                continue
            if type(value) not in (int, float) or not low <= value <= _LARGEST:
                raise ConfigError(
                    f"CostModel: {entry.name}={value!r} must be a number of at least {low} and at most {_LARGEST:g}."
                )

    def __repr__(self) -> str:
        return repr_of_given(self)

    @property
    def per_byte_between(self) -> float:
        """FLOPs per byte between nodes."""
        return self.flops_per_byte if self.between_flops_per_byte is None else self.between_flops_per_byte

    @property
    def per_byte_of_host(self) -> float:
        """FLOPs per byte that is copied between a device and its host."""
        return self.flops_per_byte if self.host_flops_per_byte is None else self.host_flops_per_byte

    def per_exchange(self, *, several_nodes: bool) -> float:
        """FLOPs in the time that an exchange of no bytes takes, inside a node or between several."""
        if several_nodes and self.between_flops_per_exchange is not None:
            return self.between_flops_per_exchange
        return self.flops_per_exchange

    def owning(self, flops: int, sharded: ShardedMatrix, itemsize: int, crossings: Crossings | None = None) -> float:
        """Cost for the rank that owns a matrix: computing it, receiving it and sending it back.

        ``crossings`` counts what travels between nodes; None on one node. The owner is taken to be one that needs the fewest.
        """
        moved = 2 * sharded.size
        cost = flops + self.flops_per_byte * moved * itemsize
        if crossings is None:
            return cost
        between = crossings.fewest(sharded)  # more than ``moved`` where replicas on other nodes get the result as well
        inside_price, between_price = self.flops_per_byte * itemsize, self.per_byte_between * itemsize
        return cost + (between_price - inside_price) * min(between, moved) + between_price * max(0, between - moved)

    def sharing_pays(self, flops: int, sharded: ShardedMatrix, itemsize: int, crossings: Crossings | None = None) -> bool:
        """Whether one replica should compute for all, by FLOPs and bytes summed over the ranks.

        For each additional replica, sharing saves one orthogonalisation and one gather and scatter inside the replica; it costs
        sending the matrix to the replica once. Bytes between nodes have their own rate.
        """
        pieces = max(1, len(sharded.pieces))
        inside = 2 * (pieces - 1) / pieces * sharded.size * itemsize
        saved = flops + self.flops_per_byte * inside
        spent = self.flops_per_byte * sharded.size * itemsize
        if crossings is None or sharded.replicas == 1:
            return saved >= spent
        # Each byte between nodes costs this much more than the above has counted.
        extra = (self.per_byte_between - self.flops_per_byte) * itemsize
        fewer = crossings.fewest_apart(sharded) - crossings.fewest(sharded)
        return (sharded.replicas - 1) * (saved - spent) + extra * fewer >= 0


def repr_of_given(value: CostModel | Any) -> str:
    """The ``repr`` of a dataclass without fields that are None.

    Part of a plan's digest: on one node and without relays it reads as it did before plans knew of these.
    """
    given = [(entry.name, getattr(value, entry.name)) for entry in fields(value)]
    return f"{type(value).__name__}({', '.join(f'{name}={field!r}' for name, field in given if field is not None)})"


# Orders of magnitude: 4e14 FLOP/s of bfloat16 products, 40 GB/s of network per GPU and 25 GB/s to its host; 1e11 FLOP/s and
# 1 GB/s per CPU core.
_MODELS = {"cuda": CostModel(1e4, 1e10, host_flops_per_byte=1.6e4)}
# Several nodes of GPUs: 300 GB/s and 10 µs inside a node, the above between nodes.
_ON_SEVERAL_NODES = {"cuda": CostModel(1.3e3, 4e9, 1e4, 1e10, 1.6e4)}
_CPU = CostModel(100.0, 5e7)


def cost_model_for(device_type: str, *, several_nodes: bool = False) -> CostModel:
    """The model for a kind of device. It is the same on every rank, as plans must be."""
    models = _ON_SEVERAL_NODES if several_nodes else _MODELS
    return models.get(device_type, _CPU)


CostModelLike: TypeAlias = "CostModel | str | os.PathLike[str]"


def cost_model_from(value: CostModelLike | None) -> CostModel | None:
    """The cost model that a user named: itself, from a file of rates, or None."""
    if value is None or isinstance(value, CostModel):
        return value
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ConfigError(f"cost_model={shown(value)} must be a CostModel, the name of a calibration file, or None.")
    try:
        return RatesReader.open(value).cost_model()
    except ConfigError as error:
        raise ConfigError(f"cost_model={shown(str(value))}: {error}") from None


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast n × n matrices are worked on by one rank, while all ranks work."""

    dtype: str
    size: int  # n
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class LinkRate:
    """How fast a rank sends, while it receives as much and the other ranks do the same."""

    bytes_per_second: float
    seconds: float  # that an exchange of a few bytes takes


class RatesReader:
    """Reads the fields of a file, and says which one is wrong."""

    def __init__(self, content: Mapping[str, Any], where: str = "") -> None:
        self.content, self._where = content, where

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RatesReader:
        """Reads a file: rates, or a whole report of ``meshmuon doctor --json``."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"it cannot be read: {error.strerror or error}. {_REMEDY}") from None
        except RecursionError:
            raise ConfigError(f"it is not JSON that can be read: it is nested too deeply. {_REMEDY}") from None
        except ValueError as error:  # also of text that is not UTF-8
            raise ConfigError(f"it is not JSON ({error}). {_REMEDY}") from None
        if isinstance(content, Mapping) and isinstance(content.get("calibration"), Mapping):
            content = content["calibration"]
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            raise ConfigError(f"it is no calibration file. {_REMEDY}")
        if content.get("version") != VERSION:
            raise ConfigError(
                f"it has version {content.get('version')!r} of the format, and this meshmuon reads version {VERSION}. {_REMEDY}"
            )
        return cls(content)

    def text(self, name: str) -> str:
        return str(self._field(name, "text", lambda value: isinstance(value, str)))

    def number(self, name: str) -> float:
        self._field(name, "a positive number", lambda value: _is_number(value) and 0 < value < math.inf)
        bounds = f"between {_SMALLEST_RATE:g} and {_LARGEST_RATE:g}"
        return float(self._field(name, bounds, lambda value: _SMALLEST_RATE <= value <= _LARGEST_RATE))

    def whole(self, name: str, most: int) -> int:
        """A whole number from 1 to ``most``."""
        expected = f"a whole number from 1 to {most}"
        return int(self._field(name, expected, lambda value: _is_number(value) and 1 <= value <= most and value == int(value)))

    def rates(self, name: str) -> tuple[Rate, ...]:
        def is_list(value: Any) -> bool:
            return isinstance(value, Sequence) and bool(value) and all(isinstance(row, Mapping) for row in value)

        rows = self._field(name, "a list of rates", is_list)
        readers = [RatesReader(row, f"{name}[{k}].") for k, row in enumerate(rows)]
        return tuple(Rate(row.text("dtype"), row.whole("size", _LARGEST_SIZE), row.number("flops_per_second")) for row in readers)

    def link(self, name: str) -> LinkRate | None:
        """A link, or None if it was not measured."""
        reader = self.inner(name, "a link")
        return None if reader is None else LinkRate(reader.number("bytes_per_second"), reader.number("seconds"))

    def inner(self, name: str, kind: str) -> RatesReader | None:
        """The fields of a field."""
        row = self._field(name, f"{kind} or null", lambda value: value is None or isinstance(value, Mapping))
        return None if row is None else RatesReader(row, f"{name}.")

    def cost_model(self) -> CostModel:
        """What plans take from the file.

        On one node, that is the rate and latency of an exchange of all ranks. On several, bytes have the rates of the links
        inside and between nodes. An exchange inside a node has the latency of its link, one between nodes that of the exchange
        of all ranks.
        """
        exchange, inside, between, copies = map(self.link, ("exchange", "inside", "between", "copies"))
        if exchange is None:
            raise ConfigError(f"it was measured on one rank and knows no link between ranks. {_REMEDY}")
        rate = max(self.rates("orthogonalisation"), key=lambda rate: rate.size).flops_per_second

        def price(link: LinkRate) -> tuple[float, float]:
            return rate / link.bytes_per_second, max(1.0, rate * link.seconds)

        of_host = None if copies is None else price(copies)[0]
        if inside is None or between is None:
            return CostModel(*price(exchange), host_flops_per_byte=of_host)
        return CostModel(*price(inside), price(between)[0], price(exchange)[1], of_host)

    def _field(self, name: str, expected: str, fits: Callable[[Any], bool]) -> Any:
        value = self.content.get(name)
        if not fits(value):
            bits = value.bit_length() if type(value) is int else 0
            given = f"a number of {bits} bits" if bits > 999 else repr(value)[:120]
            raise ConfigError(f"its {self._where}{name} is {given} and must be {expected}. {_REMEDY}")
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
