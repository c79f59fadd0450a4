"""Two hops between nodes: every parcel arrives once, over few peers, and only where a plan has too many."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshmuon.plan import HopRoutes, Nodes, Parcel, Relays, make_plan
from meshmuon.plan.counts import count_peers
from tests.support.plans import random_entries, random_nodes, random_options, ranks_of


@pytest.mark.parametrize("seed", range(150))
def test_every_parcel_arrives_once(seed: int) -> None:
    """Any parcels, any nodes: a rank passes on only what it has, and both sides of a message list the same in the
    same order.
    """
    rng = random.Random(seed)
    ranks = sorted(rng.sample(range(40), rng.randint(2, 14)))
    nodes = random_nodes(rng, ranks)
    parcels = {(a, b) for a in ranks for b in ranks if a != b and rng.random() < 0.6}
    place = {parcel: {parcel[0]} for parcel in parcels}  # where copies of it have been
    hops = {}
    for rank in ranks:
        mates = set(nodes.ranks[nodes.node_of(rank)])
        hops[rank] = Relays(nodes).hops(
            rank,
            [parcel for parcel in parcels if parcel[0] in mates],
            [parcel for parcel in parcels if parcel[1] in mates],
        )
    deliveries: list[Parcel] = []
    for number in range(3):
        messages: dict[tuple[int, int], list[Parcel]] = {}
        for rank in ranks:
            for target, parcel in hops[rank][number].sent:
                assert rank in place[parcel], "a rank sends only what it has"
                assert rank != target
                messages.setdefault((rank, target), []).append(parcel)
        for rank in ranks:
            received: dict[tuple[int, int], list[Parcel]] = {}
            for source, parcel in hops[rank][number].received:
                received.setdefault((source, rank), []).append(parcel)
                deliveries += [parcel] * (rank == parcel[1])
            assert received == {pair: sent for pair, sent in messages.items() if pair[1] == rank}
        for (_, target), sent in messages.items():
            for parcel in sent:
                place[parcel].add(target)
    assert sorted(deliveries) == sorted(parcels)
    for rank in ranks:
        assert len(peers_in(hops[rank])) <= len(nodes.ranks[nodes.node_of(rank)]) - 1 + len(nodes.ranks)


def peers_in(hops: tuple[HopRoutes, ...]) -> set[int]:
    return {peer for hop in hops for peer, _ in (*hop.sent, *hop.received)}


@pytest.mark.parametrize(("per_node", "count"), [(1, 5), (2, 4), (4, 4), (8, 16), (8, 64)])
def test_peers_among_all(per_node: int, count: int) -> None:
    """All talk to all: at most the ranks of the node and a rank of every other node, and the load is spread over
    the node.
    """
    ranks = range(per_node * count)
    nodes = Nodes.in_order(ranks, [per_node] * count)
    relays = Relays(nodes)
    collected = dict.fromkeys(ranks, 0)
    for source in range(count):
        for target in range(count):
            if source != target:
                collector, distributor = relays.relays((source * per_node, target * per_node)) or (-1, -1)
                assert nodes.node_of(collector) == source
                assert nodes.node_of(distributor) == target
                collected[collector] += 1
    assert max(collected.values()) - min(collected.values()) <= 1
    rank = per_node // 2
    mates = range(per_node)
    leaving = [(a, b) for a in mates for b in ranks if a != b]
    hops = relays.hops(rank, leaving, [(b, a) for a, b in leaving])
    assert len(peers_in(hops)) <= per_node - 1 + -(-count // per_node)


@pytest.mark.parametrize("seed", range(60))
def test_plans_without_too_many_peers_stay_as_they_were(seed: int) -> None:
    rng = random.Random(seed)
    params, options = random_entries(rng), random_options(rng)
    options = replace(options, nodes=random_nodes(rng, ranks_of(params)))
    plan = make_plan(params, options)
    peers = plan.most_peers
    assert peers == max((max(exchange.peers) for wave in count_peers(plan) for exchange in wave), default=0)
    assert not any(plan.bytes_relayed.values())
    if plan.options.nodes is None or peers == 0:
        return
    assert make_plan(params, replace(options, max_peers=peers)).digest == plan.digest
    relayed = make_plan(params, replace(options, max_peers=peers - 1))
    assert relayed.options.max_peers == peers - 1
    assert relayed.digest != plan.digest
    assert (relayed.tasks, relayed.bytes_sent) == (plan.tasks, plan.bytes_sent)
    # The buffers between hops have room, or as few waves as overlap at all are in flight.
    before, in_flight = plan.options.in_flight, relayed.options.in_flight
    room = 4 * options.budget * options.in_flight + 8 * options.budget

    def needed(in_flight: int) -> int:
        changed = replace(relayed, options=replace(relayed.options, in_flight=in_flight))
        return max(map(changed.buffer_bytes, plan.ranks))

    if options.chunk_size > 0 or before <= 2:
        assert in_flight == before
    else:
        assert in_flight == next((k for k in range(before, 2, -1) if needed(k) <= room), 2)
    assert f"{peers} peers per rank would be more than {peers - 1}" in relayed.describe()
