"""Bytes of memory that every rank needs, by kind, beside what AdamW alone would need for the same model."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from ...layout import Layout, coordinates, length
from ...ortho import Scheme, resolve_scheme, scheme_for
from ...ortho.iteration import scratch_bytes
from ...plan import EVERY_HOLDER, NO_WAVE, add_local_costs
from ..predict.peers import peers_of_step
from .cluster import MuonOptions, StagePlan
from .machines import Machine

_MOMENTS = 2  # of AdamW
_UPDATE_ITEMSIZE = 4


KINDS = ("parameters", "gradients", "momentum", "adamw_state", "exchange_buffers", "scratch", "connections")
"""The last two are estimates."""


def stage_memory(stage: StagePlan, machine: Machine, options: MuonOptions, muon: Tensor, adamw: Tensor) -> dict[str, Tensor]:
    """Bytes by kind, (ranks,) each; in "total"; and "adamw_alone", if AdamW stepped everything.

    ``muon`` and ``adamw`` are the ``local_sizes``.
    """
    weight = options.param_dtype.itemsize
    held = muon + adamw
    memory = {
        "parameters": held * weight,
        "gradients": held * weight,
        "momentum": muon * (options.momentum_dtype or options.param_dtype).itemsize,
        "adamw_state": adamw * _MOMENTS * weight,
        "exchange_buffers": torch.tensor([stage.plan.buffer_bytes(rank) for rank in stage.plan.ranks]),
        "scratch": _scratch(stage, options),
        "connections": torch.tensor(peers_of_step(stage.plan)) * machine.connection_bytes,
    }
    return {**memory, "total": torch.stack(list(memory.values())).sum(0), "adamw_alone": held * weight * (2 + _MOMENTS)}


def local_sizes(stage: StagePlan, *, muon: bool) -> Tensor:
    """(ranks,): elements that each rank holds of the parameters of Muon, or of those of AdamW."""
    position = {rank: k for k, rank in enumerate(stage.plan.ranks)}
    total, repeats = torch.zeros(len(position), dtype=torch.int64), dict[Layout, int]()
    for item, layout in zip(stage.placed, stage.layouts, strict=True):
        if item.param.use_muon == muon:
            repeats[layout] = repeats.get(layout, 0) + 1
    for layout, times in repeats.items():
        total.index_add_(0, torch.tensor([position[rank] for rank in layout.mesh.ranks]), _held_elements(layout) * times)
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


def _scratch(stage: StagePlan, options: MuonOptions) -> Tensor:
    """The largest batch of every rank: as many matrices of one shape as a wave has there, within the memory budget."""
    plan = stage.plan
    compute_dtype = getattr(torch, stage.compute_dtype or "float32")
    scheme = resolve_scheme(options.scheme, options.ns_steps)
    counts: dict[tuple[int, int], dict[tuple[int, int], int]] = defaultdict(lambda: defaultdict(int))
    local: dict[tuple[int, int], dict[int, float]] = {}
    for task in plan.tasks:
        if task.wave != NO_WAVE:
            counts[task.sharded.rows, task.sharded.cols][task.owner, task.wave] += 1
    for shape in {(task.sharded.rows, task.sharded.cols) for task in plan.tasks if task.owner == EVERY_HOLDER}:
        local[shape] = dict.fromkeys(plan.ranks, 0.0)
        staying = (task.sharded for task in plan.tasks if task.owner == EVERY_HOLDER)
        add_local_costs(local[shape], ((sharded, 1.0) for sharded in staying if (sharded.rows, sharded.cols) == shape))
    most = dict.fromkeys(plan.ranks, 0)
    for rows, cols in {*counts, *local}:
        known = scheme_for(scheme, rows, cols, compute_dtype)
        steps = known.steps if isinstance(known, Scheme) else ()
        needed = rows * cols * _UPDATE_ITEMSIZE
        if steps:
            needed += scratch_bytes(rows, cols, steps, compute_dtype, torch.float32)
        largest = max(1, options.memory_budget // max(1, needed))
        for (owner, _), count in counts[rows, cols].items():
            most[owner] = max(most[owner], min(count, largest) * needed)
        for rank, number in local.get((rows, cols), {}).items():
            most[rank] = max(most[rank], min(round(number), largest) * needed)
    return torch.tensor([most[rank] for rank in plan.ranks])
