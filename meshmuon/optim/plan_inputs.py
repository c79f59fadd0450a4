"""What a plan must know of each parameter, from its param group's options and from plain facts about the parameter.

A step takes the facts from the parameter itself (``facts_of``). ``meshmuon.simulate`` writes them down for parameters that do not
exist. From there on, both take the same way to the same plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..agree.step_decision import PlanInput
from ..device import work_device
from ..execute import UpdateRule
from ..layout import Mesh
from ..matrices import MatrixOptions, find_matrices
from ..ortho import Orthogonalizer, Scheme, default_compute_dtype, resolve_scheme, scheme_for
from ..params.dtensors import as_dtensor
from ..params.groups import check_rule_memory, matrix_options_of
from ..params.named_params import NamedParam
from ..params.option_table import ParamGroup
from ..params.rules import resolve_rule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class GroupRecipe(NamedTuple):
    """How a param group treats all of its parameters. A group that AdamW steps sets only ``rounding``."""

    scheme: Scheme | Orthogonalizer | None = None
    rule: UpdateRule | None = None
    matrix_options: MatrixOptions | None = None
    compute_dtype: torch.dtype | None = None
    rounding: str = "nearest"


class ParamFacts(NamedTuple):
    """A parameter as plain data: what it is and where it lies."""

    name: str
    group_index: int
    shape: tuple[int, ...]  # of the whole parameter
    local_shape: tuple[int, ...]  # of this rank's shard
    mesh: DeviceMesh | Mesh | None  # None for a plain tensor
    placements: tuple[Any, ...]  # torch's, or ours
    dtype: torch.dtype
    device: torch.device  # of its local tensor
    work_device: torch.device  # where its matrices travel and are orthogonalised


def recipe_of(group: ParamGroup) -> GroupRecipe:
    """How the options of a param group treat its parameters."""
    if not group["use_muon"]:
        return GroupRecipe(rounding=group["rounding"])
    scheme, rule = resolve_scheme(group["scheme"], group["ns_steps"]), resolve_rule(group["rule"])
    return GroupRecipe(scheme, rule, matrix_options_of(group), group["compute_dtype"], group["rounding"])


def facts_of(named: NamedParam, *, has_matrices: bool) -> ParamFacts:
    """The facts about a parameter of a model. AdamW, which sees no matrices, works where the parameter is."""
    param = named.param
    sharded = as_dtensor(param)
    shape = tuple(param.shape)
    return ParamFacts(
        name=named.name,
        group_index=named.group_index,
        shape=shape,
        local_shape=shape if sharded is None else tuple(sharded.to_local().shape),
        mesh=None if sharded is None else sharded.device_mesh,
        placements=() if sharded is None else sharded.placements,
        dtype=param.dtype,
        device=param.device,
        work_device=work_device(param) if has_matrices else param.device,
    )


def plan_input_of(recipe: GroupRecipe, facts: ParamFacts, *, comm_dtype: torch.dtype | None) -> PlanInput:
    """What a plan must know of a parameter. ``comm_dtype`` is the user's option; None for the default."""
    scheme, rule, matrix_options, compute_dtype, _ = recipe
    works_on, dtype = facts.work_device, facts.dtype
    update_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    compute_dtype = dtype if matrix_options is None else compute_dtype or default_compute_dtype(works_on, dtype)
    matrix_sets = None if matrix_options is None else find_matrices(facts.name, facts.shape, matrix_options)
    check_rule_memory(facts.name, matrix_sets or (), rule)
    for part in matrix_sets or ():
        assert scheme is not None
        scheme_for(scheme, part.rows, part.cols, compute_dtype)  # refuses a scheme that rounding would break in this dtype
    return PlanInput(
        name=facts.name,
        group_index=facts.group_index,
        shape=facts.shape,
        local_shape=facts.local_shape,
        mesh=facts.mesh,
        placements=facts.placements,
        device=facts.device,
        work_device=works_on,
        matrix_sets=matrix_sets,
        scheme=scheme,
        rule=rule,
        compute_dtype=compute_dtype,
        comm_dtype=comm_dtype or default_comm_dtype(works_on, update_dtype),
        update_dtype=update_dtype,
    )


def default_comm_dtype(device: torch.device, update_dtype: torch.dtype) -> torch.dtype:
    """bfloat16 between GPUs, full precision elsewhere; float64 stays float64."""
    return torch.bfloat16 if device.type == "cuda" and update_dtype != torch.float64 else update_dtype
