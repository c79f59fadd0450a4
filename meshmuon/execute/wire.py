"""What travels: dtypes to the owners and back, and the copies into int8 and out of it.

Every element of a matrix that is exchanged is rounded, also what its owner holds itself: bits do not depend on who owns
what. Pieces in int8 that stay on their rank are therefore stored as if they had travelled. Where a holder has only a
part of a block, it does not know the block's scale: then pieces are gathered as they are, and the owner rounds the
matrix (``by_owner``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..layout import Piece
from ..plan import PlannedParam, Wire, bytes_of
from .step_param import StepParam


@dataclass(frozen=True, slots=True)
class LaneWire:
    """How the matrices of a lane travel."""

    gather: torch.dtype
    scatter: torch.dtype
    by_owner: bool  # gathers are not rounded on the way, but by the owner, to int8
    nbytes: Wire

    @classmethod
    def of(cls, planned: PlannedParam, step_param: StepParam) -> LaneWire:
        gather, scatter = step_param.comm_dtype
        by_owner = gather == torch.int8 and planned.itemsize != gather.itemsize
        return cls(step_param.update_dtype if by_owner else gather, scatter, by_owner, planned.wire)

    @property
    def base(self) -> torch.dtype:
        """Dtype of the buffers that both directions share: bytes if they differ."""
        return self.gather if self.gather == self.scatter else torch.int8


def size_on_wire(piece: Piece, dtype: torch.dtype) -> int:
    """Elements of ``dtype`` that a piece takes on the wire, its scales included."""
    return bytes_of(piece, dtype.itemsize) // dtype.itemsize
