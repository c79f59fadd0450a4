"""Counts of traffic against the list of all transfers, on random layouts."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from meshmuon.plan import PieceTransfer, Plan
from meshmuon.simulate.traffic import Direction, TrafficCounter
from tests.support.plans import random_plan

NODE = 3


def transfers(plan: Plan, *, gather: bool) -> dict[int, list[PieceTransfer]]:
    by_wave: dict[int, list[PieceTransfer]] = defaultdict(list)
    for index, task in enumerate(plan.tasks):
        by_wave[task.wave].extend(plan.gather_sends(index) if gather else plan.scatter_sends(index))
    return by_wave


def check(plan: Plan, direction: Direction, first: int, *, gather: bool) -> None:
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
            at = wave, rank - first
            assert int(direction.sent[at]) == sum(sent.values())
            assert int(direction.received[at]) == sum(received.values())
            assert int(direction.peers[at]) == max(len(sent), len(received))
            assert int(direction.sent_inside[at]) == sum(size for to, size in sent.items() if to // NODE == rank // NODE)
            inside = sum(size for source, size in received.items() if source // NODE == rank // NODE)
            assert int(direction.received_inside[at]) == inside


@pytest.mark.parametrize("seed", range(40))
def test_traffic_is_the_sum_of_all_transfers(seed: int) -> None:
    plan = random_plan(seed)
    traffic = TrafficCounter(plan, NODE).count()
    check(plan, traffic.gather, traffic.first_rank, gather=True)
    check(plan, traffic.scatter, traffic.first_rank, gather=False)
    pairs: dict[int, set[int]] = defaultdict(set)
    blocks = torch.zeros_like(traffic.between_blocks)
    for transfers_of in (transfers(plan, gather=True), transfers(plan, gather=False)):
        for transfer in (transfer for wave in transfers_of.values() for transfer in wave):
            pairs[transfer.source].add(transfer.target)
            pairs[transfer.target].add(transfer.source)
            itemsize = plan.params[plan.tasks[transfer.task].param].itemsize
            source, target = ((rank - traffic.first_rank) // traffic.block_ranks for rank in (transfer.source, transfer.target))
            blocks[source, target] += transfer.piece.size * itemsize
    assert {rank: int(traffic.peers[rank - traffic.first_rank]) for rank in plan.ranks} == {r: len(pairs[r]) for r in plan.ranks}
    assert torch.equal(blocks, traffic.between_blocks)
