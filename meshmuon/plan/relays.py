"""Exchanges in two hops through one rank per pair of nodes, for plans that would need too many peers.

What the ranks of node A send to those of node B, one rank of A collects, sends to one rank of B in a single message, and that
rank distributes it. Which ranks do this differs from pair to pair, so that the work is spread over the node. Inside a node
everything is sent directly. A rank then talks to the other ranks of its node and to one rank of each node that it relays for.

With 8 ranks per node on 512 nodes an exchange among all has 4,095 peers per rank directly, and 7 + 64 through relays.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from ..layout import ShardedMatrix
from .nodes import Nodes
from .plan_data import PlanData
from .tasks import NO_WAVE

Parcel: TypeAlias = "tuple[int, int]"
"""All that one rank sends to another in an exchange: from which rank to which."""


@dataclass(frozen=True, slots=True)
class HopRoutes:
    """One of the exchanges that a parcel takes, as one rank sees it, in buffer order: by the other rank, then by parcel."""

    sent: tuple[tuple[int, Parcel], ...]  # the rank that each parcel goes to next, which need not be its last
    received: tuple[tuple[int, Parcel], ...]  # the rank that each parcel comes from, which need not be its first

    @property
    def peers(self) -> frozenset[int]:
        """The ranks that this one talks to."""
        return frozenset(peer for peer, _ in (*self.sent, *self.received))


class Relays:
    """Which ranks collect and distribute between ``nodes``."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def relays(self, parcel: Parcel) -> tuple[int, int] | None:
        """The ranks that collect a parcel on its source's node and distribute it on its target's; None inside a node."""
        source, target = self._nodes.node_of(parcel[0]), self._nodes.node_of(parcel[1])
        if source == target:
            return None
        near, far = self._nodes.ranks[source], self._nodes.ranks[target]
        return near[target % len(near)], far[source % len(far)]

    def hops(
        self, rank: int, leaving: Collection[Parcel], arriving: Collection[Parcel]
    ) -> tuple[HopRoutes, HopRoutes, HopRoutes]:
        """What ``rank`` does in the three exchanges: collect, forward, distribute.

        Args:
            rank: the rank.
            leaving: the parcels of an exchange whose sources are on its node.
            arriving: those whose targets are on its node.
        """
        collect, forward, distribute = (_Edges(rank) for _ in range(3))
        for parcel in leaving:
            relays = self.relays(parcel)
            collect.add(parcel[0], parcel[1] if relays is None else relays[0], parcel)
            if relays is not None:
                forward.add_sent(*relays, parcel)
        for parcel in arriving:
            relays = self.relays(parcel)
            if relays is not None:
                forward.add_received(*relays, parcel)
                distribute.add(relays[1], parcel[1], parcel)
        return collect.routes(), forward.routes(), distribute.routes()


class _Edges:
    """The parcels of one exchange that ``rank`` sends or receives; what stays on a rank is neither."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sent: list[tuple[int, Parcel]] = []
        self._received: list[tuple[int, Parcel]] = []

    def add(self, source: int, target: int, parcel: Parcel) -> None:
        if source != target:
            self.add_sent(source, target, parcel)
            self.add_received(source, target, parcel)

    def add_sent(self, source: int, target: int, parcel: Parcel) -> None:
        if source == self._rank:
            self._sent.append((target, parcel))

    def add_received(self, source: int, target: int, parcel: Parcel) -> None:
        if target == self._rank:
            self._received.append((source, parcel))

    def routes(self) -> HopRoutes:
        return HopRoutes(tuple(sorted(self._sent)), tuple(sorted(self._received)))


def most_peers(plan: PlanData) -> int:
    """With how many ranks the busiest rank exchanges pieces in one wave, if every piece is sent directly.

    Owners talk to all holders of their matrices. Holders are compared as sets, of which a plan has few.
    """
    owners: dict[tuple[int, frozenset[int]], set[int]] = {}
    holders: dict[ShardedMatrix, frozenset[int]] = {}
    for task in plan.tasks:
        if task.wave != NO_WAVE:
            if task.sharded not in holders:
                holders[task.sharded] = frozenset(task.sharded.holdings)
            owners.setdefault((task.wave, holders[task.sharded]), set()).add(task.owner)
    by_wave: dict[int, list[tuple[frozenset[int], set[int]]]] = {}
    for (wave, ranks), of_ranks in owners.items():
        by_wave.setdefault(wave, []).append((ranks, of_ranks))
    return max((_most_of_wave(groups) for groups in by_wave.values()), default=0)


def _most_of_wave(groups: list[tuple[frozenset[int], set[int]]]) -> int:
    """Ranks that hold pieces in the same groups, and own matrices in the same of these, have equally many peers."""
    groups_of: dict[int, list[int]] = {}
    for number, (holders, _) in enumerate(groups):
        for rank in holders:
            groups_of.setdefault(rank, []).append(number)
    peers: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for rank, numbers in groups_of.items():
        key = tuple(numbers), tuple(number for number in numbers if rank in groups[number][1])
        if key not in peers:
            owners, held = (groups[number][1] for number in numbers), (groups[number][0] for number in key[1])
            peers[key] = len(frozenset().union(*owners, *held) - {rank})
    return max(peers.values())


def relayed_bytes(plan: PlanData) -> dict[int, int]:
    """Rank → bytes that it sends in a step for other ranks, beside its own; all 0 where nothing is relayed."""
    relayed = dict.fromkeys(plan.ranks, 0)
    if plan.options.max_peers is None or plan.options.nodes is None:
        return relayed
    relays = Relays(plan.options.nodes)
    for index, task in enumerate(plan.tasks):
        itemsize = plan.params[task.param].itemsize
        for transfer in (*plan.gather_sends(index), *plan.scatter_sends(index)):
            through = relays.relays((transfer.source, transfer.target))
            if through is not None:
                collector, distributor = through
                size = itemsize * transfer.piece.size
                relayed[collector] += size * (collector != transfer.source)
                relayed[distributor] += size * (distributor != transfer.target)
    return relayed
