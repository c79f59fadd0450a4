"""Peers of every rank, counted without listing the transfers.

Owners talk to all holders of their matrices. Holders are compared as sets, of which a plan has few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .traffic import WaveOwners


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

    def most(self) -> int:
        """The most peers of a rank in one wave. The scatter has those of the gather and more."""
        waves = range(len(self._owners.counts))
        return max((max(self.count([wave])[0], default=0) for wave in waves), default=0)

    def count(self, waves: Iterable[int], *, gather: bool = False) -> tuple[list[int], int]:
        """Peers of every rank over ``waves``, in the order of the ranks, and pairs of ranks of which one sends to the other.

        In the gather each owner's own replica contributes; the scatter reaches all replicas.
        """
        return self._peers(self._owners_of_sets(waves, gather=gather))

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
