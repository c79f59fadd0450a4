"""One rank's part of a plan: what it sends and receives in each wave, in the order of the buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Plan
from .tasks import NO_WAVE, PieceTransfer

__all__ = ["WaveRoutes", "routes_of"]


@dataclass(frozen=True, slots=True)
class WaveRoutes:
    """A wave as one rank sees it. Lists are in buffer order: by the other rank, then by task.

    Attributes:
        gather_out: own pieces that leave for their owners.
        gather_in: pieces that arrive for the matrices that this rank owns.
        scatter_out: pieces of results that leave for their holders.
        scatter_in: pieces of results that arrive for this rank's own shards.
        own: pieces that this rank holds of matrices that it owns; they stay.
        owned: the tasks that this rank owns.
    """

    gather_out: tuple[PieceTransfer, ...]
    gather_in: tuple[PieceTransfer, ...]
    scatter_out: tuple[PieceTransfer, ...]
    scatter_in: tuple[PieceTransfer, ...]
    own: tuple[PieceTransfer, ...]
    owned: tuple[int, ...]


def routes_of(plan: Plan, rank: int) -> tuple[WaveRoutes, ...]:
    """The routes of ``rank``, wave by wave."""
    waves = [_Lists() for _ in plan.lanes]
    for index, task in enumerate(plan.tasks):
        if task.wave == NO_WAVE:
            continue
        wave, sharded = waves[task.wave], task.sharded
        if task.owner == rank:
            wave.owned.append(index)
            wave.gather_in.extend(plan.gather_sends(index))
            wave.scatter_out.extend(plan.scatter_sends(index))
            wave.own.append(PieceTransfer(index, rank, rank, sharded.pieces[sharded.piece_and_replica[rank][0]]))
            continue
        piece = sharded.piece_of(rank)
        if piece is not None:
            wave.scatter_in.append(PieceTransfer(index, task.owner, rank, piece))
            if sharded.sends_to(rank, task.owner):
                wave.gather_out.append(PieceTransfer(index, rank, task.owner, piece))
    return tuple(wave.ordered() for wave in waves)


class _Lists:
    def __init__(self) -> None:
        self.gather_out: list[PieceTransfer] = []
        self.gather_in: list[PieceTransfer] = []
        self.scatter_out: list[PieceTransfer] = []
        self.scatter_in: list[PieceTransfer] = []
        self.own: list[PieceTransfer] = []
        self.owned: list[int] = []

    def ordered(self) -> WaveRoutes:
        return WaveRoutes(
            gather_out=_by_peer(self.gather_out),
            gather_in=_by_peer(self.gather_in),
            scatter_out=_by_peer(self.scatter_out),
            scatter_in=_by_peer(self.scatter_in),
            own=tuple(self.own),
            owned=tuple(self.owned),
        )


def _by_peer(sends: Sequence[PieceTransfer]) -> tuple[PieceTransfer, ...]:
    # One end of every send is this rank, so that ordering by both ends orders by the other one; each pair of ranks then
    # lists the same tasks in the same order on both sides.
    return tuple(sorted(sends, key=lambda send: (send.source, send.target, send.task)))
