"""What computing and sending cost, in one unit: FLOPs of the device that orthogonalises."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..layout import ShardedMatrix

_LARGEST = 1e30  # costs stay finite when they are multiplied by bytes and added up


@dataclass(frozen=True, slots=True)
class CostModel:
    """How a device's links compare with its matrix units.

    Attributes:
        flops_per_byte: FLOPs of orthogonalisation in the time that a rank needs to send or receive one byte.
        flops_per_exchange: FLOPs in the time that an exchange of no bytes takes.
    """

    flops_per_byte: float
    flops_per_exchange: float

    def __post_init__(self) -> None:
        for name, value, low in (("flops_per_byte", self.flops_per_byte, 0), ("flops_per_exchange", self.flops_per_exchange, 1)):
            if type(value) not in (int, float) or not low <= value <= _LARGEST:
                raise ConfigError(f"CostModel: {name}={value!r} must be a number of at least {low} and at most {_LARGEST:g}.")

    def owning(self, flops: int, sharded: ShardedMatrix, itemsize: int) -> float:
        """Cost for the rank that owns a matrix: computing it, receiving it and sending it back."""
        return flops + self.flops_per_byte * 2 * sharded.size * itemsize

    def sharing_pays(self, flops: int, sharded: ShardedMatrix, itemsize: int) -> bool:
        """Whether one replica should compute for all, by FLOPs and bytes summed over the ranks.

        For each additional replica, sharing saves one orthogonalisation and one gather and scatter inside the replica; it costs
        sending the matrix to the replica once.
        """
        pieces = max(1, len(sharded.pieces))
        inside = 2 * (pieces - 1) / pieces * sharded.size * itemsize
        return flops + self.flops_per_byte * inside >= self.flops_per_byte * sharded.size * itemsize


# Orders of magnitude: 4e14 FLOP/s of bfloat16 products and 40 GB/s of network per GPU; 1e11 FLOP/s and 1 GB/s per CPU core.
_MODELS = {"cuda": CostModel(1e4, 1e10)}
_CPU = CostModel(100.0, 5e7)


def cost_model_for(device_type: str) -> CostModel:
    """The model for a kind of device. It is the same on every rank, as plans must be."""
    return _MODELS.get(device_type, _CPU)
