"""How much memory the exchanges of a plan need on a rank. Buffers are made once, from these sizes.

A wave in flight has two buffers: ``mine`` for the pieces of this rank's shards (out for the gather, back from the scatter; pieces
that stay are at its end) and ``theirs`` for the matrices that it owns (in from the gather, out for the scatter). Where replicas
share, more leaves than came in, and the results need a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .routes import WaveRoutes
from .tasks import PieceTransfer

__all__ = ["SlotSizes", "WaveSizes", "slot_sizes", "wave_sizes"]


@dataclass(frozen=True, slots=True)
class WaveSizes:
    """Elements of one wave's buffers on one rank; ``results`` is 0 when they go back through ``theirs``."""

    mine: int
    own_offset: int
    theirs: int
    results: int


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """Elements of the buffers that waves of one lane use in turn."""

    mine: int
    theirs: int
    results: int


def wave_sizes(routes: WaveRoutes) -> WaveSizes:
    """The sizes of one wave."""
    travelling = max(_elements(routes.gather_out), _elements(routes.scatter_in))
    comes, goes = _elements(routes.gather_in), _elements(routes.scatter_out)
    mirrored = [(s.source, s.task) for s in routes.gather_in] == [(s.target, s.task) for s in routes.scatter_out]
    return WaveSizes(travelling + _elements(routes.own), travelling, comes, 0 if mirrored else goes)


def slot_sizes(waves: Sequence[WaveSizes]) -> SlotSizes:
    """What fits every one of ``waves``, which use the slot one after the other."""
    return SlotSizes(
        max((wave.mine for wave in waves), default=0),
        max((wave.theirs for wave in waves), default=0),
        max((wave.results for wave in waves), default=0),
    )


def _elements(sends: Sequence[PieceTransfer]) -> int:
    return sum(send.piece.size for send in sends)
