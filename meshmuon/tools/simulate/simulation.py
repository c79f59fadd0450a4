"""A cluster, planned and timed: everything from which a report is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...plan import Plan
from ..predict.peers import WavePeers, count_peers
from ..predict.prediction import predict
from ..predict.timeline import Timeline
from .cluster import MuonOptions, StagePlan, plan_cluster
from .description import ModelDescription
from .machines import Machine
from .memory import local_sizes, stage_memory
from .sharding import Sharding

_FLOPS_PER_PARAMETER = 6  # of forward and backward, per token


@dataclass(frozen=True)
class Workload:
    """What is trained between two optimizer steps."""

    tokens_per_step: int
    mfu: float  # share of the machine's peak that forward and backward reach


@dataclass(frozen=True)
class SimulatedStage:
    """One pipeline stage: its plan and what follows from it."""

    planned: StagePlan
    timeline: Timeline  # when every rank does what
    memory: dict[str, Tensor]  # bytes by kind, each (ranks,)
    peers: WavePeers
    adamw_alone_seconds: float  # a step of AdamW on all parameters, on the rank that has most of them

    @classmethod
    def of(cls, planned: StagePlan, machine: Machine, options: MuonOptions) -> SimulatedStage:
        """Times a plan on a machine."""
        plan = planned.plan
        rates = machine.rates_for(
            planned.compute_dtype,
            several_nodes=plan.options.nodes is not None,
            weight=options.param_dtype.itemsize,
            momentum=(options.momentum_dtype or torch.float32).itemsize,
            wire=max((param.itemsize for param in plan.params), default=4),
        )
        muon, adamw = local_sizes(planned, muon=True), local_sizes(planned, muon=False)
        peers = count_peers(plan)
        adamw_elements = dict(zip(plan.ranks, adamw.tolist(), strict=True))
        timeline = predict(plan, rates, adamw_elements=adamw_elements, peers=peers)
        alone = float((muon + adamw).max()) * rates.seconds_per_element("adamw")
        return cls(planned, timeline, stage_memory(planned, machine, options, muon, adamw), peers, alone)

    @property
    def plan(self) -> Plan:
        """Its plan."""
        return self.planned.plan

    @property
    def orthogonalise_seconds(self) -> list[float]:
        """By rank: seconds in which it orthogonalises."""
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
        cls,
        model: ModelDescription,
        sharding: Sharding,
        machine: Machine,
        options: MuonOptions,
        workload: Workload,
        planned: Sequence[StagePlan] | None = None,
    ) -> Simulation:
        """Plans every stage, unless plans exist, and times them."""
        if planned is None:
            planned = plan_cluster(model, sharding, options, machine.device, machine.ranks_per_node)
        stages = tuple(SimulatedStage.of(stage, machine, options) for stage in planned)
        return cls(model, sharding, machine, options, workload, stages)

    @cached_property
    def slowest(self) -> SimulatedStage:
        """The stage whose step takes longest."""
        return max(self.stages, key=lambda stage: stage.timeline.seconds)

    @cached_property
    def node_of(self) -> dict[int, int]:
        """Rank → number of its node."""
        known = [(stage.plan.ranks, stage.plan.options.nodes) for stage in self.stages]
        per_node = self.machine.ranks_per_node
        return {
            rank: rank // per_node if nodes is None or len(self.stages) > 1 else nodes.node_of(rank)
            for ranks, nodes in known
            for rank in ranks
        }

    @property
    def seconds(self) -> float:
        """Seconds of the optimizer step."""
        return self.slowest.timeline.seconds

    @property
    def training_seconds(self) -> float:
        """Seconds of forward and backward between two steps."""
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

    @property
    def heaviest_over_mean(self) -> float:
        """Cost of the heaviest rank ÷ mean, in the stage where it is largest."""
        return max(_over_mean(list(stage.plan.loads.values())) for stage in self.stages)


def _over_mean(loads: list[float]) -> float:
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
