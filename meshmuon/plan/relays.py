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

from .nodes import Nodes

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


def relay_for(node: int, ranks: int) -> int:
    """Which of the ``ranks`` of a node relays to and from ``node``: the sum of its digits in base ``ranks``, modulo ``ranks``.

    Groups of nodes are often strided: experts on nodes 0, 8, 16, … The last digit alone would give all of these to one rank.
    """
    if ranks == 1:
        return 0
    total = 0
    while node:
        node, digit = divmod(node, ranks)
        total += digit
    return total % ranks


class Relays:
    """Which ranks collect and distribute between ``nodes``."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    @property
    def most_peers(self) -> int:
        """At most so many ranks a rank talks to: the others of its node, and a rank of each node that it relays for."""
        return max(len(node) - 1 + -(-len(self._nodes.ranks) // len(node)) for node in self._nodes.ranks)

    def relays(self, parcel: Parcel) -> tuple[int, int] | None:
        """The ranks that collect a parcel on its source's node and distribute it on its target's; None inside a node."""
        source, target = self._nodes.node_of(parcel[0]), self._nodes.node_of(parcel[1])
        if source == target:
            return None
        near, far = self._nodes.ranks[source], self._nodes.ranks[target]
        return near[relay_for(target, len(near))], far[relay_for(source, len(far))]

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
