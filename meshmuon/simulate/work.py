"""How long everything in a step takes on every rank of a machine, before anything waits for anything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import Layout, coordinates, length
from ..plan import EVERY_HOLDER, NO_WAVE, add_local_costs
from .cluster import MuonOptions, StagePlan
from .machines import ADAMW_BYTES, Machine
from .rank_index import RankIndex
from .traffic import Direction, Traffic


@dataclass(frozen=True)
class StageWork:
    """Seconds of each part of a step; tensors are (waves, ranks) or (ranks,)."""

    orthogonalise: Tensor  # of each wave
    momentum: Tensor  # before each wave's gather
    update: Tensor  # after each wave's scatter
    gather: Tensor  # each rank's own time in the exchange
    scatter: Tensor
    local: Tensor  # (ranks,): matrices that stay where they are
    adamw: Tensor  # (ranks,)
    host: Tensor  # (ranks,): what the host needs beside


def stage_work(stage: StagePlan, traffic: Traffic, machine: Machine, options: MuonOptions) -> StageWork:
    """The work of all ranks of a stage."""
    plan, count = stage.plan, traffic.shard_elements.shape[1]
    waves, compute_dtype = len(plan.wave_lanes), str(stage.compute_dtype).removeprefix("torch.")
    seconds_of = [_seconds_per_matrix(stage, k, machine, compute_dtype) for k in range(len(plan.params))]
    owned = [[0.0] * count for _ in range(waves)]
    for task in plan.tasks:
        if task.wave != NO_WAVE:
            owned[task.wave][traffic.index.of(task.owner)] += seconds_of[task.param]
    staying = [task for task in plan.tasks if task.owner == EVERY_HOLDER]
    local, local_elements, held = (dict.fromkeys(plan.ranks, 0.0) for _ in range(3))
    add_local_costs(local, ((task.sharded, seconds_of[task.param]) for task in staying))
    add_local_costs(local_elements, ((task.sharded, float(task.sharded.size)) for task in staying))
    add_local_costs(held, ((task.sharded, 1.0) for task in plan.tasks))
    rate = machine.memory_bytes_per_second
    weight, momentum = options.param_dtype.itemsize, (options.momentum_dtype or torch.float32).itemsize
    wire = max((param.itemsize for param in plan.params), default=4)
    fill, apply = (weight + 2 * momentum + wire) / rate, (wire + 2 * weight) / rate  # seconds per element
    elements = traffic.shard_elements.double()
    return StageWork(
        orthogonalise=torch.tensor(owned, dtype=torch.float64).reshape(waves, count),
        momentum=elements * fill,
        update=elements * apply,
        gather=_exchange_seconds(traffic.gather, machine, relayed=traffic.relayed),
        scatter=_exchange_seconds(traffic.scatter, machine, relayed=traffic.relayed),
        local=_by_rank(local) + _by_rank(local_elements) * (fill + apply),
        adamw=local_sizes(stage, muon=False).double() * ADAMW_BYTES * weight / 4 / rate,
        host=machine.host_seconds_per_step + machine.host_seconds_per_matrix * _by_rank(held),
    )


def local_sizes(stage: StagePlan, *, muon: bool) -> Tensor:
    """(ranks,): elements that each rank holds of the parameters of Muon, or of those of AdamW."""
    index = RankIndex(stage.plan.ranks)
    total, repeats = torch.zeros(len(index), dtype=torch.int64), dict[Layout, int]()
    for item, layout in zip(stage.placed, stage.layouts, strict=True):
        if item.param.use_muon == muon:
            repeats[layout] = repeats.get(layout, 0) + 1
    for layout, times in repeats.items():
        sizes = _held_elements(layout)
        total.index_add_(0, index.tensor(layout.mesh.ranks), sizes * times)
    return total


def _held_elements(layout: Layout) -> Tensor:
    lengths = [torch.tensor([length(ranges) for ranges in layout.cuts(dim)]) for dim in range(len(layout.shape))]
    places = torch.tensor(list(coordinates(layout.mesh).values()))
    elements = torch.ones(len(layout.mesh.ranks), dtype=torch.int64)
    for dim, sizes in enumerate(lengths):
        part = torch.zeros(len(layout.mesh.ranks), dtype=torch.int64)
        for axis in layout.axes(dim):
            part = part * layout.mesh.shape[axis] + places[:, axis]
        elements *= sizes[part]
    return elements


def _seconds_per_matrix(stage: StagePlan, k: int, machine: Machine, compute_dtype: str) -> float:
    param = stage.plan.params[k]
    sharded = param.sharded_matrices(param.layouts[0])[0]
    return param.flops / machine.orthogonalise_rate(min(sharded.rows, sharded.cols), compute_dtype)


def _exchange_seconds(direction: Direction, machine: Machine, *, relayed: bool) -> Tensor:
    """Each rank's time in each exchange: links inside and between nodes work at the same time, and each peer adds a little.

    Through relays there are three exchanges, one after the other. All but 1/n of what leaves a node of n ranks also moves inside
    its first and inside its last node.
    """
    sent_between = direction.sent - direction.sent_inside
    received_between = direction.received - direction.received_inside
    inside = torch.maximum(direction.sent_inside, direction.received_inside) / machine.inside.bytes_per_second
    between = torch.maximum(sent_between, received_between) / machine.between.bytes_per_second
    crosses = (sent_between + received_between) > 0
    latency = torch.where(crosses, machine.between.seconds, machine.inside.seconds)
    busy = (direction.sent + direction.received) > 0
    if relayed:
        through = 2 * (machine.ranks_per_node - 1) / machine.ranks_per_node * torch.maximum(sent_between, received_between)
        inside_twice = inside + through / machine.inside.bytes_per_second
        moved = between + inside_twice
        return torch.where(busy, moved + latency + 2 * machine.inside.seconds + machine.seconds_per_peer * direction.peers, 0.0)
    return torch.where(busy, torch.maximum(inside, between) + latency + machine.seconds_per_peer * direction.peers, 0.0)


def _by_rank(values: dict[int, float]) -> Tensor:
    return torch.tensor([values[rank] for rank in sorted(values)], dtype=torch.float64)
