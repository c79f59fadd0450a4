"""What every rank sends and receives in every exchange, counted without listing the transfers.

Holders are counted by kind (``rank_kinds.py``), owners one by one, and only the ranks of an owner's own node are looked at for
what stays inside a node. Everything that is said of bytes comes from here: ``Plan.describe``, predictions, ``meshmuon plan``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add, sub

from ..layout import ShardedMatrix
from .nodes import Nodes
from .rank_kinds import RankKinds
from .tasks import NO_WAVE, Task


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
        """Bytes that each rank sends."""
        return list(map(add, self.sent_inside, self.sent_between))

    @property
    def received(self) -> list[int]:
        """Bytes that each rank receives."""
        return list(map(add, self.received_inside, self.received_between))

    def reversed(self) -> ExchangeBytes:
        """The same bytes the other way."""
        return ExchangeBytes(self.received_inside, self.received_between, self.sent_inside, self.sent_between)


@dataclass(frozen=True, slots=True)
class WaveTraffic:
    """One wave on all ranks; lists as in ``ExchangeBytes``."""

    gather: ExchangeBytes
    scatter: ExchangeBytes
    pieces: list[int]  # how many pieces each rank holds of the wave's matrices
    elements: list[int]  # of these pieces


class WaveOwners:
    """Who owns what in each wave: what traffic, peers and relays are counted from."""

    def __init__(self, tasks: Sequence[Task], itemsizes: Mapping[int, int] | Sequence[int], waves: int) -> None:
        """``itemsizes`` has the bytes per element on the wire, by parameter."""
        moving = [task for task in tasks if task.wave != NO_WAVE]
        self.kinds = RankKinds(task.sharded for task in moving)
        # Wave → number of a matrix → owner → bytes per element of its matrices, summed.
        self.itemsizes: list[dict[int, dict[int, int]]] = [{} for _ in range(waves)]
        self.counts: list[dict[int, int]] = [{} for _ in range(waves)]  # wave → number of a matrix → how many tasks share it
        numbers = self.kinds.numbers
        for task in moving:
            number, counts = numbers[task.sharded], self.counts[task.wave]
            counts[number] = counts.get(number, 0) + 1
            of_matrix = self.itemsizes[task.wave].setdefault(number, {})
            of_matrix[task.owner] = of_matrix.get(task.owner, 0) + itemsizes[task.param]

    @property
    def matrices(self) -> tuple[ShardedMatrix, ...]:
        """The matrices by their numbers."""
        return self.kinds.matrices


def count_traffic(ranks: Sequence[int], owners: WaveOwners, nodes: Nodes | None) -> tuple[WaveTraffic, ...]:
    """The traffic of each wave."""
    counter = _Counter(ranks, owners, nodes)
    return tuple(counter.wave(wave) for wave in range(len(owners.counts)))


class _Inside:
    """Bytes inside nodes, by position of the rank."""

    def __init__(self, count: int) -> None:
        self.to_owners, self.of_owners = [0] * count, [0] * count  # that holders send, and that owners receive, in the gather
        self.to_holders, self.of_holders = [0] * count, [0] * count  # that owners send, and that holders receive, in the scatter


class _Counter:
    """Counts the waves of one plan."""

    def __init__(self, ranks: Sequence[int], owners: WaveOwners, nodes: Nodes | None) -> None:
        self._owners, self._nodes, self._kinds = owners, nodes, owners.kinds
        self._position = {rank: position for position, rank in enumerate(ranks)}
        none = len(self._kinds.held)  # the kind of ranks that hold nothing
        self._kind_of = [self._kinds.kind_of.get(rank, none) for rank in ranks]
        # (number of a matrix, node) → position, elements and replica of each holder on the node
        self._mates: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        if nodes is not None:
            for number, sharded in enumerate(owners.matrices):
                for rank, (piece, replica) in sharded.holdings.items():
                    mate = self._position[rank], sharded.sizes[piece], replica
                    self._mates.setdefault((number, nodes.node_of(rank)), []).append(mate)

    def wave(self, wave: int) -> WaveTraffic:
        """The traffic of one wave."""
        count, matrices = len(self._kind_of), self._owners.matrices
        gathered, scattered, staying = [0] * count, [0] * count, [0] * count  # by owners; the last is not sent
        inside, replicated = _Inside(count), False
        of_replica: dict[tuple[int, int], int] = {}  # (matrix, replica) → bytes per element that it sends
        of_matrix: dict[int, int] = {}
        for number, itemsizes in self._owners.itemsizes[wave].items():
            sharded = matrices[number]
            replicated |= sharded.replicas > 1
            copies = sharded.size * sharded.replicas
            for owner, itemsize in itemsizes.items():
                piece, replica = sharded.holdings[owner]
                own, at = sharded.sizes[piece], self._position[owner]
                gathered[at] += (sharded.size - own) * itemsize
                scattered[at] += (copies - own) * itemsize
                staying[at] += own * itemsize
                of_replica[number, replica] = of_replica.get((number, replica), 0) + itemsize
                self._add_inside(inside, number, owner, itemsize)
            of_matrix[number] = sum(itemsizes.values())
        counts = self._owners.counts[wave]
        held = self._kinds.held
        sent = [sum(p.elements * of_replica.get((p.matrix, p.replica), 0) for p in of_kind) for of_kind in held]
        gather = self._exchange(sent, staying, gathered, inside.to_owners, inside.of_owners)
        scatter = gather.reversed()
        if replicated:
            received = [sum(p.elements * of_matrix.get(p.matrix, 0) for p in of_kind) for of_kind in held]
            scatter = self._exchange(received, staying, scattered, inside.of_holders, inside.to_holders).reversed()
        pieces = [sum(counts.get(p.matrix, 0) for p in of_kind) for of_kind in held]
        elements = [sum(p.elements * counts.get(p.matrix, 0) for p in of_kind) for of_kind in held]
        return WaveTraffic(gather, scatter, self._by_rank(pieces), self._by_rank(elements))

    def _add_inside(self, inside: _Inside, number: int, owner: int, itemsize: int) -> None:
        mates = () if self._nodes is None else self._mates[number, self._nodes.node_of(owner)]
        if len(mates) < 2:  # the owner alone
            return
        at, (_, own_replica) = self._position[owner], self._owners.matrices[number].holdings[owner]
        for mate, elements, replica in mates:
            if mate != at:
                size = elements * itemsize
                inside.of_holders[mate] += size
                inside.to_holders[at] += size
                if replica == own_replica:
                    inside.to_owners[mate] += size
                    inside.of_owners[at] += size

    def _exchange(
        self, by_kind: list[int], staying: list[int], by_owners: list[int], near_holders: list[int], near_owners: list[int]
    ) -> ExchangeBytes:
        """From holders to owners: what the holders of each kind send if nothing stays, what does, and what owners receive."""
        by_holders = list(map(sub, self._by_rank(by_kind), staying))
        if self._nodes is None:
            zero = [0] * len(by_holders)
            return ExchangeBytes(by_holders, zero, by_owners, zero)
        between = list(map(sub, by_holders, near_holders)), list(map(sub, by_owners, near_owners))
        return ExchangeBytes(near_holders, between[0], near_owners, between[1])

    def _by_rank(self, by_kind: list[int]) -> list[int]:
        values = [*by_kind, 0]  # the last is for ranks that hold nothing
        return [values[kind] for kind in self._kind_of]
