"""The file of ``Muon(cost_model=FILE)``: rates that ``meshmuon doctor --save`` measured, or ``meshmuon plan --save-rates`` wrote.

Only what a plan weighs is read here: how fast matrices are orthogonalised, and the links between ranks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import ConfigError, shown
from .cost import CostModel

FORMAT, VERSION = "meshmuon calibration", 1
_SMALLEST, _LARGEST = 1e-15, 1e24  # of any figure: what lies outside was not measured on a computer
_LARGEST_SIZE = 2**31
_REMEDY = "Write the file with torchrun ... -m meshmuon doctor --save FILE."

CostModelLike: TypeAlias = "CostModel | str | os.PathLike[str]"


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
    def of(cls, content: Any) -> RatesReader:
        """The content of a file: rates, or a whole report of ``meshmuon doctor --json``."""
        if isinstance(content, Mapping) and isinstance(content.get("calibration"), Mapping):
            content = content["calibration"]
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            raise ConfigError(f"it is no calibration file. {_REMEDY}")
        if content.get("version") != VERSION:
            raise ConfigError(
                f"it has version {content.get('version')!r} of the format, and this meshmuon reads version {VERSION}. {_REMEDY}"
            )
        return cls(content)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RatesReader:
        """Reads a file."""
        try:
            return cls.of(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"it cannot be read: {error.strerror or error}. {_REMEDY}") from None
        except RecursionError:
            raise ConfigError(f"it is not JSON that can be read: it is nested too deeply. {_REMEDY}") from None
        except ValueError as error:  # also of JSON and of text that is not UTF-8
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"it is not JSON ({error}). {_REMEDY}") from None

    def text(self, name: str) -> str:
        """A field of text."""
        value = self.content.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, value, "text")
        return value

    def number(self, name: str) -> float:
        """A positive number."""
        value = self.content.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self._wrong(name, value, "a positive number")
        if not _SMALLEST <= value <= _LARGEST:
            raise self._wrong(name, value, f"between {_SMALLEST:g} and {_LARGEST:g}")
        return float(value)

    def whole(self, name: str, most: int) -> int:
        """A whole number from 1 to ``most``."""
        value = self.content.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= most or value != int(value):
            raise self._wrong(name, value, f"a whole number from 1 to {most}")
        return int(value)

    def rates(self, name: str) -> tuple[Rate, ...]:
        """A list of rates."""
        rows = self.content.get(name)
        if not isinstance(rows, Sequence) or not rows or not all(isinstance(row, Mapping) for row in rows):
            raise self._wrong(name, rows, "a list of rates")
        readers = [RatesReader(row, f"{name}[{k}].") for k, row in enumerate(rows)]
        return tuple(
            Rate(reader.text("dtype"), reader.whole("size", _LARGEST_SIZE), reader.number("flops_per_second"))
            for reader in readers
        )

    def link(self, name: str) -> LinkRate | None:
        """A link, or None if it was not measured."""
        reader = self.inner(name, "a link")
        return None if reader is None else LinkRate(reader.number("bytes_per_second"), reader.number("seconds"))

    def inner(self, name: str, kind: str) -> RatesReader | None:
        """The fields of a field."""
        row = self.content.get(name)
        if row is not None and not isinstance(row, Mapping):
            raise self._wrong(name, row, f"{kind} or null")
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

    def _wrong(self, name: str, value: object, expected: str) -> ConfigError:
        shown = f"a number of {value.bit_length()} bits" if type(value) is int and value.bit_length() > 999 else repr(value)[:120]
        return ConfigError(f"its {self._where}{name} is {shown} and must be {expected}. {_REMEDY}")


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
