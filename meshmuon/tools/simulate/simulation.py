"""A cluster, planned by the code with which its ranks plan, and timed: everything from which a report is made."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import cast

import torch
from torch import Tensor

from ...agree.local_planner import LocalPlanner, PlanSettings, Topology
from ...device import memory_budget_for
from ...execute import CommDtypeLike
from ...layout import Layout, Mesh, Placement, ShardedMatrix, coordinates, length
from ...matrices import MatrixOptions, check_matrices
from ...ortho import Scheme, SchemeLike, resolve_scheme, scheme_for
from ...ortho.scratch import scratch_bytes
from ...params.option_table import ParamGroup
from ...params.param_record import GroupRecipe, ParamLocation, ParamRecord
from ...plan import (
    NO_WAVE,
    CostModel,
    Nodes,
    Plan,
    PlanOptions,
    add_local_costs,
    cost_model_for,
)
from ..predict.counts import WavePeers, count_peers, peers_of_step
from ..predict.launches import Launches, adamw_launches, launches_of
from ..predict.machines import Machine
from ..predict.prediction import predict
from ..predict.timeline import Timeline
from .description import ModelDescription
from .sharding import PlacedParam, Sharding

_FLOPS_PER_PARAMETER = 6  # of forward and backward, per token
_MOMENTS = 2  # of AdamW
_UPDATE_ITEMSIZE = 4
MEMORY_KINDS = ("parameters", "gradients", "momentum", "adamw_state", "exchange_buffers", "scratch", "connections")
"""The last two are estimates."""


@dataclass(frozen=True, slots=True)
class MuonOptions:
    """The options of ``Muon`` that shape a plan, with their defaults, and the dtype of the weights."""

    replicas: str = "auto"
    comm_dtype: CommDtypeLike = None
    scheme: SchemeLike = "auto"
    ns_steps: int = 5
    memory_budget: int | None = None  # None: what a job on the machine chooses
    chunk_size: int = -1
    warmup_step: int = 5
    form: str = "auto"
    param_dtype: torch.dtype = torch.float32
    momentum_dtype: torch.dtype | None = None
    cost_model: CostModel | None = None

    def batch_budget(self, machine: Machine) -> int:
        """Bytes of scratch of a batch: as ``ExecutorSettings`` has it in a job on the machine."""
        on_device = machine.device != "cpu"
        return self.memory_budget or memory_budget_for(machine.memory_bytes if on_device else None) * (
            2 if on_device else 1
        )


@dataclass(frozen=True)
class Workload:
    """What is trained between two optimizer steps."""

    tokens_per_step: int
    mfu: float  # share of the machine's peak that forward and backward reach


@dataclass(frozen=True)
class StagePlan:
    """The plan of one pipeline stage; all of it if there are no stages."""

    plan: Plan
    placed: tuple[PlacedParam, ...]  # all parameters, those of AdamW as well
    layouts: tuple[Layout, ...]  # of these parameters

    @property
    def compute_dtype(self) -> str:
        """Of the products; empty if there are none."""
        return self.plan.params[0].compute_dtype if self.plan.params else ""


def plan_cluster(
    model: ModelDescription, sharding: Sharding, options: MuonOptions, machine: Machine
) -> list[StagePlan]:
    """The plan of every stage."""
    return [_plan_stage(placed, options, machine) for placed in sharding.stages(model)]


def _plan_stage(placed: Sequence[PlacedParam], options: MuonOptions, machine: Machine) -> StagePlan:
    device = torch.device(machine.device)
    matrices = {item.param.name: item.param.matrices for item in placed if item.param.matrices is not None}
    entries = check_matrices({name: entry.fields() for name, entry in matrices.items()})
    # The default of a CPU is that of the machine, not of the CPU on which this runs.
    compute_dtype = getattr(torch, machine.rates_for().compute_dtype) if device.type == "cpu" else None
    scheme = resolve_scheme(options.scheme, options.ns_steps)
    muon = GroupRecipe(scheme, matrix_options=MatrixOptions(matrices=entries), compute_dtype=compute_dtype)
    # As in an optimizer with the default param groups: Muon's parameters first, then AdamW's.
    ordered = sorted(placed, key=lambda item: not item.param.use_muon)
    rank = min(rank for mesh in {item.mesh for item in placed} for rank in mesh.ranks)
    records = []
    for item in ordered:
        param = torch.empty(item.param.shape, dtype=options.param_dtype, device="meta")
        local_shape = _local_shape(item.param.shape, item.mesh, item.placements, rank)
        place = ParamLocation(local_shape, item.mesh, item.placements, device, device)
        group = cast(ParamGroup, {})  # plans read the recipe, not the group
        index, recipe = (0, muon) if item.param.use_muon else (1, GroupRecipe())
        records.append(ParamRecord.of(item.param.name, param, index, group, recipe, options.comm_dtype, place))
    plan_options = PlanOptions(
        cost_model_for(machine.device),
        options.replicas,
        options.chunk_size,
        in_flight=options.warmup_step + 1,
    )
    topology = Topology.around(rank, records, None)
    topology = replace(topology, nodes=Nodes.of({rank: rank // machine.ranks_per_node for rank in topology.ranks}))
    memory = None if machine.device == "cpu" else machine.memory_bytes
    settings = PlanSettings(
        plan_options,
        options.form,
        "use_distributed_muon=False",
        options.cost_model,
        options.memory_budget,
        device_memory=memory,
    )
    planner = LocalPlanner(tuple(records), settings, topology)
    plan = planner.plan(frozenset(range(len(records)))).plan
    # A plan without matrices has no ranks, but they are there: a stage may hold embeddings alone.
    plan = plan if plan.ranks else replace(plan, ranks=topology.ranks)
    return StagePlan(plan, tuple(ordered), tuple(layouts[0] for layouts in planner.layouts))


@lru_cache(maxsize=4096)
def _local_shape(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...], rank: int) -> tuple[int, ...]:
    return Layout(shape, mesh, placements).local_shape(rank)


@dataclass(frozen=True)
class SimulatedStage:
    """One pipeline stage: its plan and what follows from it."""

    planned: StagePlan
    timeline: Timeline  # when every rank does what
    memory: dict[str, Tensor]  # bytes by kind, each (ranks,)
    peers: WavePeers
    adamw_alone_seconds: float  # a step of AdamW on all parameters, on the rank that has most of them
    launches: dict[int, Launches]  # by rank, as a GPU would have them

    @classmethod
    def of(cls, planned: StagePlan, machine: Machine, options: MuonOptions) -> SimulatedStage:
        """Times a plan on a machine."""
        plan = planned.plan
        rates = machine.rates_for(
            planned.compute_dtype,
            several_nodes=plan.options.nodes is not None,
            weight=options.param_dtype.itemsize,
            momentum=(options.momentum_dtype or torch.float32).itemsize,
            wire=max((param.wire.itemsize for param in plan.params), default=4),
        )
        muon, adamw = _local_sizes(planned, muon=True), _local_sizes(planned, muon=False)
        peers = count_peers(plan)
        adamw_elements = dict(zip(plan.ranks, adamw.tolist(), strict=True))
        launches = launches_of(plan, batch_budget=options.batch_budget(machine))
        tensors = sum(not item.param.use_muon for item in planned.placed)
        for rank, elements in adamw_elements.items():
            launches[rank].adamw = adamw_launches(tensors, elements)
        timeline = predict(plan, rates, adamw_elements=adamw_elements, launches=launches, peers=peers)
        alone = float((muon + adamw).max()) * rates.seconds_per_element("adamw")
        return cls(planned, timeline, _memory(planned, machine, options, muon, adamw), peers, alone, launches)

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def orthogonalise_seconds(self) -> list[float]:
        work = self.timeline.work
        return [sum(parts) for parts in zip(work.local, *(wave.orthogonalise for wave in work.waves), strict=True)]


@dataclass(frozen=True)
class Simulation:
    """All stages of a model on a cluster."""

    model: ModelDescription
    sharding: Sharding
    machine: Machine
    options: MuonOptions
    workload: Workload
    stages: tuple[SimulatedStage, ...]

    @classmethod
    def run(
        cls, model: ModelDescription, sharding: Sharding, machine: Machine, options: MuonOptions, workload: Workload
    ) -> Simulation:
        """Plans every stage and times it."""
        stages = tuple(
            SimulatedStage.of(stage, machine, options) for stage in plan_cluster(model, sharding, options, machine)
        )
        return cls(model, sharding, machine, options, workload, stages)

    @cached_property
    def slowest(self) -> SimulatedStage:
        return max(self.stages, key=lambda stage: stage.timeline.seconds)

    @property
    def seconds(self) -> float:
        """Of the optimizer step."""
        return self.slowest.timeline.seconds

    @property
    def training_seconds(self) -> float:
        """Of forward and backward between two steps."""
        flops = _FLOPS_PER_PARAMETER * self.model.active_size * self.workload.tokens_per_step
        return flops / (self.sharding.ranks * self.machine.peak() * self.workload.mfu)

    @property
    def share(self) -> float:
        """The optimizer's share of a training step."""
        return self.seconds / (self.seconds + self.training_seconds)

    def most_bytes(self, kind: str) -> int:
        """Memory of a kind, or in "total", on the rank that has most of it."""
        return max(int(stage.memory[kind].max()) for stage in self.stages)

    @property
    def most_peers(self) -> int:
        """Most peers of a rank in one exchange."""
        exchanges = (exchange for stage in self.stages for wave in stage.peers for exchange in wave)
        return max((max(exchange.peers, default=0) for exchange in exchanges), default=0)


