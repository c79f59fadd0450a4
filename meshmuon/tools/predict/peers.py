"""Peers and messages of every exchange of a plan, for reports and for machines on which each peer takes time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...plan import PlanData, Relays
from ...plan.traffic import HeldPiece


@dataclass(frozen=True, slots=True)
class ExchangePeers:
    """One exchange. Messages are counted as if everything were sent directly."""

    peers: list[int]  # by rank, in the order of the plan's ranks: how many ranks it sends to or receives from
    messages: int  # pairs of ranks of which one sends something to the other
    largest: int  # bytes of the largest message


WavePeers: TypeAlias = list[tuple[ExchangePeers, ExchangePeers]]
"""The gather and the scatter of each wave."""


def count_peers(plan: PlanData) -> WavePeers:
    """All exchanges; through relays peers are at most those that a rank then has."""
    exchanges: WavePeers = []
    for wave, itemsizes in enumerate(plan.wave_owners.itemsizes):
        scatter = _exchange(plan, wave, gather=False)
        replicated = any(plan.wave_owners.matrices[number].replicas > 1 for number in itemsizes)
        exchanges.append((_exchange(plan, wave, gather=True) if replicated else scatter, scatter))
    return exchanges


def peers_of_step(plan: PlanData) -> list[int]:
    """Distinct peers per rank over a step, likewise."""
    peers, _ = plan.peer_counter.count(range(len(plan.wave_lanes)))
    return _limited(plan, peers)


def _exchange(plan: PlanData, wave: int, *, gather: bool) -> ExchangePeers:
    peers, messages = plan.peer_counter.count([wave], gather=gather)
    return ExchangePeers(_limited(plan, peers), messages, _largest_message(plan, wave, gather=gather))


def _limited(plan: PlanData, peers: list[int]) -> list[int]:
    if not plan.relayed or plan.options.nodes is None:
        return peers
    most = Relays(plan.options.nodes).most_peers
    return [min(count, most) for count in peers]


def _largest_message(plan: PlanData, wave: int, *, gather: bool) -> int:
    """Bytes of all pieces that one rank and one owner exchange."""
    owners = plan.wave_owners
    kinds, matrices, largest = owners.kinds, owners.matrices, 0
    of_owner: dict[int, dict[int, int]] = {}  # owner → number of a matrix → bytes per element
    for number, itemsizes in owners.itemsizes[wave].items():
        for owner, itemsize in itemsizes.items():
            of_owner.setdefault(owner, {})[number] = itemsize
    most = {number: max(matrices[number].sizes) for number in owners.itemsizes[wave]}
    pieces: dict[int, list[tuple[int, HeldPiece]]] = {}  # number of a matrix → kinds of ranks that hold a piece of it
    for kind, held in enumerate(kinds.held):
        for piece in held:
            pieces.setdefault(piece.matrix, []).append((kind, piece))
    for owner, owned in of_owner.items():
        if sum(itemsize * most[number] for number, itemsize in owned.items()) <= largest:
            continue
        sizes: dict[int, int] = {}  # kind → bytes
        for number, itemsize in owned.items():
            replica = matrices[number].holdings[owner][1]
            for kind, piece in pieces[number]:
                if not gather or piece.replica == replica:
                    sizes[kind] = sizes.get(kind, 0) + piece.elements * itemsize
        if kinds.members[kinds.kind_of[owner]] == 1:  # what the owner keeps is no message
            sizes.pop(kinds.kind_of[owner], None)
        largest = max(largest, *sizes.values(), 0)
    return largest
