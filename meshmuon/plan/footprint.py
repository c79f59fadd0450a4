"""How large the exchange buffers of all ranks become, without listing what travels. ``routes.py`` names the buffers.

A rank's ``shards`` buffer holds its piece of every matrix of the wave, regardless of the owner. It is counted once for each kind
of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..layout import ShardedMatrix
from .rank_kinds import RankKinds


class Footprint:
    """The buffers of matrices that travel on one lane, for any way to cut them into waves."""

    def __init__(self, sharded_matrices: Sequence[ShardedMatrix], owners: Sequence[int], itemsize: int) -> None:
        self._itemsize = itemsize
        kinds = RankKinds(sharded_matrices)
        self._distinct = [kinds.numbers[sharded] for sharded in sharded_matrices]
        self._kinds = kinds.kind_of
        # Of each distinct matrix, (kind, elements of the piece that each rank of the kind holds).
        self._pieces: list[list[tuple[int, int]]] = [[] for _ in kinds.matrices]
        for kind, pieces in enumerate(kinds.held):
            for held in pieces:
                self._pieces[held.matrix].append((kind, held.elements))
        # Of each matrix, its owner, the elements that the owner gathers, and those that it sends if there are replicas.
        self._owner_elements: list[tuple[int, int, int]] = []
        for sharded, owner in zip(sharded_matrices, owners, strict=True):
            piece, _ = sharded.holdings[owner]
            copies = sharded.size * sharded.replicas - sharded.sizes[piece] if sharded.replicas > 1 else 0
            self._owner_elements.append((owner, sharded.size - sharded.sizes[piece], copies))

    def bytes_by_rank(self, waves: Sequence[int], in_flight: int) -> dict[int, int]:
        """Rank → bytes of all its buffers when matrix k is in wave ``waves[k]``; ranks without buffers may be missing."""
        shards: dict[tuple[int, int], int] = {}
        for (wave, matrix), count in Counter(zip(waves, self._distinct, strict=True)).items():
            for kind, size in self._pieces[matrix]:
                shards[kind, wave] = shards.get((kind, wave), 0) + count * size
        received: dict[tuple[int, int], int] = {}  # (owner, wave) → elements, as in ``results``
        results: dict[tuple[int, int], int] = {}
        with_replicas: set[tuple[int, int]] = set()
        for wave, (owner, gathered, copies) in zip(waves, self._owner_elements, strict=True):
            at = owner, wave
            received[at] = received.get(at, 0) + gathered
            results[at] = results.get(at, 0) + (copies or gathered)
            if copies:  # the owner sends more than it receives: the results of the whole wave need a buffer of their own
                with_replicas.add(at)
        by_kind = _slots(shards, in_flight)
        total = {rank: by_kind[kind] for rank, kind in self._kinds.items()}
        for slots in (_slots(received, in_flight), _slots({at: results[at] for at in with_replicas}, in_flight)):
            for owner, elements in slots.items():
                total[owner] += elements
        return {rank: elements * self._itemsize for rank, elements in total.items()}


def _slots(elements: dict[tuple[int, int], int], in_flight: int) -> dict[int, int]:
    """Elements of all slots of each rank, or kind of ranks: a slot is as large as the largest wave that takes a turn in it."""
    largest: dict[tuple[int, int], int] = {}
    for (rank, wave), size in elements.items():
        slot = rank, wave % in_flight
        largest[slot] = max(largest.get(slot, 0), size)
    total: dict[int, int] = {}
    for (rank, _), size in largest.items():
        total[rank] = total.get(rank, 0) + size
    return total
