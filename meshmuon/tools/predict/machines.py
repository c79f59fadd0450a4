"""Machines as plain data: rates of products, copies and links, and memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .calibration import Calibration, ElementwiseRates, LinkRate, Rate

FORMAT, VERSION = "meshmuon machine", 1
MACHINE_FILES = Path(__file__).parent / "machine_files"
_DEVICES = ("cpu", "cuda", "xpu", "hpu", "mtia")
_LARGEST = 1e18  # number that a machine may have
# per element in float32: weight, gradient and two moments are read; weight and moments are written
_ADAMW_BYTES = 7 * 4
_MAY_BE_ZERO = ("seconds_per_peer", "connection_bytes", "host_seconds_per_matrix", "host_seconds_per_step")
_OPTIONAL = ("host_seconds_per_launch", "slower_beside_exchange", "seconds_to_compile")
_NUMBERS = ("ranks_per_node", "memory_bytes", "memory_bytes_per_second", *_MAY_BE_ZERO)


@dataclass(frozen=True)
class Machine:
    """What one rank has, and the links between ranks."""

    name: str
    title: str
    source: str  # where the figures are from
    device: str  # type of the device, such as "cuda"
    ranks_per_node: int
    memory_bytes: int  # of one rank
    memory_bytes_per_second: float  # that elementwise work reads and writes
    peak_flops: Mapping[str, float]  # of products, by dtype, per second
    # (shorter side of a matrix, share of the peak that orthogonalising reaches)
    efficiency: tuple[tuple[int, float], ...]
    inside: LinkRate  # between ranks of one node
    between: LinkRate  # between ranks of different nodes
    seconds_per_peer: float  # what each further rank adds to an exchange
    connection_bytes: int  # approximate device memory of a connection to another rank
    host_seconds_per_matrix: float
    host_seconds_per_step: float
    host_seconds_per_launch: float | None = None  # host time to issue a kernel; None if unknown
    # as ``efficiency``, of a single matrix; empty if it is the same
    efficiency_alone: tuple[tuple[int, float], ...] = ()
    slower_beside_exchange: float = 0.0  # slowdown of products while the links are busy, as a share
    seconds_to_compile: float | None = None  # what a first step takes longer, published by others; None if unknown
    # measured rates that replace those above in predictions
    calibration: Calibration | None = field(default=None, repr=False)

    def rates_for(
        self,
        compute_dtype: str = "",
        *,
        several_nodes: bool = True,
        weight: int = 4,
        momentum: int = 4,
        wire: float = 2,
    ) -> Calibration:
        """The rates of a job: measured ones, completed from the file of the machine, or the file's alone.

        ``weight``, ``momentum`` and ``wire`` are the bytes of an element of the weight, of its momentum, and of what is
        sent. The latency of an exchange is that of the slowest link in it. Elementwise work takes as long as the memory
        needs for what it reads and writes.
        """
        exchange, memory = self.between if several_nodes else self.inside, self.memory_bytes_per_second
        if self.calibration is not None:
            if self.calibration.exchange is not None:
                return self.calibration
            # measured on one rank
            return replace(self.calibration, exchange=exchange, seconds_per_peer=self.seconds_per_peer)
        elementwise = ElementwiseRates(
            momentum=(weight + 2 * momentum + wire) / memory,
            update=(wire + 2 * weight) / memory,
            copy=2 * wire / memory,
            adamw=_ADAMW_BYTES * weight / 4 / memory,
        )
        dtype = compute_dtype or self._usual_dtype
        if dtype not in self.peak_flops:
            raise ConfigError(
                f"{self.name} has no rate for products in {dtype}, only for {', '.join(self.peak_flops)}: add it to "
                "its file."
            )
        return Calibration(
            device=self.device,
            device_name=self.title,
            ranks=self.ranks_per_node,
            ranks_per_node=self.ranks_per_node,
            compute_dtype=dtype,
            products=tuple(
                Rate(name, max(size for size, _ in self.efficiency), peak) for name, peak in self.peak_flops.items()
            ),
            orthogonalisation=tuple(
                Rate(dtype, size, share * self.peak_flops[dtype]) for size, share in self.efficiency
            ),
            inside=self.inside,
            between=self.between if several_nodes else None,
            exchange=exchange,
            host_seconds_per_matrix=self.host_seconds_per_matrix,
            host_seconds_per_step=self.host_seconds_per_step,
            elementwise=elementwise,
            seconds_per_peer=self.seconds_per_peer,
            host_seconds_per_launch=self.host_seconds_per_launch,
            alone=tuple(Rate(dtype, size, share * self.peak_flops[dtype]) for size, share in self.efficiency_alone),
            slower_beside_exchange=self.slower_beside_exchange,
        )

    def with_calibration(self, calibration: Calibration) -> Machine:
        """The machine with the measurements of ``meshmuon doctor --save`` instead of the figures of its file."""
        return replace(
            self,
            title=f"{self.title}, measured on {calibration.device_name}",
            device=calibration.device,
            ranks_per_node=calibration.ranks_per_node,
            inside=calibration.inside or calibration.exchange or self.inside,
            between=calibration.between or calibration.exchange or self.between,
            seconds_per_peer=calibration.seconds_per_peer or self.seconds_per_peer,
            calibration=calibration,
        )

    @property
    def _usual_dtype(self) -> str:
        return "float32" if self.device == "cpu" or "bfloat16" not in self.peak_flops else "bfloat16"

    def peak(self) -> float:
        """FLOPs per second to which model FLOP use refers: bfloat16's, unless float32 is faster (CPUs)."""
        rates = [self.peak_flops[dtype] for dtype in ("bfloat16", "float32") if dtype in self.peak_flops]
        return max(rates or self.peak_flops.values())

    @classmethod
    def from_json(cls, content: Any) -> Machine:
        if not isinstance(content, Mapping) or content.get("format") != FORMAT or content.get("version") != VERSION:
            raise ConfigError(
                f"it is no description of a machine: its format must be {FORMAT!r} and its version {VERSION}."
            )
        numbers = {name: content.get(name) for name in _NUMBERS}
        numbers |= {name: content[name] for name in _OPTIONAL if content.get(name) is not None}
        shares = {name: content.get(name, []) for name in ("efficiency", "efficiency_alone")}
        rows = {
            f"{name}[{k}]": row | {"size": int(row["size"])} for name, of in shares.items() for k, row in enumerate(of)
        }
        rows |= {name: content[name] for name in ("inside", "between", "peak_flops")}
        numbers |= {f"{where} {key}": value for where, row in rows.items() for key, value in row.items()}
        for name, value in numbers.items():
            may_be_zero = name in _MAY_BE_ZERO or name.endswith(" seconds")
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _LARGEST
            if not number or (value == 0 and not may_be_zero):
                raise ConfigError(f"its {name} is {value!r} and must be a number{'' if may_be_zero else ' above 0'}.")
        if not content["efficiency"] or not content["peak_flops"]:
            raise ConfigError("its efficiency and peak_flops need at least one row each.")
        if not isinstance(content["device"], str) or content["device"] not in _DEVICES:
            raise ConfigError(f"its device is {content['device']!r} and must be one of {', '.join(_DEVICES)}.")
        return cls(
            **{name: content[name] for name in (*_NUMBERS, "name", "title", "source", "device")},
            peak_flops={str(dtype): float(rate) for dtype, rate in content["peak_flops"].items()},
            efficiency=_shares(content["efficiency"]),
            efficiency_alone=_shares(content.get("efficiency_alone", [])),
            slower_beside_exchange=content.get("slower_beside_exchange", 0.0),
            inside=LinkRate(**content["inside"]),
            between=LinkRate(**content["between"]),
            host_seconds_per_launch=content.get("host_seconds_per_launch"),
            seconds_to_compile=content.get("seconds_to_compile"),
        )


def _shares(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((int(row["size"]), float(row["share"])) for row in rows))


def machine_names() -> list[str]:
    return sorted(path.stem for path in MACHINE_FILES.glob("*.json"))


@lru_cache(maxsize=8)
def machine_like(device_name: str) -> Machine | None:
    """The machine whose name is in that of a device: "h100" for "NVIDIA H100 80GB HBM3"; None if there is none."""
    name = max((name for name in machine_names() if name in device_name.lower()), key=len, default=None)
    if name is None:
        return None
    return Machine.from_json(json.loads((MACHINE_FILES / f"{name}.json").read_text(encoding="utf-8")))
