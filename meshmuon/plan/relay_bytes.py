"""What every rank sends and receives in the three exchanges of a relayed one, counted without listing the parcels.

``relays.py`` says which ranks relay. Of what a matrix's holders on node A send to its owners on node B, one rank of A collects
all, so that the holders of a node, and the owners with the same relay, are counted together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import add, sub
from typing import TypeAlias

from .nodes import Nodes
from .relays import relay_for
from .traffic import ExchangeBytes, WaveOwners, WaveTraffic

Hops: TypeAlias = "tuple[ExchangeBytes, ...]"
"""The exchanges that one exchange really consists of: itself, or collect, forward and distribute."""


WaveHops: TypeAlias = "tuple[Hops, Hops]"
"""The hops of the gather and of the scatter of a wave."""


def count_hops(
    ranks: Sequence[int], owners: WaveOwners, nodes: Nodes, traffic: Sequence[WaveTraffic], *, averages: bool = False
) -> tuple[WaveHops, ...]:
    """The hops of each wave. With ``averages``, gathers are scatters the other way: all replicas send their gradients."""
    counter = _RelayCounter(ranks, owners, nodes)
    hops = []
    for wave, (itemsizes, exchanges) in enumerate(zip(owners.itemsizes, traffic, strict=True)):
        replicated = any(owners.matrices[number].replicas > 1 for number in itemsizes)
        of_all = counter.to_owners(wave, one_replica=False)
        of_one = counter.to_owners(wave, one_replica=True) if replicated and not averages else of_all
        gather = exchanges.scatter.reversed() if averages else exchanges.gather
        hops.append((of_one.hops(gather), of_all.reversed().hops(exchanges.scatter)))
    return tuple(hops)


def relay_buffers(waves: Sequence[tuple[WaveHops, int]]) -> list[int]:
    """Bytes of the buffers between hops on every rank, from the hops of waves and the slots that they use.

    Waves take turns in the buffers of the first hop of their slot. The other hops have one set of buffers for all gathers, and
    one for all scatters, since only one of each is waited for at a time (``meshmuon/execute/relayed.py``).
    """
    largest: dict[tuple[int | str, ...], list[int]] = {}
    for hops, slot in waves:
        for direction, exchange in zip(("gather", "scatter"), hops, strict=True):
            for number, hop in enumerate(exchange if len(exchange) > 1 else ()):
                for name, sizes in (("sent", hop.sent), ("received", hop.received)):
                    key = number, name, direction if number else slot
                    largest[key] = list(map(max, largest[key], sizes)) if key in largest else sizes
    return [sum(sizes) for sizes in zip(*largest.values(), strict=True)]


@dataclass(frozen=True, slots=True)
class _RelayedBytes:
    """What relays do in one exchange; lists have an entry for each rank."""

    forwarded: list[int]  # bytes that it sends to relays of other nodes
    own_forwarded: list[int]  # of these, what is its own
    arrived: list[int]  # bytes that relays of other nodes send it
    own_arrived: list[int]  # of these, what is for itself

    def reversed(self) -> _RelayedBytes:
        """The same parcels the other way: who collects a parcel distributes the one that comes back."""
        return _RelayedBytes(self.arrived, self.own_arrived, self.forwarded, self.own_forwarded)

    def hops(self, exchange: ExchangeBytes) -> Hops:
        """The three exchanges of ``exchange``; what stays inside a node goes with the first."""
        zero = [0] * len(self.forwarded)
        collected, distributed = map(sub, self.forwarded, self.own_forwarded), list(map(sub, self.arrived, self.own_arrived))
        return (
            ExchangeBytes(
                list(map(sub, exchange.sent, self.own_forwarded)), zero, list(map(add, exchange.received_inside, collected)), zero
            ),
            ExchangeBytes(zero, self.forwarded, zero, self.arrived),
            ExchangeBytes(distributed, zero, list(map(sub, exchange.received_between, self.own_arrived)), zero),
        )


@dataclass(frozen=True, slots=True)
class _NodeShares:
    """What the nodes hold of one matrix, in one replica or in all.

    Which rank of a node relays depends on the other node and on how many ranks it has, n: (n, number of the rank) is a place.
    """

    of_node: dict[int, int] = field(default_factory=dict)  # node → elements
    of_rank: dict[int, int] = field(default_factory=dict)  # rank → elements
    collectors: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)  # → position, elements of its node
    holders: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)  # → position, elements of its own
    sources: dict[int, list[int]] = field(default_factory=dict)  # n → elements of all nodes that each rank of n serves


class _RelayCounter:
    """Counts what relays of one plan do."""

    def __init__(self, ranks: Sequence[int], owners: WaveOwners, nodes: Nodes) -> None:
        self._owners, self._nodes, self._count = owners, nodes, len(ranks)
        self._position = {rank: position for position, rank in enumerate(ranks)}
        self._at = {rank: number for node in nodes.ranks for number, rank in enumerate(node)}  # its number on its node
        self._mates = [[self._position[rank] for rank in node] for node in nodes.ranks]
        self._lengths = sorted(set(map(len, nodes.ranks)))
        count = len(nodes.ranks)
        self._relay_for = {(length, node): relay_for(node, length) for length in self._lengths for node in range(count)}
        self._shares: dict[tuple[int, int | None], _NodeShares] = {}

    def to_owners(self, wave: int, *, one_replica: bool) -> _RelayedBytes:
        """What holders send to the owners of a wave: those of each owner's replica, or those of all replicas."""
        relayed = _RelayedBytes(*([0] * self._count for _ in range(4)))
        for number, itemsizes in self._owners.itemsizes[wave].items():
            sharded, by_replica = self._owners.matrices[number], dict[int | None, dict[int, int]]()
            for owner, itemsize in itemsizes.items():
                replica = sharded.holdings[owner][1] if one_replica else None
                by_replica.setdefault(replica, {})[owner] = itemsize
            for replica, of_replica in by_replica.items():
                self._add(relayed, self._shares_of(number, replica), of_replica)
        return relayed

    def _add(self, relayed: _RelayedBytes, shares: _NodeShares, itemsizes: dict[int, int]) -> None:
        by_node: dict[int, int] = {}
        for owner, itemsize in itemsizes.items():
            node = self._nodes.node_of(owner)
            by_node[node] = by_node.get(node, 0) + itemsize
        for length in self._lengths:
            weights: dict[int, int] = {}
            for node, itemsize in by_node.items():
                relay = self._relay_for[length, node]
                weights[relay] = weights.get(relay, 0) + itemsize
            for number, weight in weights.items():
                _add_products(relayed.forwarded, shares.collectors.get((length, number), ()), weight)
                _add_products(relayed.own_forwarded, shares.holders.get((length, number), ()), weight)
        for node, itemsize in by_node.items():
            mates, held = self._nodes.ranks[node], shares.of_node.get(node, 0)
            own = self._relay_for[
                len(mates), node
            ]  # the relay that would serve the node itself: what stays there was counted above
            relayed.forwarded[self._position[mates[own]]] -= held * itemsize
            relayed.own_forwarded[self._position[mates[own]]] -= shares.of_rank.get(mates[own], 0) * itemsize
            _add_products(relayed.arrived, zip(self._mates[node], shares.sources[len(mates)], strict=True), itemsize)
            relayed.arrived[self._position[mates[own]]] -= held * itemsize
        for owner, itemsize in itemsizes.items():
            node, at = self._nodes.node_of(owner), self._at[owner]
            length = len(self._mates[node])
            elements = shares.sources[length][at] - (shares.of_node[node] if at == self._relay_for[length, node] else 0)
            relayed.own_arrived[self._position[owner]] += elements * itemsize

    def _shares_of(self, number: int, replica: int | None) -> _NodeShares:
        if (number, replica) not in self._shares:
            self._shares[number, replica] = self._new_shares(number, replica)
        return self._shares[number, replica]

    def _new_shares(self, number: int, replica: int | None) -> _NodeShares:
        shares, sharded = _NodeShares(), self._owners.matrices[number]
        for rank, (piece, of_replica) in sharded.holdings.items():
            if replica is None or replica == of_replica:
                node = self._nodes.node_of(rank)
                shares.of_rank[rank] = sharded.sizes[piece]
                shares.of_node[node] = shares.of_node.get(node, 0) + sharded.sizes[piece]
                place = len(self._nodes.ranks[node]), self._at[rank]
                shares.holders.setdefault(place, []).append((self._position[rank], sharded.sizes[piece]))
        shares.sources.update((length, [0] * length) for length in self._lengths)
        for node, elements in shares.of_node.items():
            mates = self._mates[node]
            for at, mate in enumerate(mates):
                shares.collectors.setdefault((len(mates), at), []).append((mate, elements))
            for length in self._lengths:
                shares.sources[length][self._relay_for[length, node]] += elements
        return shares


def _add_products(totals: list[int], shares: Iterable[tuple[int, int]], weight: int) -> None:
    for position, elements in shares:
        totals[position] += elements * weight