def _memory(stage: StagePlan, machine: Machine, options: MuonOptions, muon: Tensor, adamw: Tensor) -> dict[str, Tensor]:
    """Bytes by kind, (ranks,) each; in "total"; and "adamw_alone", if AdamW stepped everything.

    ``muon`` and ``adamw`` are the ``_local_sizes``.
    """
    weight = options.param_dtype.itemsize
    held = muon + adamw
    memory = {
        "parameters": held * weight,
        "gradients": held * weight,
        "momentum": muon * (options.momentum_dtype or options.param_dtype).itemsize,
        "adamw_state": adamw * _MOMENTS * weight,
        "exchange_buffers": torch.tensor([stage.plan.buffer_bytes(rank) for rank in stage.plan.ranks]),
        "scratch": _scratch(stage, options, options.batch_budget(machine)),
        "connections": torch.tensor(peers_of_step(stage.plan)) * machine.connection_bytes,
    }
    return {**memory, "total": torch.stack(list(memory.values())).sum(0), "adamw_alone": held * weight * (2 + _MOMENTS)}


def _local_sizes(stage: StagePlan, *, muon: bool) -> Tensor:
    """(ranks,): elements that each rank holds of the parameters of Muon, or of those of AdamW."""
    position = {rank: k for k, rank in enumerate(stage.plan.ranks)}
    total = torch.zeros(len(position), dtype=torch.int64)
    chosen = zip(stage.placed, stage.layouts, strict=True)
    for layout, times in Counter(layout for item, layout in chosen if item.param.use_muon == muon).items():
        total.index_add_(
            0, torch.tensor([position[rank] for rank in layout.mesh.ranks]), _held_elements(layout) * times
        )
    return total


