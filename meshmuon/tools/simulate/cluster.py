"""The plan that the ranks of a cluster would make, by the code with which they make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import torch

from ...agree.local_planner import LocalPlanner, PlanSettings, Topology, slices_by_mesh
from ...execute import DEFAULT_MEMORY_BUDGET
from ...layout import Layout, Mesh, Placement
from ...matrices import MatrixOptions, check_matrices
from ...ortho import SchemeLike, resolve_scheme
from ...params.option_table import ParamGroup
from ...params.param_record import GroupRecipe, ParamLocation, ParamRecord
from ...plan import DEFAULT_MAX_PEERS, CostModel, Nodes, Plan, PlanOptions, cost_model_for
from .description import ModelDescription
from .sharding import PlacedParam, Sharding


@dataclass(frozen=True, slots=True)
class MuonOptions:
    """The options of ``Muon`` that shape a plan, with their defaults, and the dtype of the weights."""

    replicas: str = "auto"
    comm_dtype: torch.dtype | None = None
    scheme: SchemeLike = "auto"
    ns_steps: int = 5
    memory_budget: int = DEFAULT_MEMORY_BUDGET
    chunk_size: int = -1
    waves_ahead: int = 5
    form: str = "auto"
    param_dtype: torch.dtype = torch.float32
    momentum_dtype: torch.dtype | None = None
    cost_model: CostModel | None = None
    max_peers: int = DEFAULT_MAX_PEERS


@dataclass(frozen=True)
class StagePlan:
    """The plan of one pipeline stage; all of it if there are no stages."""

    plan: Plan
    placed: tuple[PlacedParam, ...]  # all parameters, those of AdamW as well
    layouts: tuple[Layout, ...]  # of these parameters
    planned: tuple[int, ...]  # for each parameter of the plan, its index in ``placed``

    @property
    def compute_dtype(self) -> str:
        """Of the products; empty if there are none."""
        return self.plan.params[0].compute_dtype if self.plan.params else ""


def plan_cluster(
    model: ModelDescription, sharding: Sharding, options: MuonOptions, device_type: str, ranks_per_node: int | None = None
) -> list[StagePlan]:
    """The plan of every stage. ``ranks_per_node`` None: all ranks share one node."""
    return [_plan_stage(placed, options, device_type, ranks_per_node) for placed in sharding.stages(model)]


def _plan_stage(placed: Sequence[PlacedParam], options: MuonOptions, device_type: str, ranks_per_node: int | None) -> StagePlan:
    device = torch.device(device_type)
    matrices = {item.param.name: item.param.matrices for item in placed if item.param.matrices is not None}
    entries = check_matrices({name: entry.fields() for name, entry in matrices.items()})
    muon = GroupRecipe(scheme=resolve_scheme(options.scheme, options.ns_steps), matrix_options=MatrixOptions(matrices=entries))
    # As in an optimizer with the default param groups: Muon's parameters first, then AdamW's.
    order = sorted(range(len(placed)), key=lambda k: (not placed[k].param.use_muon, k))
    rank = min(rank for mesh in {item.mesh for item in placed} for rank in mesh.ranks)
    records = []
    for k in order:
        item, recipe = placed[k], muon if placed[k].param.use_muon else GroupRecipe()
        param = torch.empty(item.param.shape, dtype=options.param_dtype, device="meta")
        local_shape = _local_shape(item.param.shape, item.mesh, item.placements, rank)
        place = ParamLocation(local_shape, item.mesh, item.placements, device, device)
        group = cast(ParamGroup, {})  # plans read the recipe, not the group
        group_index = 0 if item.param.use_muon else 1
        records.append(ParamRecord.of(item.param.name, param, group_index, group, recipe, options.comm_dtype, place))
    plan_options = PlanOptions(
        cost_model_for(device_type),
        options.replicas,
        options.chunk_size,
        options.memory_budget,
        options.waves_ahead + 1,
        max_peers=options.max_peers,
    )
    settings = PlanSettings(plan_options, options.form, "reference_path=False", options.cost_model)
    topology = Topology.around(rank, slices_by_mesh(records), None)
    if ranks_per_node is not None:
        topology = replace(topology, nodes=Nodes.of({rank: rank // ranks_per_node for rank in topology.ranks}))
    planner = LocalPlanner(tuple(records), settings, topology)
    decision = planner.plan(frozenset(range(len(records))))
    # A plan without matrices has no ranks, but they are there: a stage may hold embeddings alone.
    plan = decision.plan if decision.plan.ranks else replace(decision.plan, ranks=topology.ranks)
    return StagePlan(
        plan=plan,
        placed=tuple(placed[k] for k in order),
        layouts=tuple(layouts[0] for layouts in planner.layouts),
        planned=tuple(index for index, _ in decision.planned_parts),
    )


@lru_cache(maxsize=4096)
def _local_shape(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...], rank: int) -> tuple[int, ...]:
    return Layout(shape, mesh, placements).local_shape(rank)
