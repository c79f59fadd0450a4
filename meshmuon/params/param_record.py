"""The one record of a parameter: what it is, where it lies, which matrices it holds and how they are computed.

A step makes it when it first sees a parameter and replaces it when something about the parameter changes. The planner,
the executor's ``StepParam``, QK-clip and the metrics all read it. ``meshmuon plan`` makes records of parameters that do
not exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NewType

import torch
from torch import Tensor

from ..device import work_device
from ..execute import CommDtype, CommDtypeLike, UpdateRule
from ..layout import Mesh
from ..matrices import MatrixOptions, MatrixSet, find_matrices
from ..ortho import Orthogonalizer, Scheme, default_compute_dtype, resolve_scheme, scheme_for
from .dtensors import as_dtensor
from .groups import check_rule_memory, matrix_options_of
from .option_table import ParamGroup
from .rules import resolve_rules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ParamIndex = NewType("ParamIndex", int)
"""Counts the parameters of an optimizer, param group by param group: ``records[index]``."""


class GroupRecipe(NamedTuple):
    """How a param group treats all of its parameters. A group that AdamW steps sets only ``rounding``."""

    scheme: Scheme | Orthogonalizer | None = None
    rules: tuple[UpdateRule, ...] = ()
    matrix_options: MatrixOptions | None = None
    compute_dtype: torch.dtype | None = None
    rounding: str = "nearest"

    @classmethod
    def of(cls, group: ParamGroup) -> GroupRecipe:
        """How the options of a param group treat its parameters."""
        if not group["use_muon"]:
            return cls(rounding=group["rounding"])
        scheme, rules = resolve_scheme(group["scheme"], group["ns_steps"]), resolve_rules(group["rule"])
        return cls(scheme, rules, matrix_options_of(group), group["compute_dtype"], group["rounding"])


class ParamLocation(NamedTuple):
    """Where a parameter lies: the first fields of its record."""

    local_shape: tuple[int, ...]
    mesh: DeviceMesh | Mesh | None
    placements: tuple[Any, ...]
    device: torch.device
    work_device: torch.device

    @classmethod
    def of(cls, param: Tensor, recipe: GroupRecipe) -> ParamLocation:
        """Where a parameter of a model lies. AdamW, which sees no matrices, works where the parameter is."""
        device, dtensor = param.device, as_dtensor(param)
        works_on = device if recipe.matrix_options is None else work_device(param)
        if dtensor is None:
            return cls(tuple(param.shape), None, (), device, works_on)
        return cls(tuple(dtensor.to_local().shape), dtensor.device_mesh, dtensor.placements, device, works_on)


@dataclass(frozen=True, slots=True)
class ParamRecord:
    """A parameter. Two records are equal if no plan can tell them apart: the tensor and its param group may differ.

    Whether it has a gradient changes between steps and is not part of the record.
    """

    name: str
    group_index: int  # of its param group, in ``optimizer.param_groups``
    param_group: ParamGroup = field(compare=False, repr=False)
    param: Tensor = field(compare=False, repr=False)  # plain or DTensor; a meta tensor if the parameter is simulated
    shape: tuple[int, ...]  # of the whole parameter
    local_shape: tuple[int, ...]  # of this rank's shard
    mesh: DeviceMesh | Mesh | None  # None for a plain tensor; a ``Mesh`` if the parameter is simulated
    placements: tuple[Any, ...]  # torch's, or ours if the parameter is simulated
    device: torch.device  # of its local tensor
    work_device: torch.device  # where its matrices travel and are orthogonalised
    matrix_sets: tuple[MatrixSet, ...] | None  # one set per part of a fused weight; None if AdamW steps the parameter
    scheme: Scheme | Orthogonalizer | None
    rules: tuple[UpdateRule, ...]  # in the order in which they are applied; none for plain Muon
    compute_dtype: torch.dtype | None  # of the products; None for the default, which ``compute_dtype_of`` tells
    comm_dtype: CommDtype  # on the wire
    update_dtype: torch.dtype  # in which the update is formed

    @classmethod
    def of(
        cls,
        name: str,
        param: Tensor,
        group_index: int,
        group: ParamGroup,
        recipe: GroupRecipe,
        comm_dtype: CommDtypeLike = None,
        place: ParamLocation | None = None,
    ) -> ParamRecord:
        """The record of a parameter. Raises ConfigError if the recipe does not fit it.

        ``comm_dtype`` is the user's option, None for the default; ``place`` is where a simulated parameter lies.
        """
        place = place or ParamLocation.of(param, recipe)
        shape, dtype, options = tuple(param.shape), param.dtype, recipe.matrix_options
        update_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        matrix_sets = None if options is None else find_matrices(name, shape, options)
        check_rule_memory(name, matrix_sets or (), recipe.rules)
        between_gpus = place.work_device.type == "cuda" and update_dtype != torch.float64
        on_wire = CommDtype.of(comm_dtype, torch.bfloat16 if between_gpus else update_dtype)
        compute_dtype = dtype if options is None else recipe.compute_dtype
        how = recipe.scheme, recipe.rules, compute_dtype, on_wire, update_dtype
        record = cls(name, group_index, group, param, shape, *place, matrix_sets, *how)
        for part in matrix_sets or ():
            assert recipe.scheme is not None
            # refuses one that rounding would break
            scheme_for(recipe.scheme, part.rows, part.cols, record.compute_dtype_of(part))
        return record

    def compute_dtype_of(self, matrices: MatrixSet | None = None) -> torch.dtype:
        """The dtype of the products of some of its matrices: the option of the param group or, by their shape, the
        default.
        """
        if self.compute_dtype is not None:
            return self.compute_dtype
        assert matrices is not None
        assert self.scheme is not None
        return default_compute_dtype(
            self.work_device, self.update_dtype, self.scheme, min(matrices.rows, matrices.cols)
        )


def named_params(groups: Sequence[ParamGroup]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of all parameters, param group by param group."""
    for group in groups:
        yield from zip(group["param_names"], group["params"], strict=True)
