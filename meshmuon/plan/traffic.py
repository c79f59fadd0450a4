"""Bytes of every rank in every exchange, counted without listing the transfers.

Thousands of ranks fall into a few kinds by what they hold. What holders send is counted once per kind, owners one by
one. All figures of bytes come from here: ``Plan.describe``, predictions, ``meshmuon plan``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import NamedTuple

from ..layout import ShardedMatrix
from .nodes import Nodes
from .tasks import NO_WAVE, Task
from .wire import PieceBytes, Wire


@dataclass(frozen=True, slots=True)
class ExchangeBytes:
    """Bytes of one exchange, the gather or the scatter of a wave. What stays on its rank is not counted.

    Every list has an entry for each rank, in the order of the plan's ``ranks``.
    """

    sent_inside: list[int]  # to other ranks of its node; to all ranks if there is only one node
    sent_between: list[int]  # to ranks of other nodes
    received_inside: list[int]
    received_between: list[int]

    @property
    def sent(self) -> list[int]:
        return list(map(add, self.sent_inside, self.sent_between))

    @property
    def received(self) -> list[int]:
        return list(map(add, self.received_inside, self.received_between))

    def reversed(self) -> ExchangeBytes:
        """The same bytes in the opposite direction."""
        return ExchangeBytes(self.received_inside, self.received_between, self.sent_inside, self.sent_between)


@dataclass(frozen=True, slots=True)
class WaveTraffic:
    """One wave on all ranks; lists as in ``ExchangeBytes``."""

    gather: ExchangeBytes
    scatter: ExchangeBytes
    pieces: list[int]  # number of pieces of the wave's matrices on each rank
    elements: list[int]  # of these pieces


class HeldPiece(NamedTuple):
    """What each rank of a kind holds of one matrix."""

    matrix: int  # its number in ``RankKinds.matrices``
    elements: int
    replica: int  # that the rank belongs to
    nbytes: PieceBytes


class RankKinds:
    """Ranks by what they hold of some matrices. Tens of thousands of matrices share a few hundred objects.

    An (18, D) matrix over 8 ranks has one kind: ranks 0 to 5 hold 3·D elements. Ranks 6 and 7 hold nothing and have no
    kind.
    """

    def __init__(self, sharded_matrices: Iterable[tuple[ShardedMatrix, Wire]]) -> None:
        # A matrix and how it travels → its number, in the order in which they first appear.
        self.numbers: dict[tuple[ShardedMatrix, Wire], int] = {}
        for kind_of_matrix in sharded_matrices:
            self.numbers.setdefault(kind_of_matrix, len(self.numbers))
        self.matrices = tuple(sharded for sharded, _ in self.numbers)
        # matrix → bytes of its pieces
        self.nbytes = [tuple(map(wire.of, sharded.pieces)) for sharded, wire in self.numbers]
        held: dict[int, list[HeldPiece]] = {}
        for number, sharded in enumerate(self.matrices):
            # One object for all ranks with the same holdings: comparing kinds then compares addresses first.
            pieces: dict[tuple[int, int, PieceBytes], HeldPiece] = {}
            for rank, (piece, replica) in sharded.holdings.items():
                key = sharded.sizes[piece], replica, self.nbytes[number][piece]
                if key not in pieces:
                    pieces[key] = HeldPiece(number, *key)
                held.setdefault(rank, []).append(pieces[key])
        kinds: dict[tuple[HeldPiece, ...], int] = {}
        self.kind_of = {rank: kinds.setdefault(tuple(of_rank), len(kinds)) for rank, of_rank in held.items()}
        self.held = tuple(kinds)  # kind → what its ranks hold
        self.members = Counter(self.kind_of.values())  # kind → number of its ranks


class WaveOwners:
    """Owners and their bytes in each wave. Traffic and, in the tools, peers are counted from them."""

    def __init__(self, ranks: Sequence[int], tasks: Sequence[Task], wires: Sequence[Wire], waves: int) -> None:
        """``wires`` has the bytes on the wire, by parameter."""
        moving = [task for task in tasks if task.wave != NO_WAVE]
        self.position = {rank: position for position, rank in enumerate(ranks)}
        self.kinds = RankKinds((task.sharded, wires[task.param]) for task in moving)
        self.matrices = self.kinds.matrices
        # Wave → number of a matrix → owner → how many such matrices it has.
        self.owned: list[dict[int, Counter[int]]] = [{} for _ in range(waves)]
        # wave → number of a matrix → tasks that share it
        self.counts: list[Counter[int]] = [Counter() for _ in range(waves)]
        for task in moving:
            number = self.kinds.numbers[task.sharded, wires[task.param]]
            self.counts[task.wave][number] += 1
            self.owned[task.wave].setdefault(number, Counter())[task.owner] += 1

    def mirrored(self, wave: int) -> bool:
        """Whether the scatter sends back what the gather has sent, byte for byte, and to no further replicas.

        Where it does, one of them is counted for both, which halves the time of planning thousands of ranks.
        """
        same = all(one.gather == one.scatter for number in self.owned[wave] for one in self.kinds.nbytes[number])
        return same and all(self.matrices[number].replicas == 1 for number in self.owned[wave])


def count_traffic(owners: WaveOwners, nodes: Nodes | None) -> tuple[WaveTraffic, ...]:
    """The traffic of each wave."""
    counter = _TrafficCounter(owners, nodes)
    return tuple(map(counter.wave, range(len(owners.counts))))


class _TrafficCounter:
    def __init__(self, owners: WaveOwners, nodes: Nodes | None) -> None:
        self._owners, self._nodes = owners, nodes
        nothing = len(owners.kinds.held)  # the kind of ranks that hold nothing
        self._kind_of = [owners.kinds.kind_of.get(rank, nothing) for rank in owners.position]
        # (number of a matrix, node) → position, piece and replica of each holder on the node
        self._mates: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for number, sharded in enumerate(owners.matrices if nodes else ()):
            for rank, (piece, replica) in sharded.holdings.items():
                self._mates.setdefault((number, self._node_of(rank)), []).append(
                    (owners.position[rank], piece, replica)
                )

    def wave(self, wave: int) -> WaveTraffic:
        gather = self._to_owners(wave, gather=True)
        scatter = gather if self._owners.mirrored(wave) else self._to_owners(wave, gather=False)
        counts = self._owners.counts[wave]
        pieces = [sum(counts.get(p.matrix, 0) for p in held) for held in self._owners.kinds.held]
        elements = [sum(p.elements * counts.get(p.matrix, 0) for p in held) for held in self._owners.kinds.held]
        return WaveTraffic(gather, scatter.reversed(), self._by_rank(pieces), self._by_rank(elements))

    def _to_owners(self, wave: int, *, gather: bool) -> ExchangeBytes:
        """What holders send to owners from the owner's replica or, reversed, what the scatter sends to all replicas."""
        received, staying, sent_near, received_near = ([0] * len(self._kind_of) for _ in range(4))
        way = 0 if gather else 1  # in ``PieceBytes``
        sends: Counter[tuple[int, int]] = Counter()  # (number of a matrix, replica that sends) → to how many; 0 for all
        for number, owners in self._owners.owned[wave].items():
            sharded, sizes = self._owners.matrices[number], [one[way] for one in self._owners.kinds.nbytes[number]]
            total = sum(sizes) * (1 if gather else sharded.replicas)
            for owner, count in owners.items():
                piece, replica = sharded.holdings[owner]
                own, at = sizes[piece], self._owners.position[owner]
                received[at] += (total - own) * count
                staying[at] += own * count
                sends[number, replica if gather else 0] += count
                for mate, of_piece, of_mate in self._mates[number, self._node_of(owner)] if self._nodes else ():
                    if mate != at and (of_mate == replica or not gather):
                        sent_near[mate] += sizes[of_piece] * count
                        received_near[at] += sizes[of_piece] * count
        by_kind = [
            sum(p.nbytes[way] * sends.get((p.matrix, p.replica if gather else 0), 0) for p in held)
            for held in self._owners.kinds.held
        ]
        sent = list(map(sub, self._by_rank(by_kind), staying))
        if self._nodes is None:
            return ExchangeBytes(sent, sent_near, received, received_near)
        return ExchangeBytes(
            sent_near, list(map(sub, sent, sent_near)), received_near, list(map(sub, received, received_near))
        )

    def _node_of(self, rank: int) -> int:
        return 0 if self._nodes is None else self._nodes.node_of(rank)

    def _by_rank(self, by_kind: list[int]) -> list[int]:
        values = [*by_kind, 0]  # the last is for ranks that hold nothing
        return [values[kind] for kind in self._kind_of]
