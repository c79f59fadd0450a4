"""How many bytes a piece has on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..layout import Piece

_ALIGNMENT = 8  # bytes: where two dtypes share a buffer, pieces that stay begin at a multiple of it


class PieceBytes(NamedTuple):
    """Bytes of one piece."""

    gather: int  # on its way to the owner
    scatter: int  # on its way back
    held: int  # of the memory that has room for both


@dataclass(frozen=True, slots=True)
class Wire:
    """Bytes per element on the way to the owner and back."""

    gather: int
    scatter: int

    def of(self, piece: Piece) -> PieceBytes:
        gather, scatter = piece.size * self.gather, piece.size * self.scatter
        held = gather if self.gather == self.scatter else -(-max(gather, scatter) // _ALIGNMENT) * _ALIGNMENT
        return PieceBytes(gather, scatter, held)

    @property
    def itemsize(self) -> float:
        """Bytes per element, the mean of both ways: what a byte costs is the same on both."""
        return self.gather if self.gather == self.scatter else (self.gather + self.scatter) / 2
