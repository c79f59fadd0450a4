"""With how many ranks every rank exchanges pieces, and in how many messages, counted without listing the transfers.

Owners talk to all holders of their matrices. Holders are compared as sets, of which a plan has few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .rank_kinds import HeldPiece
from .traffic import WaveOwners


@dataclass(frozen=True, slots=True)
class ExchangePeers:
    """One exchange. Messages are counted as if everything were sent directly."""

    peers: list[int]  # by rank, in the order of the plan's ranks: how many ranks it sends to or receives from
    messages: int  # pairs of ranks of which one sends something to the other
    largest: int  # bytes of the largest message

    def at_most(self, peers: int) -> ExchangePeers:
        """With no more than ``peers`` at any rank."""
        return replace(self, peers=[min(count, peers) for count in self.peers])


class PeerCounter:
    """Counts the peers of one plan."""

    def __init__(self, ranks: Sequence[int], owners: WaveOwners) -> None:
        self._owners, self._count = owners, len(ranks)
        self._position = {rank: position for position, rank in enumerate(ranks)}
        numbers: dict[frozenset[int], int] = {}
        self._set_of: dict[tuple[int, int | None], int] = {}  # (matrix, replica; None for all) → number of its set of holders
        for number, sharded in enumerate(owners.matrices):
            everyone = numbers.setdefault(frozenset(sharded.holdings), len(numbers))
            self._set_of[number, None] = everyone
            for replica in range(sharded.replicas):
                if sharded.replicas == 1:
                    self._set_of[number, replica] = everyone
                else:
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
        self._pieces: dict[int, list[tuple[int, HeldPiece]]] = {}  # matrix → kinds of ranks that hold a piece of it
        for kind, held in enumerate(owners.kinds.held):
            for piece in held:
                self._pieces.setdefault(piece.matrix, []).append((kind, piece))

    def wave(self, wave: int) -> tuple[ExchangePeers, ExchangePeers]:
        """The gather of a wave, to which each owner's own replica contributes, and its scatter, which reaches all replicas."""
        scatter = self._exchange(wave, gather=False)
        replicated = any(self._owners.matrices[number].replicas > 1 for number in self._owners.itemsizes[wave])
        return (self._exchange(wave, gather=True) if replicated else scatter), scatter

    def _exchange(self, wave: int, *, gather: bool) -> ExchangePeers:
        peers, messages = self._peers(self._owners_of_sets([wave], gather=gather))
        return ExchangePeers(peers, messages, self._largest(wave, gather=gather))

    def most(self) -> int:
        """The most peers of a rank in one wave. The scatter has those of the gather and more."""
        waves = range(len(self._owners.counts))
        return max((max(self._peers(self._owners_of_sets([wave], gather=False))[0], default=0) for wave in waves), default=0)

    def of_step(self) -> list[int]:
        """How many ranks each rank has to do with in a whole step."""
        return self._peers(self._owners_of_sets(range(len(self._owners.counts)), gather=False))[0]

    def _owners_of_sets(self, waves: Iterable[int], *, gather: bool) -> dict[int, set[int]]:
        owners: dict[int, set[int]] = {}
        for wave in waves:
            for number, itemsizes in self._owners.itemsizes[wave].items():
                sharded = self._owners.matrices[number]
                if not gather or sharded.replicas == 1:
                    owners.setdefault(self._set_of[number, None], set()).update(itemsizes)
                    continue
                for owner in itemsizes:
                    owners.setdefault(self._set_of[number, sharded.holdings[owner][1]], set()).add(owner)
        return owners

    def _peers(self, owners: Mapping[int, set[int]]) -> tuple[list[int], int]:
        """Ranks that hold pieces in the same sets, and own matrices in the same of these, have equally many peers."""
        peers, messages = [0] * self._count, 0
        owned: dict[int, list[int]] = {}
        for number in sorted(owners):
            for owner in owners[number]:
                owned.setdefault(owner, []).append(number)
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for sets, members in self._members.items():
            active = tuple(number for number in sets if number in owners)
            senders = frozenset().union(*(owners[number] for number in active)) if active else frozenset[int]()
            for rank in members if senders else ():
                own = tuple(owned.get(rank, ()))
                if (active, own) not in found:
                    found[active, own] = len(senders.union(*(self._sets[number] for number in own)))
                peers[self._position[rank]] = found[active, own] - bool(own)  # an owner is in its own sets
                messages += len(senders) - bool(own)
        return peers, messages

    def _largest(self, wave: int, *, gather: bool) -> int:
        """Bytes of the largest message: all pieces that one rank and one owner exchange."""
        of_owner: dict[int, list[tuple[int, int]]] = {}
        for number, itemsizes in self._owners.itemsizes[wave].items():
            for owner, itemsize in itemsizes.items():
                of_owner.setdefault(owner, []).append((number, itemsize))
        kinds, matrices, largest = self._owners.kinds, self._owners.matrices, 0
        most = {number: max(matrices[number].sizes) for number in self._owners.itemsizes[wave]}
        for owner, owned in of_owner.items():
            if sum(itemsize * most[number] for number, itemsize in owned) <= largest:
                continue
            sizes: dict[int, int] = {}  # kind → bytes
            for number, itemsize in owned:
                replica = matrices[number].holdings[owner][1]
                for kind, piece in self._pieces[number]:
                    if not gather or piece.replica == replica:
                        sizes[kind] = sizes.get(kind, 0) + piece.elements * itemsize
            if kinds.members[kinds.kind_of[owner]] == 1:  # what the owner keeps is no message
                sizes.pop(kinds.kind_of[owner], None)
            largest = max(largest, *sizes.values(), 0)
        return largest
