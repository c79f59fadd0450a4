"""The rates of a machine in a file that ``meshmuon doctor --save`` has written, and what plans take from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import ConfigError, shown
from .cost import CostModel

FORMAT, VERSION = "meshmuon calibration", 1  # of the file
REMEDY = "Write the file with torchrun ... -m meshmuon doctor --save FILE."
SMALLEST_RATE, LARGEST_RATE = 1e-15, 1e24  # what lies outside was not measured on a computer

CostModelLike: TypeAlias = "CostModel | str | os.PathLike[str]"


def cost_model_from(value: CostModelLike | None) -> CostModel | None:
    """What a user named: costs, a file of rates, or None."""
    if value is None or isinstance(value, CostModel):
        return value
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ConfigError(f"cost_model={shown(value)} must be a CostModel, the name of a calibration file, or None.")
    try:
        return cost_model_of(read_rates(value))
    except ConfigError as error:
        raise ConfigError(f"cost_model={shown(str(value))}: {error}") from None


def cost_model_of(rates: Mapping[str, Any]) -> CostModel:
    """The costs by the content of a file.

    Work has the rate of the largest square matrices. On one node, bytes have the rate and latency of an exchange of all
    ranks. On several, they have the rates of the links inside and between nodes. An exchange inside a node has the
    latency of its link, one between nodes that of the exchange of all ranks.
    """
    rows = rates.get("orthogonalisation")
    if not isinstance(rows, (list, tuple)) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"its orthogonalisation is {shown(rows)} and must be a list of rates. {REMEDY}")
    if rates.get("exchange") is None:
        raise ConfigError(f"it was measured on one rank and knows no link between ranks. {REMEDY}")
    sizes = [(row.get("length") is None, _number(row, "orthogonalisation", "size"), k) for k, row in enumerate(rows)]
    rate = _number(rows[max(sizes)[2]], "orthogonalisation", "flops_per_second")

    def of(link: str) -> tuple[float, float]:
        return rate / _number(rates[link], link, "bytes_per_second"), max(
            1.0, rate * _number(rates[link], link, "seconds")
        )

    per_byte_of_host = None if rates.get("copies") is None else of("copies")[0]
    per_peer = rate * _number(rates, "", "seconds_per_peer") if rates.get("seconds_per_peer") else None
    per_byte, per_exchange = of("exchange")
    if rates.get("inside") is None or rates.get("between") is None:
        return CostModel(per_byte, per_exchange, None, None, per_byte_of_host, per_peer)
    return CostModel(*of("inside"), of("between")[0], per_exchange, per_byte_of_host, per_peer)


def _number(entries: Any, where: str, name: str) -> float:
    value: Any = entries.get(name) if isinstance(entries, Mapping) else None
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not known or not SMALLEST_RATE <= value <= LARGEST_RATE:
        place = f"{where}.{name}" if where else name
        raise ConfigError(f"its {place} is {shown(value)} and must be a positive number. {REMEDY}")
    return float(value)


def read_rates(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The rates in a file, which may be a whole report of ``meshmuon doctor --json``."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror or error}. {REMEDY}") from None
    except RecursionError:
        raise ConfigError(f"it is not JSON that can be read: it is nested too deeply. {REMEDY}") from None
    except ValueError as error:  # also of text that is not UTF-8
        raise ConfigError(f"it is not JSON ({error}). {REMEDY}") from None
    if isinstance(content, Mapping) and isinstance(content.get("calibration"), Mapping):
        content = content["calibration"]
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        raise ConfigError(f"it is no calibration file. {REMEDY}")
    if content.get("version") != VERSION:
        raise ConfigError(
            f"it has version {content.get('version')!r} of the format, and this meshmuon reads version {VERSION}. "
            f"{REMEDY}"
        )
    return content
