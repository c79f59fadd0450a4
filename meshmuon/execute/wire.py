"""What travels: dtypes to the owners and back.

Every element of a matrix that is exchanged is rounded, also what its owner holds itself: bits do not depend on who owns
what.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..plan import PlannedParam, Wire
from .step_param import StepParam


@dataclass(frozen=True, slots=True)
class LaneWire:
    """How the matrices of a lane travel."""

    gather: torch.dtype
    scatter: torch.dtype
    nbytes: Wire

    @classmethod
    def of(cls, planned: PlannedParam, step_param: StepParam) -> LaneWire:
        return cls(*step_param.comm_dtype, planned.wire)

    @property
    def base(self) -> torch.dtype:
        """Dtype of the buffers that both directions share: bytes if they differ."""
        return self.gather if self.gather == self.scatter else torch.uint8
