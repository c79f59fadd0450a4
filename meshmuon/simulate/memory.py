"""Bytes of memory that every rank needs, by kind, beside what AdamW alone would need for the same model."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ortho import Scheme, resolve_scheme, scheme_for
from ..ortho.iteration import scratch_bytes
from ..plan import EVERY_HOLDER, NO_WAVE, add_local_costs
from .cluster import MuonOptions, StagePlan
from .job_rates import local_sizes
from .machines import Machine

_MOMENTS = 2  # of AdamW
_UPDATE_ITEMSIZE = 4


@dataclass(frozen=True)
class StageMemory:
    """Bytes by kind; all tensors are (ranks,). The first five are exact, the last two are estimates."""

    parameters: Tensor
    gradients: Tensor
    momentum: Tensor
    adamw_state: Tensor
    exchange_buffers: Tensor
    scratch: Tensor  # of the orthogonalisation
    connections: Tensor  # to other ranks
    adamw_alone: Tensor  # what parameters, gradients and state would take if AdamW stepped everything

    KINDS = ("parameters", "gradients", "momentum", "adamw_state", "exchange_buffers", "scratch", "connections")

    @property
    def total(self) -> Tensor:
        """All kinds together."""
        return torch.stack([getattr(self, kind) for kind in self.KINDS]).sum(0)


def stage_memory(stage: StagePlan, machine: Machine, options: MuonOptions) -> StageMemory:
    """The memory of all ranks of a stage."""
    muon, adamw = local_sizes(stage, muon=True), local_sizes(stage, muon=False)
    weight = options.param_dtype.itemsize
    held = muon + adamw
    buffers = torch.tensor([stage.plan.buffer_bytes(rank) for rank in stage.plan.ranks])
    return StageMemory(
        parameters=held * weight,
        gradients=held * weight,
        momentum=muon * (options.momentum_dtype or options.param_dtype).itemsize,
        adamw_state=adamw * _MOMENTS * weight,
        exchange_buffers=buffers,
        scratch=_scratch(stage, options),
        connections=torch.tensor(stage.plan.peers_of_step) * machine.connection_bytes,
        adamw_alone=held * weight * (2 + _MOMENTS),
    )


def _scratch(stage: StagePlan, options: MuonOptions) -> Tensor:
    """The largest batch of every rank: as many matrices of one shape as a wave has there, within the memory budget."""
    plan = stage.plan
    compute_dtype = stage.compute_dtype
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
