"""What computing and sending cost, in one unit: FLOPs of the device that orthogonalises."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..errors import ConfigError
from ..layout import ShardedMatrix
from .nodes import Crossings

_LARGEST = 1e30  # costs stay finite when they are multiplied by bytes and added up


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

    def owning(self, flops: int, sharded: ShardedMatrix, itemsize: float, crossings: Crossings | None = None) -> float:
        """Cost for the rank that owns a matrix: computing it, receiving it and sending it back.

        ``crossings`` counts what travels between nodes; None on one node. The owner is taken to be one that needs the
        fewest.
        """
        moved = 2 * sharded.size
        cost = flops + self.flops_per_byte * moved * itemsize
        if crossings is None:
            return cost
        between = crossings.fewest(sharded)  # exceeds ``moved`` if replicas on other nodes receive the result
        inside_price, between_price = self.flops_per_byte * itemsize, self.per_byte_between * itemsize
        return cost + (between_price - inside_price) * min(between, moved) + between_price * max(0, between - moved)

    def sharing_pays(
        self, flops: int, sharded: ShardedMatrix, itemsize: float, crossings: Crossings | None = None
    ) -> bool:
        """Whether one replica should compute for all, by FLOPs and bytes summed over the ranks.

        For each additional replica, sharing saves one orthogonalisation and one gather and scatter inside the replica;
        it costs sending the matrix to the replica once. Bytes between nodes have their own rate.
        """
        pieces = max(1, len(sharded.pieces))
        inside = 2 * (pieces - 1) / pieces * sharded.size * itemsize
        saved = flops + self.flops_per_byte * inside
        spent = self.flops_per_byte * sharded.size * itemsize
        if crossings is None or sharded.replicas == 1:
            return saved >= spent
        # The additional cost of a byte between nodes.
        extra = (self.per_byte_between - self.flops_per_byte) * itemsize
        fewer = crossings.fewest_apart(sharded) - crossings.fewest(sharded)
        return (sharded.replicas - 1) * (saved - spent) + extra * fewer >= 0


def repr_of_given(value: CostModel | Any) -> str:
    """The ``repr`` of a dataclass without fields that are None.

    Part of a plan's digest: on one node and without relays it reads as it did before plans knew of these.
    """
    entries = [(entry.name, getattr(value, entry.name)) for entry in fields(value)]
    return f"{type(value).__name__}({', '.join(f'{name}={given!r}' for name, given in entries if given is not None)})"


# Orders of magnitude: 4e14 FLOP/s of bfloat16 products, 40 GB/s of network per GPU and 25 GB/s to its host; 1e11 FLOP/s
# and 1 GB/s per CPU core.
_MODELS = {"cuda": CostModel(1e4, 1e10, host_flops_per_byte=1.6e4)}
# Several nodes of GPUs: 300 GB/s and 10 µs inside a node, the above between nodes.
_ON_SEVERAL_NODES = {"cuda": CostModel(1.3e3, 4e9, 1e4, 1e10, 1.6e4)}
_CPU = CostModel(100.0, 5e7)


def cost_model_for(device_type: str, *, several_nodes: bool = False) -> CostModel:
    """The model for a kind of device. It is the same on every rank, as plans must be."""
    models = _ON_SEVERAL_NODES if several_nodes else _MODELS
    return models.get(device_type, _CPU)
