"""How many elements the exchange buffers of a wave need on a rank.

A wave in flight has two buffers:

- ``shards`` holds the pieces of this rank's shards: the gather sends from it, the scatter receives into it. Pieces that stay are
  at its end. The scatter may overwrite it, because it starts only after the gather was waited for.
- ``gathered`` holds pieces of the matrices that this rank owns: the gather receives into it, the scatter sends from it. Where
  replicas share an owner, the owner sends more than it receives, and the scatter sends from a third buffer, ``results``.

An (8, D) matrix over ranks 0 to 3, owned by rank 1: ``shards`` has 2·D elements on every rank, ``gathered`` has 6·D on rank 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .routes import WaveRoutes
from .tasks import PieceTransfer


@dataclass(frozen=True, slots=True)
class WaveSizes:
    """Elements of one wave's buffers on one rank."""

    shards: int
    staying_offset: int  # where the pieces that stay begin in ``shards``
    gathered: int
    results: int  # 0 where the scatter sends ``gathered``


def wave_sizes(routes: WaveRoutes) -> WaveSizes:
    """The sizes of one wave."""
    travelling = max(_elements(routes.gather_out), _elements(routes.scatter_in))
    received, sent = _elements(routes.gather_in), _elements(routes.scatter_out)
    mirrored = [(t.source, t.task) for t in routes.gather_in] == [(t.target, t.task) for t in routes.scatter_out]
    return WaveSizes(travelling + _elements(routes.staying), travelling, received, 0 if mirrored else sent)


def slot_sizes(waves: Sequence[WaveSizes]) -> tuple[int, int, int]:
    """Elements of ``shards``, ``gathered`` and ``results`` that fit each of ``waves``, which use the slot one after the other."""
    return (
        max((wave.shards for wave in waves), default=0),
        max((wave.gathered for wave in waves), default=0),
        max((wave.results for wave in waves), default=0),
    )


def _elements(transfers: Sequence[PieceTransfer]) -> int:
    return sum(transfer.piece.size for transfer in transfers)
