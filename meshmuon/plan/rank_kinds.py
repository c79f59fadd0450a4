"""Ranks by what they hold: thousands of ranks are only a few kinds, and what holders send is counted once for each kind.

An (18, D) matrix over 8 ranks has one kind: ranks 0 to 5 hold 3·D elements. Ranks 6 and 7 hold nothing and have no kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ..layout import ShardedMatrix


class HeldPiece(NamedTuple):
    """What each rank of a kind holds of one matrix."""

    matrix: int  # its number in ``RankKinds.matrices``
    elements: int
    replica: int  # that the rank belongs to


class RankKinds:
    """The kinds of ranks that hold pieces of some matrices. Tens of thousands of matrices share a few hundred objects."""

    def __init__(self, sharded_matrices: Iterable[ShardedMatrix]) -> None:
        self.numbers: dict[ShardedMatrix, int] = {}  # matrix → its number, in the order in which they first appear
        for sharded in sharded_matrices:
            self.numbers.setdefault(sharded, len(self.numbers))
        self.matrices = tuple(self.numbers)
        held: dict[int, list[HeldPiece]] = {}
        for sharded, number in self.numbers.items():
            # The same object for all ranks that hold as much: comparing kinds then compares addresses first.
            pieces: dict[tuple[int, int], HeldPiece] = {}
            for rank, (piece, replica) in sharded.holdings.items():
                key = sharded.sizes[piece], replica
                if key not in pieces:
                    pieces[key] = HeldPiece(number, *key)
                held.setdefault(rank, []).append(pieces[key])
        kinds: dict[tuple[HeldPiece, ...], int] = {}
        self.kind_of = {rank: kinds.setdefault(tuple(of_rank), len(kinds)) for rank, of_rank in held.items()}
        self.held = tuple(kinds)  # kind → what its ranks hold
        self.members = Counter(self.kind_of.values())  # kind → how many ranks are of it
