"""Bytes and buffers of a step of ``Muon``, or of ``DistMuon``, which averages gradients at the owners."""

from __future__ import annotations

from ...plan.plan_data import PlanData
from ...plan.relays import relay_buffers


def bytes_sent(plan: PlanData, *, averages: bool) -> dict[int, int]:
    """Rank → bytes that it sends in a step of ``Muon``, or of ``DistMuon``, which ``averages`` gradients at the owners."""
    if not averages:
        return plan.bytes_sent
    total = dict.fromkeys(plan.ranks, 0)
    for wave in plan.traffic:  # gradients go the way on which weights come back
        for rank, sent, received in zip(plan.ranks, wave.scatter.sent, wave.scatter.received, strict=True):
            total[rank] += sent + received
    return total


def buffer_bytes(plan: PlanData, *, averages: bool) -> dict[int, int]:
    """Rank → bytes of its exchange buffers, likewise; those of ``DistMuon`` hold all waves at once, and the averages of one."""
    if not averages:
        return {rank: plan.buffer_bytes(rank) for rank in plan.ranks}
    averaged = [dict.fromkeys(plan.ranks, 0) for _ in plan.wave_lanes]
    for task in plan.tasks:
        averaged[task.wave][task.owner] += task.sharded.size * plan.params[task.param].itemsize
    sent = bytes_sent(plan, averages=True)
    total = {rank: sent[rank] + max((wave[rank] for wave in averaged), default=0) for rank in plan.ranks}
    if plan.relayed:
        relays = relay_buffers([(hops, wave) for wave, hops in enumerate(plan.averaging_hops)])
        total = {rank: total[rank] + size for rank, size in zip(plan.ranks, relays, strict=True)}
    return total
