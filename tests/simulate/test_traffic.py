"""Counts of traffic against the list of all transfers, on random layouts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from meshmuon.plan import Nodes, PieceTransfer, Plan
from meshmuon.simulate.traffic import Direction, TrafficCounter
from tests.support.plans import random_plan

NODE = 3


def transfers(plan: Plan, *, gather: bool) -> dict[int, list[PieceTransfer]]:
    by_wave: dict[int, list[PieceTransfer]] = defaultdict(list)
    for index, task in enumerate(plan.tasks):
        by_wave[task.wave].extend(plan.gather_sends(index) if gather else plan.scatter_sends(index))
    return by_wave


def check(plan: Plan, direction: Direction, *, gather: bool) -> None:
    nodes = plan.options.nodes
    by_wave = transfers(plan, gather=gather)
    for wave in range(len(plan.wave_lanes)):
        messages: dict[tuple[int, int], int] = defaultdict(int)
        for transfer in by_wave[wave]:
            itemsize = plan.params[plan.tasks[transfer.task].param].itemsize
            messages[transfer.source, transfer.target] += transfer.piece.size * itemsize
        assert int(direction.messages[wave]) == len(messages)
        assert int(direction.largest[wave]) == max(messages.values(), default=0)
        for rank in plan.ranks:
            sent = {target: size for (source, target), size in messages.items() if source == rank}
            received = {source: size for (source, target), size in messages.items() if target == rank}
            at = wave, plan.ranks.index(rank)
            assert int(direction.sent[at]) == sum(sent.values())
            assert int(direction.received[at]) == sum(received.values())
            assert int(direction.peers[at]) == max(len(sent), len(received))
            assert int(direction.sent_inside[at]) == sum(
                size for to, size in sent.items() if nodes is None or to // NODE == rank // NODE
            )
            inside = sum(size for source, size in received.items() if nodes is None or source // NODE == rank // NODE)
            assert int(direction.received_inside[at]) == inside


@pytest.mark.parametrize("seed", range(40))
def test_traffic_is_the_sum_of_all_transfers(seed: int) -> None:
    made = random_plan(seed)
    nodes = Nodes.of({rank: rank // NODE for rank in made.ranks}) if seed % 4 else None
    plan = replace(made, options=replace(made.options, nodes=nodes))
    traffic = TrafficCounter(plan).count()
    check(plan, traffic.gather, gather=True)
    check(plan, traffic.scatter, gather=False)
    pairs: dict[int, set[int]] = defaultdict(set)
    blocks = torch.zeros_like(traffic.between_blocks)
    for transfers_of in (transfers(plan, gather=True), transfers(plan, gather=False)):
        for transfer in (transfer for wave in transfers_of.values() for transfer in wave):
            pairs[transfer.source].add(transfer.target)
            pairs[transfer.target].add(transfer.source)
            itemsize = plan.params[plan.tasks[transfer.task].param].itemsize
            source, target = (plan.ranks.index(rank) // traffic.block_ranks for rank in (transfer.source, transfer.target))
            blocks[source, target] += transfer.piece.size * itemsize
    assert traffic.peers.tolist() == [len(pairs[rank]) for rank in plan.ranks]
    assert torch.equal(blocks, traffic.between_blocks)
