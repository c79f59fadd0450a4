"""One rank's view of a plan: the pieces that it sends and receives in each wave, in buffer order, and the sizes of the
buffers.

A wave in flight has two buffers:

- ``shards`` holds the pieces of this rank's shards: the gather sends from it, the scatter receives into it. Pieces that
  stay are at its end. The scatter may overwrite it, because it starts only after the gather was waited for.
- ``gathered`` holds pieces of the matrices that this rank owns: the gather receives into it, the scatter sends from it.
  Where replicas share an owner, the owner sends more than it receives, and the scatter sends from a third buffer,
  ``results``; also where results travel in another dtype.

An (8, D) matrix over ranks 0 to 3, owned by rank 1: ``shards`` has 2·D elements on every rank, ``gathered`` has 6·D on
rank 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .plan_data import PlanData
from .tasks import NO_WAVE, PieceTransfer
from .wire import Wire


@dataclass(frozen=True, slots=True)
class WaveRoutes:
    """A wave as one rank sees it. Lists are in buffer order: by the other rank, then by task.

    An (8, D) matrix in four pieces of 2 rows on ranks 0 to 3, owned by rank 1: on rank 1 ``gather_in`` and
    ``scatter_out`` list the pieces of ranks 0, 2 and 3, and ``staying`` its own piece; on rank 3 ``gather_out`` and
    ``scatter_in`` list its piece.
    """

    gather_out: tuple[PieceTransfer, ...]  # pieces of this rank that go to their owners
    gather_in: tuple[PieceTransfer, ...]  # pieces that arrive for the matrices that this rank owns
    scatter_out: tuple[PieceTransfer, ...]  # pieces of results that go to their holders
    scatter_in: tuple[PieceTransfer, ...]  # pieces of results that arrive for this rank's shards
    staying: tuple[PieceTransfer, ...]  # pieces that this rank holds of matrices that it owns: they do not travel
    owned_tasks: tuple[int, ...]  # the tasks that this rank owns


def routes_of(plan: PlanData, rank: int) -> tuple[WaveRoutes, ...]:
    """The routes of ``rank``, wave by wave."""
    gathers: list[list[PieceTransfer]] = [[] for _ in plan.wave_lanes]
    scatters: list[list[PieceTransfer]] = [[] for _ in plan.wave_lanes]
    for index, task in enumerate(plan.tasks):
        piece = None if task.wave == NO_WAVE else task.sharded.piece_of(rank)
        if piece is None:
            continue
        if task.owner == rank:
            gathers[task.wave].append(PieceTransfer(index, rank, rank, piece))  # stays
            gathers[task.wave].extend(plan.gather_sends(index))  # the pieces of other holders
            scatters[task.wave].extend(plan.scatter_sends(index))  # the results for all other holders
        else:
            scatters[task.wave].append(PieceTransfer(index, task.owner, rank, piece))
            if task.sharded.sends_to(rank, task.owner):
                gathers[task.wave].append(PieceTransfer(index, rank, task.owner, piece))
    return tuple(rank_routes(rank, *wave) for wave in zip(gathers, scatters, strict=True))


def rank_routes(rank: int, gathers: Sequence[PieceTransfer], scatters: Sequence[PieceTransfer]) -> WaveRoutes:
    """What ``rank`` does in ``gathers`` and ``scatters``; a gather from a rank to itself is a piece that stays."""
    return WaveRoutes(
        gather_out=_by_peer(transfer for transfer in gathers if transfer.source == rank != transfer.target),
        gather_in=_by_peer(transfer for transfer in gathers if transfer.target == rank != transfer.source),
        scatter_out=_by_peer(transfer for transfer in scatters if transfer.source == rank != transfer.target),
        scatter_in=_by_peer(transfer for transfer in scatters if transfer.target == rank != transfer.source),
        staying=tuple(transfer for transfer in gathers if transfer.source == transfer.target == rank),
        owned_tasks=tuple(dict.fromkeys(transfer.task for transfer in gathers if transfer.target == rank)),
    )


def _by_peer(transfers: Iterable[PieceTransfer]) -> tuple[PieceTransfer, ...]:
    # One end of every transfer is this rank: ordering by both ends orders by the other one. Each pair of ranks then
    # lists the same tasks in the same order on both sides.
    return tuple(sorted(transfers, key=lambda transfer: (transfer.source, transfer.target, transfer.task)))


class WaveSizes(NamedTuple):
    """Sizes of one wave's buffers on one rank."""

    shards: int
    staying_offset: int  # where the pieces that stay begin in ``shards``
    gathered: int
    results: int  # 0 where the scatter sends ``gathered``


def wave_sizes(routes: WaveRoutes, wire: Wire | None = None) -> WaveSizes:
    """The sizes in bytes on a ``wire``, or in elements."""

    def total(transfers: Sequence[PieceTransfer], kind: str) -> int:
        return sum(t.piece.size if wire is None else getattr(wire.of(t.piece), kind) for t in transfers)

    travelling = max(total(routes.gather_out, "held"), total(routes.scatter_in, "held"))
    received, sent = total(routes.gather_in, "gather"), total(routes.scatter_out, "scatter")
    mirrored = [(t.source, t.task) for t in routes.gather_in] == [(t.target, t.task) for t in routes.scatter_out]
    mirrored = mirrored and (wire is None or wire.gather == wire.scatter)
    return WaveSizes(travelling + total(routes.staying, "held"), travelling, received, 0 if mirrored else sent)


def slot_sizes(waves: Sequence[WaveSizes]) -> tuple[int, int, int]:
    """Sizes of ``shards``, ``gathered`` and ``results`` that fit each of ``waves``, which use the slot one after
    the other.
    """
    shards, _, gathered, results = map(max, zip(WaveSizes(0, 0, 0, 0), *waves, strict=True))
    return shards, gathered, results
