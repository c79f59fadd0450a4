"""What computing and sending cost, in one unit: FLOPs of the device that orthogonalises."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..errors import ConfigError
from ..layout import ShardedMatrix
from .nodes import Crossings

_LARGEST = 1e30  # costs stay finite when they are multiplied by bytes and added up
_WORTH = 14  # empty exchanges that take as long as what an exchange more costs a step


@dataclass(frozen=True, slots=True, repr=False)
class CostModel:
    """How a device's links compare with its matrix units.

    Attributes:
        flops_per_byte: FLOPs of orthogonalisation in the time that a rank needs to send or receive one byte.
        flops_per_exchange: FLOPs in the time that an exchange of no bytes takes.
        between_flops_per_byte: the first between ranks of different nodes; None if it is the same there.
        between_flops_per_exchange: the second for an exchange between ranks of several nodes; None if it is the same
            there.
        host_flops_per_byte: the first between the memory of a device and that of its host, for weights that are there;
            None if it is the same as between ranks.
        flops_per_peer: FLOPs in the time that each peer adds to an exchange; None for no time.
    """

    flops_per_byte: float
    flops_per_exchange: float
    between_flops_per_byte: float | None = None
    between_flops_per_exchange: float | None = None
    host_flops_per_byte: float | None = None
    flops_per_peer: float | None = None

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

    def waves(self, nbytes: int, peers: int, *, several_nodes: bool, most: int) -> int:
        """The number of waves, up to ``most``, in which a rank that sends and receives ``nbytes`` ends first.

        No wave computes beside the first gather and the last scatter. With w waves of sizes 1, 2, … 2, 1 these take
        4/(w + 1)² of the time L of all bytes. Each wave costs C: two exchanges, counted ``_WORTH`` times, since its
        batches are smaller and ranks meet. The sum of both, 4·L/(w + 1)² + w·C, is least at (w + 1)³ = 8·L/C. That is
        compared without a root, whose last bit differs between machines.
        """
        links = nbytes * (self.per_byte_between if several_nodes else self.flops_per_byte)
        overhead = 2 * (_WORTH * self.per_exchange(several_nodes=several_nodes) + (self.flops_per_peer or 0.0) * peers)
        return next((count for count in range(most, 1, -1) if 8 * links >= overhead * (count + 0.5) ** 3), 1)

    def owning(self, flops: int, sharded: ShardedMatrix, itemsize: float, crossings: Crossings | None = None) -> float:
        """Cost for the rank that owns a matrix: computing it, receiving it once and sending it to every replica.

        ``crossings`` counts what travels between nodes; None on one node. The owner is taken to be one that needs the
        fewest.
        """
        between = 0 if crossings is None else crossings.fewest(sharded)
        inside = (1 + sharded.replicas) * sharded.size - between
        return flops + itemsize * (self.flops_per_byte * inside + self.per_byte_between * between)


def repr_of_given(value: CostModel | Any) -> str:
    """The ``repr`` of a dataclass without fields that are None.

    Part of a plan's digest: on one node it reads as it did before plans knew of several.
    """
    entries = [(entry.name, getattr(value, entry.name)) for entry in fields(value)]
    return f"{type(value).__name__}({', '.join(f'{name}={given!r}' for name, given in entries if given is not None)})"


# Orders of magnitude. GPUs: 4e14 FLOP/s of bfloat16 products; 300 GB/s and 10 µs inside a node, 40 GB/s and 25 µs
# between nodes, 25 GB/s to the host, 0.5 µs for each peer. CPUs: 1e11 FLOP/s and 1 GB/s per core.
_GPU = CostModel(1.3e3, 4e9, 1e4, 1e10, 1.6e4, 2e8)
_CPU = CostModel(100.0, 5e7)


def cost_model_for(device_type: str) -> CostModel:
    """The model for a kind of device. It is the same on every rank, as plans must be."""
    return _GPU if device_type == "cuda" else _CPU
