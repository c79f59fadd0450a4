"""Peers and messages of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ...plan import PlanData
from ...plan.traffic import HeldPiece, WaveOwners


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
    counter = PeerCounter(plan.wave_owners)
    for wave in range(len(plan.wave_lanes)):
        scatter = _exchange(plan, counter, wave, gather=False)
        exchanges.append(
            (scatter if plan.wave_owners.mirrored(wave) else _exchange(plan, counter, wave, gather=True), scatter)
        )
    return exchanges


def peers_of_step(plan: PlanData) -> list[int]:
    """Distinct peers per rank over a step."""
    return PeerCounter(plan.wave_owners).count(range(len(plan.wave_lanes)))[0]


def _exchange(plan: PlanData, counter: PeerCounter, wave: int, *, gather: bool) -> ExchangePeers:
    peers, messages = counter.count([wave], gather=gather)
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


class PeerCounter:
    """Counts the peers of every rank. Owners talk to all holders of their matrices; a plan has few sets of holders."""

    def __init__(self, owners: WaveOwners) -> None:
        self._owners = owners
        numbers: dict[frozenset[int], int] = {}
        # (matrix, replica; None for all) → number of its set of holders
        self._set_of: dict[tuple[int, int | None], int] = {}
        for number, sharded in enumerate(owners.matrices):
            everyone = numbers.setdefault(frozenset(sharded.holdings), len(numbers))
            self._set_of[number, None] = self._set_of[number, 0] = everyone
            for replica in range(sharded.replicas if sharded.replicas > 1 else 0):
                holders = frozenset(piece.holders[replica] for piece in sharded.pieces)
                self._set_of[number, replica] = numbers.setdefault(holders, len(numbers))
        self._sets = tuple(numbers)
        sets_of: dict[int, list[int]] = {}
        for number, holders in enumerate(self._sets):
            for rank in holders:
                sets_of.setdefault(rank, []).append(number)
        self._members: dict[tuple[int, ...], list[int]] = {}  # ranks that are in the same sets
        for rank, of_rank in sets_of.items():
            self._members.setdefault(tuple(of_rank), []).append(rank)

    def count(self, waves: Iterable[int], *, gather: bool = False) -> tuple[list[int], int]:
        """Peers of every rank over ``waves``, in the order of the ranks, and pairs of ranks of which one sends to the
        other.

        In the gather each owner's own replica contributes; the scatter reaches all replicas. Ranks that hold pieces in
        the same sets, and own matrices in the same ones of these, have the same number of peers.
        """
        owners: dict[int, set[int]] = {}  # number of a set of holders → the owners that they talk to
        for wave in waves:
            for number, owned_by in self._owners.owned[wave].items():
                holdings = self._owners.matrices[number].holdings
                for owner in owned_by:
                    owners.setdefault(self._set_of[number, holdings[owner][1] if gather else None], set()).add(owner)
        owned: dict[int, list[int]] = {}
        for number in sorted(owners):
            for owner in owners[number]:
                owned.setdefault(owner, []).append(number)
        peers, messages = [0] * len(self._owners.position), 0
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for sets, members in self._members.items():
            active = tuple(number for number in sets if number in owners)
            senders = frozenset[int]().union(*(owners[number] for number in active))
            for rank in members if senders else ():
                own = tuple(owned.get(rank, ()))
                if (active, own) not in found:
                    found[active, own] = len(senders.union(*(self._sets[number] for number in own)))
                peers[self._owners.position[rank]] = found[active, own] - bool(own)  # an owner is in its own sets
                messages += len(senders) - bool(own)
        return peers, messages
