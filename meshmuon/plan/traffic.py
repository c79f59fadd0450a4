"""What every rank sends and receives in every exchange, counted without listing the transfers.

Thousands of matrices share a few ``ShardedMatrix`` objects. Their pieces are summed per wave and object.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..layout import ShardedMatrix
from .nodes import Crossings, Nodes
from .plan_data import PlanData
from .tasks import NO_WAVE


@dataclass(slots=True)
class ExchangeBytes:
    """Bytes of one exchange, the gather or the scatter of a wave, by rank. What stays on its rank is not counted."""

    sent_inside: dict[int, int] = field(default_factory=dict)  # to other ranks of its node; of all nodes if there is only one
    sent_between: dict[int, int] = field(default_factory=dict)  # to ranks of other nodes
    received_inside: dict[int, int] = field(default_factory=dict)
    received_between: dict[int, int] = field(default_factory=dict)

    def sent(self, rank: int) -> int:
        """Bytes that ``rank`` sends."""
        return self.sent_inside.get(rank, 0) + self.sent_between.get(rank, 0)

    def received(self, rank: int) -> int:
        """Bytes that ``rank`` receives."""
        return self.received_inside.get(rank, 0) + self.received_between.get(rank, 0)

    def reversed(self) -> ExchangeBytes:
        """The same bytes the other way."""
        return ExchangeBytes(self.received_inside, self.received_between, self.sent_inside, self.sent_between)


@dataclass(slots=True)
class WaveTraffic:
    """One wave on all ranks. Ranks that are missing in a mapping have zero."""

    gather: ExchangeBytes = field(default_factory=ExchangeBytes)
    scatter: ExchangeBytes = field(default_factory=ExchangeBytes)
    pieces: dict[int, int] = field(default_factory=dict)  # rank → pieces that it holds of the wave's matrices
    elements: dict[int, int] = field(default_factory=dict)  # rank → their elements


def traffic_of(plan: PlanData) -> list[WaveTraffic]:
    """The traffic of each wave."""
    waves = [WaveTraffic() for _ in plan.wave_lanes]
    crossings = Crossings(plan.options.nodes or Nodes((plan.ranks,)))
    owners: dict[tuple[int, ShardedMatrix], dict[int, tuple[int, int]]] = {}  # → owner → its matrices, and bytes per element
    for task in plan.tasks:
        if task.wave != NO_WAVE:
            of_matrix = owners.setdefault((task.wave, task.sharded), {})
            count, itemsize = of_matrix.get(task.owner, (0, 0))
            of_matrix[task.owner] = count + 1, itemsize + plan.params[task.param].itemsize
    for (wave, sharded), of_matrix in owners.items():
        itemsizes = {owner: total for owner, (_, total) in of_matrix.items()}
        _Counter(waves[wave], sharded, crossings).add(sum(count for count, _ in of_matrix.values()), itemsizes)
    return waves


class _Counter:
    """Adds the matrices of one wave with the same holders."""

    def __init__(self, wave: WaveTraffic, sharded: ShardedMatrix, crossings: Crossings) -> None:
        self._wave, self._sharded, self._crossings, self._nodes = wave, sharded, crossings, crossings.nodes

    def add(self, count: int, itemsizes: dict[int, int]) -> None:
        """Adds ``count`` matrices; ``itemsizes`` has, by owner, the bytes per element of its matrices, summed."""
        sharded, wave = self._sharded, self._wave
        for rank, (piece, _) in sharded.holdings.items():
            _increase(wave.pieces, rank, count)
            _increase(wave.elements, rank, count * sharded.sizes[piece])
        self._holders(wave.scatter.received_inside, wave.scatter.received_between, itemsizes, None)
        for replica in {sharded.holdings[owner][1] for owner in itemsizes}:
            chosen = {owner: size for owner, size in itemsizes.items() if sharded.holdings[owner][1] == replica}
            self._holders(wave.gather.sent_inside, wave.gather.sent_between, chosen, replica)
        for owner, itemsize in itemsizes.items():
            own = sharded.sizes[sharded.holdings[owner][0]]
            gathered, scattered = self._crossings.gathered(sharded, owner), self._crossings.scattered(sharded, owner)
            _increase(wave.gather.received_between, owner, itemsize * gathered)
            _increase(wave.gather.received_inside, owner, itemsize * (sharded.size - own - gathered))
            _increase(wave.scatter.sent_between, owner, itemsize * scattered)
            _increase(wave.scatter.sent_inside, owner, itemsize * (sharded.size * sharded.replicas - own - scattered))

    def _holders(self, inside: dict[int, int], between: dict[int, int], itemsizes: dict[int, int], replica: int | None) -> None:
        """What the holders in one replica, or in all, exchange with the owners."""
        total, by_node = sum(itemsizes.values()), dict[int, int]()
        for owner, itemsize in itemsizes.items():
            _increase(by_node, self._nodes.node_of(owner), itemsize)
        for rank, (piece, of_replica) in self._sharded.holdings.items():
            if replica is None or replica == of_replica:
                near = by_node.get(self._nodes.node_of(rank), 0)
                elements = self._sharded.sizes[piece]
                _increase(inside, rank, elements * (near - itemsizes.get(rank, 0)))
                _increase(between, rank, elements * (total - near))


def _increase(counts: dict[int, int], rank: int, amount: int) -> None:
    if amount:
        counts[rank] = counts.get(rank, 0) + amount


def bytes_sent(plan: PlanData, *, averages: bool) -> dict[int, int]:
    """Rank → bytes that it sends in a step of ``Muon``, or of ``DistMuon``, which ``averages`` gradients at the owners."""
    if not averages:
        return plan.bytes_sent
    scatters = [wave.scatter for wave in traffic_of(plan)]  # gradients go the way on which weights come back
    return {rank: sum(scatter.sent(rank) + scatter.received(rank) for scatter in scatters) for rank in plan.ranks}


def buffer_bytes(plan: PlanData, *, averages: bool) -> dict[int, int]:
    """Rank → bytes of its exchange buffers, likewise; those of ``DistMuon`` hold all waves at once, and the averages of one."""
    if not averages:
        return {rank: plan.buffer_bytes(rank) for rank in plan.ranks}
    averaged = [dict.fromkeys(plan.ranks, 0) for _ in plan.wave_lanes]
    for task in plan.tasks:
        averaged[task.wave][task.owner] += task.sharded.size * plan.params[task.param].itemsize
    sent = bytes_sent(plan, averages=True)
    return {rank: sent[rank] + max((wave[rank] for wave in averaged), default=0) for rank in plan.ranks}
