"""Between weights in host memory and the device on which their matrices travel and are orthogonalised.

Momentum is written into pinned host memory and copied to the device in bulk; updates come back the same way. The elementwise
work is done by the host, beside the weights, while the device works on other matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..device import HOST, Transfers, transfers_for
from ..ortho import Workspace


@dataclass(frozen=True, slots=True)
class Stage:
    """Flat memory of the device, and as much host memory that is copied there and back."""

    device: Tensor
    host: Tensor
    transfers: Transfers

    def to_device(self) -> None:
        """What the device is given next finds what the host has written."""
        self.transfers.load(self.device, self.host)

    def to_host(self) -> None:
        """Returns once the host may read what the device has been given to compute so far, and may write for the next copy."""
        self.transfers.store(self.host, self.device)
        self.transfers.settle()


class Staging:
    """The stages of one device. Those of one name share host memory, as the buffers of a ``Workspace`` do."""

    def __init__(self, device: torch.device) -> None:
        self._transfers = transfers = transfers_for(device)
        self._host = Workspace(lambda size, dtype, _: transfers.host_buffer(size, dtype))

    def flat(self, name: str, device: Tensor) -> Stage:
        """A stage for a flat tensor of the device."""
        return Stage(device, self._host.take(name, device.shape, device.dtype, HOST), self._transfers)

    def matrices(self, name: str, shape: tuple[int, int, int], device: Tensor) -> tuple[Stage, Tensor]:
        """A stage for the flat memory of matrices on the device, and the same matrices in host memory."""
        return self.flat(name, device), self._host.take_matrices(name, shape, device.dtype, HOST)

    def bytes(self) -> int:
        """Host memory held."""
        return self._host.bytes()