def _held_elements(layout: Layout) -> Tensor:
    """(ranks of the mesh,)."""
    places = torch.tensor(list(coordinates(layout.mesh).values()))
    elements = torch.ones(len(layout.mesh.ranks), dtype=torch.int64)
    for dim in range(len(layout.shape)):
        part = torch.zeros(len(layout.mesh.ranks), dtype=torch.int64)
        for axis in layout.axes(dim):
            part = part * layout.mesh.shape[axis] + places[:, axis]
        elements *= torch.tensor([length(ranges) for ranges in layout.cuts(dim)])[part]
    return elements


def _scratch(stage: StagePlan, options: MuonOptions, budget: int) -> Tensor:
    """The largest batch of every rank: as many matrices of one shape as a wave has there, within the memory budget."""
    ranks, compute_dtype = stage.plan.ranks, getattr(torch, stage.compute_dtype or "float32")
    scheme = resolve_scheme(options.scheme, options.ns_steps)
    # (rows, cols) → rank → matrices
    at_once: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: dict.fromkeys(ranks, 0.0))
    staying: dict[tuple[int, int], list[ShardedMatrix]] = defaultdict(list)
    in_waves: Counter[tuple[tuple[int, int], int, int]] = Counter()
    for task in stage.plan.tasks:
        shape = task.sharded.rows, task.sharded.cols
        if task.wave == NO_WAVE:
            staying[shape].append(task.sharded)
        else:
            in_waves[shape, task.owner, task.wave] += 1
    for shape, matrices in staying.items():
        add_local_costs(at_once[shape], ((sharded, 1.0) for sharded in matrices))
    for (shape, owner, _), count in in_waves.items():
        at_once[shape][owner] = max(at_once[shape][owner], count)
    most = dict.fromkeys(ranks, 0)
    for (rows, cols), counts in at_once.items():
        known = scheme_for(scheme, rows, cols, compute_dtype)
        needed = rows * cols * _UPDATE_ITEMSIZE
        if isinstance(known, Scheme) and known.steps:
            needed += scratch_bytes(rows, cols, known.steps, compute_dtype, torch.float32)
        largest = max(1, budget // max(1, needed))
        for rank, number in counts.items():
            most[rank] = max(most[rank], min(round(number), largest) * needed)
    return torch.tensor([most[rank] for rank in ranks])
