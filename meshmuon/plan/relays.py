"""Exchanges in two hops through one rank per pair of nodes, for plans that would need too many peers.

One rank of node A collects all that A's ranks send to node B, and sends it in a single message to one rank of B, which
distributes it. Different pairs of nodes use different ranks, which spreads the work over the node. Inside a node
everything is sent directly. A rank then talks to the other ranks of its node and to one rank of each node that it
relays for.

With 8 ranks per node on 512 nodes an exchange among all has 4,095 peers per rank directly, and 7 + 64 through relays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add, sub
from typing import NamedTuple, TypeAlias

from .nodes import Nodes
from .traffic import ExchangeBytes, WaveOwners, WaveTraffic

Parcel: TypeAlias = "tuple[int, int]"
"""Everything that one rank sends to another in an exchange, as (source, target)."""


@dataclass(frozen=True, slots=True)
class HopRoutes:
    """One of the exchanges that a parcel takes, as one rank sees it, in buffer order: by the other rank, then by
    parcel.
    """

    sent: tuple[tuple[int, Parcel], ...]  # the next rank of each parcel, not always its destination
    received: tuple[tuple[int, Parcel], ...]  # the previous rank of each parcel, not always its origin


def relay_for(node: int, ranks: int) -> int:
    """Which of the ``ranks`` of a node relays to and from ``node``: the sum of its digits in base ``ranks``, modulo
    ``ranks``.

    Groups of nodes are often strided: experts on nodes 0, 8, 16, … The last digit alone would give all of these to one
    rank.
    """
    total = 0
    while node and ranks > 1:
        node, digit = divmod(node, ranks)
        total += digit
    return total % ranks


class Relays:
    """Which ranks collect and distribute between ``nodes``."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    @property
    def most_peers(self) -> int:
        """Maximum peers per rank: the others of its node, and a rank of each node that it relays for."""
        return max(len(node) - 1 + -(-len(self._nodes.ranks) // len(node)) for node in self._nodes.ranks)

    def relays(self, parcel: Parcel) -> tuple[int, int] | None:
        """The ranks that collect a parcel on its source's node and distribute it on its target's; None inside a
        node.
        """
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


Hops: TypeAlias = "tuple[ExchangeBytes, ...]"
"""The hops of one exchange: the exchange itself, or collect, forward and distribute."""

WaveHops: TypeAlias = "tuple[Hops, Hops]"
"""The hops of the gather and of the scatter of a wave."""


def count_hops(
    owners: WaveOwners, nodes: Nodes | None, traffic: Sequence[WaveTraffic], *, averages: bool = False
) -> tuple[WaveHops, ...]:
    """The hops of each wave, through relays between ``nodes``; one hop if these are None.

    With ``averages``, gathers are reversed scatters: all replicas send their gradients.
    """
    gathers = [wave.scatter.reversed() if averages else wave.gather for wave in traffic]
    if nodes is None:
        return tuple(((gather,), (wave.scatter,)) for gather, wave in zip(gathers, traffic, strict=True))
    counter = _RelayCounter(owners, nodes)
    hops = []
    for number, (gather, wave) in enumerate(zip(gathers, traffic, strict=True)):
        of_all = counter.to_owners(number, gather=False)
        of_gather = of_all if averages or owners.mirrored(number) else counter.to_owners(number, gather=True)
        # The rank that collects a parcel also distributes the one that comes back.
        hops.append((_three_hops(gather, *of_gather), _three_hops(wave.scatter, *reversed(of_all))))
    return tuple(hops)


def relay_buffers(waves: Sequence[tuple[WaveHops, int]]) -> list[int]:
    """Bytes of the buffers between hops on every rank, from the hops of waves and the slots that they use.

    Waves take turns in the buffers of the first hop of their slot. The other hops have one set of buffers for all
    gathers, and one for all scatters, since only one of each is waited for at a time (``RelayMemory`` in
    ``execute/buffers.py``).
    """
    largest: dict[tuple[int | str, ...], list[int]] = {}
    for hops, slot in waves:
        for direction, exchange in zip(("gather", "scatter"), hops, strict=True):
            for number, hop in enumerate(exchange if len(exchange) > 1 else ()):
                for name, sizes in (("sent", hop.sent), ("received", hop.received)):
                    key = number, name, direction if number else slot
                    largest[key] = list(map(max, largest[key], sizes)) if key in largest else sizes
    return [sum(sizes) for sizes in zip(*largest.values(), strict=True)]


class _Relayed(NamedTuple):
    """Bytes that relays exchange with those of other nodes, in one direction; lists have an entry for each rank."""

    total: list[int]
    own: list[int]  # of these, what the relay itself sends or receives


def _three_hops(exchange: ExchangeBytes, forwarded: _Relayed, arrived: _Relayed) -> Hops:
    """Collect, forward and distribute; what stays inside a node goes with the first."""
    zero = [0] * len(forwarded.total)
    collected, distributed = map(sub, forwarded.total, forwarded.own), list(map(sub, arrived.total, arrived.own))
    sent, received = list(map(sub, exchange.sent, forwarded.own)), list(map(add, exchange.received_inside, collected))
    return (
        ExchangeBytes(sent, zero, received, zero),
        ExchangeBytes(zero, forwarded.total, zero, arrived.total),
        ExchangeBytes(distributed, zero, list(map(sub, exchange.received_between, arrived.own)), zero),
    )


class _RelayCounter:
    """Counts what relays do without listing the parcels.

    Of a kind of matrices, holder h sends bytes(h) · count(o) to owner o of count(o) of them. A rank of node A therefore
    forwards bytes(A) · count(B) for each node B that it relays for, and receives count(A) · bytes(B) from there: both
    sides are counted in the same way, with holders and owners swapped.
    """

    def __init__(self, owners: WaveOwners, nodes: Nodes) -> None:
        self._owners, self._nodes = owners, nodes
        sizes, count = set(map(len, nodes.ranks)), len(nodes.ranks)
        # Node size → node → which rank of a node of that size relays for it.
        self._relay_for = {size: [relay_for(node, size) for node in range(count)] for size in sizes}

    def to_owners(self, wave: int, *, gather: bool) -> tuple[_Relayed, _Relayed]:
        """Forwarded and arrived bytes from holders to the owners of a wave: of the gather or, reversed, of the
        scatter.
        """
        count = len(self._owners.position)
        forwarded, arrived = _Relayed([0] * count, [0] * count), _Relayed([0] * count, [0] * count)
        for number, owners in self._owners.owned[wave].items():
            sharded, nbytes = self._owners.matrices[number], self._owners.kinds.nbytes[number]
            for replica in range(sharded.replicas) if gather else (None,):
                held = {
                    rank: nbytes[p].gather if gather else nbytes[p].scatter
                    for rank, (p, k) in sharded.holdings.items()
                    if replica in (None, k)
                }
                if to := {owner: count for owner, count in owners.items() if owner in held}:
                    self._add(forwarded, held, to)
                    self._add(arrived, to, held)
        return forwarded, arrived

    def _add(self, relayed: _Relayed, near: Mapping[int, int], far: Mapping[int, int]) -> None:
        """Adds near(A) · far(B) to the rank of A that relays for B, over all pairs of nodes."""
        near_of_node, far_of_node = self._by_node(near), self._by_node(far)
        # size of A → rank of A → far(B) of all B that it relays for
        served = {size: [0] * size for size in self._relay_for}
        for size, relays in self._relay_for.items():
            for node, amount in far_of_node.items():
                served[size][relays[node]] += amount
        for node, amount in near_of_node.items():
            mates = self._nodes.ranks[node]
            itself = self._relay_for[len(mates)][node]  # a node does not relay for itself
            for number, (rank, amount_served) in enumerate(zip(mates, served[len(mates)], strict=True)):
                factor, at = amount_served - (far_of_node[node] if number == itself else 0), self._owners.position[rank]
                relayed.total[at] += amount * factor
                relayed.own[at] += near.get(rank, 0) * factor

    def _by_node(self, amounts: Mapping[int, int]) -> Counter[int]:
        by_node: Counter[int] = Counter()
        for rank, amount in amounts.items():
            by_node[self._nodes.node_of(rank)] += amount
        return by_node
