"""Peers and messages of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .plan_data import PlanData
from .traffic import HeldPiece


@dataclass(frozen=True, slots=True)
class ExchangePeers:
    """One exchange."""

    peers: list[int]  # number of peers of each rank, in the order of the plan's ranks
    messages: int  # pairs of ranks of which one sends something to the other
    largest: int  # bytes of the largest message


WavePeers: TypeAlias = list[tuple[ExchangePeers, ExchangePeers]]
"""The gather and the scatter of each wave."""


def count_peers(plan: PlanData) -> WavePeers:
    """All exchanges."""
    exchanges: WavePeers = []
    for wave in range(len(plan.wave_lanes)):
        scatter = _exchange(plan, wave, gather=False)
        exchanges.append((scatter if plan.wave_owners.mirrored(wave) else _exchange(plan, wave, gather=True), scatter))
    return exchanges


def peers_of_step(plan: PlanData) -> list[int]:
    """Distinct peers per rank over a step."""
    return plan.peer_counter.count(range(len(plan.wave_lanes)))[0]


def _exchange(plan: PlanData, wave: int, *, gather: bool) -> ExchangePeers:
    peers, messages = plan.peer_counter.count([wave], gather=gather)
    return ExchangePeers(peers, messages, _largest_message(plan, wave, gather=gather))


def _largest_message(plan: PlanData, wave: int, *, gather: bool) -> int:
    """Bytes of all pieces that one rank and one owner exchange."""
    owners = plan.wave_owners
    kinds, matrices, largest = owners.kinds, owners.matrices, 0
    way = 0 if gather else 1  # in ``PieceBytes``
    of_owner: dict[int, dict[int, int]] = {}  # owner → number of a matrix → how many such it has
    for number, owned_by in owners.owned[wave].items():
        for owner, count in owned_by.items():
            of_owner.setdefault(owner, {})[number] = count
    most = {number: max(one[way] for one in kinds.nbytes[number]) for number in owners.owned[wave]}
    pieces: dict[int, list[tuple[int, HeldPiece]]] = {}  # number of a matrix → kinds of ranks that hold a piece of it
    for kind, held in enumerate(kinds.held):
        for piece in held:
            pieces.setdefault(piece.matrix, []).append((kind, piece))
    for owner, owned in of_owner.items():
        if sum(count * most[number] for number, count in owned.items()) <= largest:
            continue
        sizes: dict[int, int] = {}  # kind → bytes
        for number, count in owned.items():
            replica = matrices[number].holdings[owner][1]
            for kind, piece in pieces[number]:
                if not gather or piece.replica == replica:
                    sizes[kind] = sizes.get(kind, 0) + piece.nbytes[way] * count
        if kinds.members[kinds.kind_of[owner]] == 1:  # what the owner keeps is no message
            sizes.pop(kinds.kind_of[owner], None)
        largest = max(largest, *sizes.values(), 0)
    return largest
