"""Exchanges in two hops through one rank per pair of nodes, for plans that would need too many peers.

What the ranks of node A send to those of node B, one rank of A collects, sends to one rank of B in a single message, and that
rank distributes it. Which ranks do this differs from pair to pair, so that the work is spread over the node. Inside a node
everything is sent directly. A rank then talks to the other ranks of its node and to one rank of each node that it relays for.

With 8 ranks per node on 512 nodes an exchange among all has 4,095 peers per rank directly, and 7 + 64 through relays.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from .nodes import Nodes

Parcel: TypeAlias = "tuple[int, int]"
"""All that one rank sends to another in an exchange: from which rank to which."""


@dataclass(frozen=True, slots=True)
class HopRoutes:
    """One of the exchanges that a parcel takes, as one rank sees it, in buffer order: by the other rank, then by parcel."""

    sent: tuple[tuple[int, Parcel], ...]  # the rank that each parcel goes to next, which need not be its last
    received: tuple[tuple[int, Parcel], ...]  # the rank that each parcel comes from, which need not be its first


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

        ``leaving`` are the parcels of an exchange whose sources are on its node, ``arriving`` those whose targets are.
        """
        legs: tuple[list[tuple[int, int, Parcel]], ...] = ([], [], [])  # from which rank to which, of each exchange
        for parcel in {*leaving, *arriving}:
            relays = self.relays(parcel)
            stops = parcel if relays is None else (parcel[0], *relays, parcel[1])
            for leg, (source, target) in zip(legs, pairwise(stops), strict=False):
                leg.append((source, target, parcel))
        collect, forward, distribute = (
            HopRoutes(
                tuple(sorted((target, parcel) for source, target, parcel in leg if source == rank != target)),
                tuple(sorted((source, parcel) for source, target, parcel in leg if target == rank != source)),
            )
            for leg in legs
        )
        return collect, forward, distribute
