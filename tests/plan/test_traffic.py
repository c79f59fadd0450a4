"""Counts of peers and messages against the list of all transfers, on random layouts and nodes."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from meshmuon.plan import Plan, make_plan
from meshmuon.tools.predict.counts import ExchangePeers, count_peers, peers_of_step
from tests.support.plans import random_nodes, random_plan

Messages = dict[tuple[int, int], int]


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
