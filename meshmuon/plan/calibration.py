"""What ``meshmuon doctor --save`` measured on a user's machines, as plain data, and what follows from it.

The file is JSON. ``Calibration`` has the same names and units.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import ConfigError
from .cost import CostModel
from .plan_data import PlanData
from .prediction import Prediction, predict
from .rates import Elementwise, Link, Rate, rate_at

FORMAT, VERSION = "meshmuon calibration", 1
_SMALLEST, _LARGEST = 1e-15, 1e24  # of any figure: what lies outside was not measured on a computer
_LARGEST_SIZE, _MOST_RANKS = 2**31, 10**7
_REMEDY = "Write the file with torchrun ... -m meshmuon doctor --save FILE."

CostModelLike: TypeAlias = "CostModel | str | os.PathLike[str]"


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
    inside: Link | None  # between two ranks of one node; None if no node has two ranks
    between: Link | None  # between two ranks of different nodes; None on one node
    exchange: Link | None  # an exchange of all ranks with all ranks, as a step makes it; None on one rank
    host_seconds_per_matrix: float  # what each tiny matrix adds to a step
    host_seconds_per_step: float  # what a step takes beside its matrices and exchanges
    elementwise: Elementwise | None = None  # None in files that were written before it was measured
    exchange_cpu_share: float | None = None  # CPU seconds of an exchange ÷ its seconds, if the device is a CPU; None likewise
    copies: Link | None = None  # between the memory of a device and pinned memory of its host; None on CPU
    seconds_per_peer: float = 0.0  # what each peer adds to an exchange; 0 where ``exchange`` was measured with all of them

    def cost_model(self) -> CostModel:
        """What plans take from it.

        On one node, that is the rate and latency of an exchange of all ranks. On several, bytes have the rates of the links
        inside and between nodes. An exchange inside a node has the latency of its link, one between nodes that of the exchange
        of all ranks.
        """
        if self.exchange is None:
            raise ConfigError(f"it was measured on one rank and knows no link between ranks. {_REMEDY}")
        rate = max(self.orthogonalisation, key=lambda rate: rate.size).flops_per_second

        def price(link: Link) -> tuple[float, float]:
            return rate / link.bytes_per_second, max(1.0, rate * link.seconds)

        of_host = None if self.copies is None else price(self.copies)[0]
        if self.inside is None or self.between is None:
            return CostModel(*price(self.exchange), host_flops_per_byte=of_host)
        return CostModel(*price(self.inside), price(self.between)[0], price(self.exchange)[1], of_host)

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
        """Of a kind of elementwise work, by its name in ``Elementwise``; 0 if it was not measured."""
        return 0.0 if self.elementwise is None else float(getattr(self.elementwise, kind))

    def completed(self, exchange: Link, seconds_per_peer: float, elementwise: Elementwise) -> Calibration:
        """With these figures in the place of what was not measured: links on one rank, elementwise work in older files."""
        completed = replace(self, elementwise=self.elementwise or elementwise)
        return completed if self.exchange else replace(completed, exchange=exchange, seconds_per_peer=seconds_per_peer)

    def predict(self, plan: PlanData, *, averages: bool = False) -> Prediction:
        """How long a step of ``Muon`` with this plan takes, or one of ``DistMuon`` if it ``averages`` gradients."""
        return predict(plan, self, averages=averages)

    def to_json(self) -> dict[str, Any]:
        """The content of the file. What peers add is there if it is a figure of its own, as in rates that were not measured."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        if not self.seconds_per_peer:
            del content["seconds_per_peer"]
        return content

    @classmethod
    def from_json(cls, content: Any) -> Calibration:
        """The calibration in a file's content: what ``to_json`` returned, or a whole report of ``meshmuon doctor --json``."""
        if isinstance(content, Mapping) and isinstance(content.get("calibration"), Mapping):
            content = content["calibration"]
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            raise ConfigError(f"it is no calibration file. {_REMEDY}")
        if content.get("version") != VERSION:
            raise ConfigError(
                f"it has version {content.get('version')!r} of the format, and this meshmuon reads version {VERSION}. {_REMEDY}"
            )
        reader = _Reader(content)
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
            elementwise=reader.elementwise("elementwise"),
            exchange_cpu_share=None if content.get("exchange_cpu_share") is None else reader.number("exchange_cpu_share"),
            copies=reader.link("copies"),
            seconds_per_peer=0.0 if content.get("seconds_per_peer") is None else reader.number("seconds_per_peer"),
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads a file."""
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"it cannot be read: {error.strerror or error}. {_REMEDY}") from None
        except RecursionError:
            raise ConfigError(f"it is not JSON that can be read: it is nested too deeply. {_REMEDY}") from None
        except ValueError as error:  # also of JSON and of text that is not UTF-8
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"it is not JSON ({error}). {_REMEDY}") from None


class _Reader:
    """Reads the fields of a file, and says which one is wrong."""

    def __init__(self, content: Mapping[str, Any], where: str = "") -> None:
        self._content, self._where = content, where

    def text(self, name: str) -> str:
        value = self._content.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, value, "text")
        return value

    def number(self, name: str) -> float:
        value = self._content.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self._wrong(name, value, "a positive number")
        if not _SMALLEST <= value <= _LARGEST:
            raise self._wrong(name, value, f"between {_SMALLEST:g} and {_LARGEST:g}")
        return float(value)

    def whole(self, name: str, most: int) -> int:
        value = self._content.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= most or value != int(value):
            raise self._wrong(name, value, f"a whole number from 1 to {most}")
        return int(value)

    def rates(self, name: str) -> tuple[Rate, ...]:
        rows = self._content.get(name)
        if not isinstance(rows, Sequence) or not rows or not all(isinstance(row, Mapping) for row in rows):
            raise self._wrong(name, rows, "a list of rates")
        readers = [_Reader(row, f"{name}[{k}].") for k, row in enumerate(rows)]
        return tuple(
            Rate(reader.text("dtype"), reader.whole("size", _LARGEST_SIZE), reader.number("flops_per_second"))
            for reader in readers
        )

    def link(self, name: str) -> Link | None:
        row = self._content.get(name)
        if row is None:
            return None
        if not isinstance(row, Mapping):
            raise self._wrong(name, row, "a link or null")
        reader = _Reader(row, f"{name}.")
        return Link(reader.number("bytes_per_second"), reader.number("seconds"))

    def elementwise(self, name: str) -> Elementwise | None:
        row = self._content.get(name)
        if row is None:
            return None
        if not isinstance(row, Mapping):
            raise self._wrong(name, row, "the times of elementwise work or null")
        reader = _Reader(row, f"{name}.")
        return Elementwise(**{field.name: reader.number(field.name) for field in fields(Elementwise)})

    def _wrong(self, name: str, value: object, expected: str) -> ConfigError:
        shown = f"a number of {value.bit_length()} bits" if type(value) is int and value.bit_length() > 999 else repr(value)[:120]
        return ConfigError(f"its {self._where}{name} is {shown} and must be {expected}. {_REMEDY}")


def cost_model_from(value: CostModelLike | None) -> CostModel | None:
    """The cost model that a user named: itself, from a calibration file, or None."""
    if value is None or isinstance(value, CostModel):
        return value
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ConfigError(f"cost_model={str(value)[:120]!r} must be a CostModel, the name of a calibration file, or None.")
    try:
        return Calibration.load(value).cost_model()
    except ConfigError as error:
        raise ConfigError(f"cost_model={str(value)[:120]!r}: {error}") from None
