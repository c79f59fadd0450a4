"""Counts of peers, messages and relayed bytes against the list of all transfers, on random layouts and nodes."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from meshmuon.layout import Mesh, Sharded
from meshmuon.plan import Nodes, Parcel, Plan, Relays, make_plan
from meshmuon.plan.counts import ExchangePeers, count_peers, peers_of_step
from meshmuon.plan.traffic import ExchangeBytes
from tests.support.plans import entry, options_for, random_nodes, random_plan

Messages = dict[Parcel, int]


def messages_of(plan: Plan, wave: int, *, gather: bool) -> Messages:
    """(source, target) → bytes, by listing the transfers of a wave."""
    messages: Messages = defaultdict(int)
    for index, task in enumerate(plan.tasks):
        if task.wave == wave:
            for transfer in plan.gather_sends(index) if gather else plan.scatter_sends(index):
                nbytes = plan.params[task.param].wire.of(transfer.piece)
                messages[transfer.source, transfer.target] += nbytes.gather if gather else nbytes.scatter
    return messages


def plan_on_nodes(seed: int) -> Plan:
    made, rng = random_plan(seed), random.Random(seed)
    if seed % 3 == 0:  # other dtypes on the wire, in one direction or in both
        itemsize, back = rng.choice([(2, None), (2, 4), (8, 4)])
        params = [replace(param, itemsize=itemsize, itemsize_back=back, lane=(itemsize, back)) for param in made.params]
        made = make_plan(params, made.options)
    nodes = random_nodes(rng, list(made.ranks)) if seed % 4 and len(made.ranks) > 1 else None
    return replace(made, options=replace(made.options, nodes=nodes))


def check_peers(plan: Plan, found: ExchangePeers, messages: Messages) -> None:
    assert found.messages == len(messages)
    assert found.largest == max(messages.values(), default=0)
    peers = [{a if b == rank else b for a, b in messages if rank in (a, b)} for rank in plan.ranks]
    assert found.peers == [len(of_rank) for of_rank in peers]


@pytest.mark.parametrize("seed", range(40))
def test_peers_and_messages_are_those_of_all_transfers(seed: int) -> None:
    plan = plan_on_nodes(seed)
    pairs: dict[int, set[int]] = defaultdict(set)
    for wave, (gather, scatter) in enumerate(count_peers(plan)):
        gathered, scattered = (messages_of(plan, wave, gather=gather) for gather in (True, False))
        check_peers(plan, gather, gathered)
        check_peers(plan, scatter, scattered)
        for source, target in (*gathered, *scattered):
            pairs[source].add(target)
            pairs[target].add(source)
    assert peers_of_step(plan) == [len(pairs[rank]) for rank in plan.ranks]


def listed_hops(plan: Plan, relays: Relays, messages: Messages) -> list[ExchangeBytes]:
    """Collect, forward and distribute, parcel by parcel."""
    position = {rank: at for at, rank in enumerate(plan.ranks)}
    hops = [ExchangeBytes(*([0] * len(plan.ranks) for _ in range(4))) for _ in range(3)]

    def move(hop: int, source: int, target: int, size: int) -> None:
        if source != target:
            inside, between = (
                (hops[hop].sent_inside, hops[hop].received_inside),
                (hops[hop].sent_between, hops[hop].received_between),
            )
            sent, received = between if hop == 1 else inside
            sent[position[source]] += size
            received[position[target]] += size

    for parcel, size in messages.items():
        through = relays.relays(parcel)
        if through is None:
            move(0, *parcel, size)
        else:
            move(0, parcel[0], through[0], size)
            move(1, *through, size)
            move(2, through[1], parcel[1], size)
    return hops


@pytest.mark.parametrize("seed", range(60))
def test_hops_are_those_of_all_parcels(seed: int) -> None:
    plan = plan_on_nodes(seed)
    if plan.options.nodes is None:
        assert plan.hops == tuple(((wave.gather,), (wave.scatter,)) for wave in plan.traffic)
        return
    relayed = replace(plan, options=replace(plan.options, max_peers=1))
    relays, sent = Relays(plan.options.nodes), dict.fromkeys(plan.ranks, 0)
    for wave, hops in enumerate(relayed.hops):
        for found, gather in zip(hops, (True, False), strict=True):
            expected = listed_hops(plan, relays, messages_of(plan, wave, gather=gather))
            assert list(found) == expected
            for hop in expected:
                for rank, size in zip(plan.ranks, hop.sent, strict=True):
                    sent[rank] += size
    assert relayed.bytes_relayed == {rank: sent[rank] - plan.bytes_sent[rank] for rank in plan.ranks}


def test_relays_of_strided_groups_share_the_work() -> None:
    """Matrices whose holders are on every fourth node of 4 ranks: all ranks of these nodes relay, not one of them."""
    ranks = tuple(range(256))
    params = [entry(f"w{k}", (64, 16), Mesh((16,), ranks[k % 16 :: 16]), (Sharded(0),)) for k in range(256)]
    nodes = Nodes.in_order(ranks, [4] * 64)
    plan = make_plan(params, options_for(nodes=nodes, max_peers=1))
    assert plan.relayed
    relayed = plan.bytes_relayed.values()
    assert min(relayed) > 0  # of one rank per node, the others would do nothing
    assert max(relayed) < 3 * sum(relayed) / len(relayed)
