"""A cluster, planned and timed: everything from which a report is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..plan import ExchangeBytes, Plan, Prediction, Timeline
from .cluster import MuonOptions, StagePlan, plan_cluster
from .description import ModelDescription
from .job_rates import predict_stage
from .machines import Machine
from .memory import StageMemory, stage_memory
from .sharding import Sharding

_FLOPS_PER_PARAMETER = 6  # of forward and backward, per token


@dataclass(frozen=True)
class Workload:
    """What is trained between two optimizer steps."""

    tokens_per_step: int
    mfu: float  # share of the machine's peak that forward and backward reach


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its plan and what follows from it."""

    planned: StagePlan
    prediction: Prediction
    memory: StageMemory

    @property
    def timeline(self) -> Timeline:
        """When every rank does what."""
        return self.prediction.timeline

    @property
    def exchanges(self) -> list[ExchangeBytes]:
        """The gather and the scatter of every wave."""
        return [exchange for wave in self.planned.plan.traffic for exchange in (wave.gather, wave.scatter)]


@dataclass(frozen=True)
class Simulation:
    """All stages of a model on a cluster."""

    model: ModelDescription
    sharding: Sharding
    machine: Machine
    options: MuonOptions
    workload: Workload
    stages: tuple[Stage, ...]

    @classmethod
    def run(
        cls, model: ModelDescription, sharding: Sharding, machine: Machine, options: MuonOptions, workload: Workload
    ) -> Simulation:
        """Plans and times every stage."""
        planned = plan_cluster(model, sharding, options, machine.device, machine.ranks_per_node)
        return cls.of_plans(planned, model, sharding, machine, options, workload)

    @classmethod
    def of_plans(
        cls,
        planned_stages: Sequence[StagePlan],
        model: ModelDescription,
        sharding: Sharding,
        machine: Machine,
        options: MuonOptions,
        workload: Workload,
    ) -> Simulation:
        """Times the stages of plans that exist."""
        stages = []
        for planned in planned_stages:
            prediction = predict_stage(planned, machine, options)
            stages.append(Stage(planned, prediction, stage_memory(planned, machine, options)))
        return cls(model, sharding, machine, options, workload, tuple(stages))

    @cached_property
    def slowest(self) -> Stage:
        """The stage whose step takes longest."""
        return max(self.stages, key=lambda stage: stage.timeline.seconds)

    @cached_property
    def node_of(self) -> dict[int, int]:
        """Rank → number of its node."""
        known = [(stage.planned.plan.ranks, stage.planned.plan.options.nodes) for stage in self.stages]
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

    @property
    def most_memory(self) -> int:
        """Bytes of the rank that needs most."""
        return max(int(stage.memory.total.max()) for stage in self.stages)

    @property
    def most_buffers(self) -> int:
        """Bytes of exchange buffers of the rank that has most."""
        return max(int(stage.memory.exchange_buffers.max()) for stage in self.stages)

    @property
    def most_peers(self) -> int:
        """The most ranks that a rank has to do with in one exchange."""
        exchanges = (exchange for stage in self.stages for wave in stage.planned.plan.peers for exchange in wave)
        return max((max(exchange.peers, default=0) for exchange in exchanges), default=0)

    def most_sent(self, *, between: bool) -> int:
        """Bytes that the rank sends that sends most, in all or between nodes."""
        return max(max(sent_bytes(stage.planned.plan, between=between)) for stage in self.stages)

    @property
    def heaviest_over_mean(self) -> float:
        """Cost of the heaviest rank ÷ mean, in the stage where it is largest."""
        return max(_over_mean(list(stage.planned.plan.loads.values())) for stage in self.stages)


def sent_bytes(plan: Plan, *, between: bool) -> list[int]:
    """By rank: bytes that it sends in a step, in all or between nodes."""
    return list((plan.bytes_between if between else plan.bytes_sent).values())


def _over_mean(loads: list[float]) -> float:
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
