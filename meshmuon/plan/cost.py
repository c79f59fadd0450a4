"""What computing and sending cost, in one unit: FLOPs of the device that orthogonalises."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import ShardedMatrix


@dataclass(frozen=True, slots=True)
class CostModel:
    """How a device's links compare with its matrix units."""

    flops_per_byte: float  # FLOPs in the time that a rank needs to send or receive one byte
    flops_per_exchange: float  # FLOPs in the time that an exchange of no bytes takes

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
