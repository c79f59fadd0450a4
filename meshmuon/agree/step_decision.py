"""What a rank knows and tells the others before a step, and what all ranks then decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..execute import UpdateRule
from ..layout import Mesh
from ..matrices import MatrixSet
from ..ortho import Orthogonalizer, Scheme
from ..plan import Plan
from ..transport import Exchange

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .state_presence import StatePresence


class Activity(IntEnum):
    """How much Muon has to do in a step, on a rank or on all of them; the largest of all ranks counts."""

    NO_MATRIX = 0  # no param group has a matrix for Muon
    FROZEN = 1  # there are matrices, but none requires a gradient
    NO_GRADIENT = 2  # there are matrices to train, but none has a gradient
    ACTIVE = 3  # a matrix has a gradient, or once had one


class PlanInput(NamedTuple):
    """What a plan must know about a parameter. Whether it has a gradient, which changes between steps, is in ``RankStatus``."""

    name: str
    group_index: int
    shape: tuple[int, ...]  # of the whole parameter
    local_shape: tuple[int, ...]  # of this rank's shard
    mesh: DeviceMesh | Mesh | None  # None for a plain tensor; a ``Mesh`` if the parameter is simulated
    placements: tuple[Any, ...]  # torch's, or ours if the parameter is simulated
    device: torch.device  # of its local tensor
    work_device: torch.device  # where its matrices travel and are orthogonalised
    matrix_sets: tuple[MatrixSet, ...] | None  # one set per part of a fused weight; None if AdamW steps the parameter
    scheme: Scheme | Orthogonalizer | None
    rule: UpdateRule | None  # None for plain Muon
    compute_dtype: torch.dtype  # of the products
    comm_dtype: torch.dtype  # on the wire
    update_dtype: torch.dtype  # in which the update is formed


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What all ranks have agreed to do."""

    plan: Plan  # ``plan.params[i]``, ``planned_parts[i]`` and the executor's ``step_params[i]`` are about the same parameter
    # For each parameter of the plan, the indices of its plan input and of its matrix set in ``matrix_sets`` there. A fused QKV
    # weight that is plan input 3 and is split in three has the entries (3, 0), (3, 1), (3, 2).
    planned_parts: tuple[tuple[int, int], ...]
    exchange: Exchange | None  # None on a single rank
    rank: int
    zeros: frozenset[int] = frozenset()  # indices of the plan inputs whose gradient only other ranks have: stepped with zeros
    idle: frozenset[int] = frozenset()  # indices in ``plan.params`` of those for which no rank has a gradient: not stepped
    prepares: bool = False  # some rank must create new buffers; all ranks then confirm that they are ready
    nonfinite: bool = False  # some rank has a gradient that must not be used; all ranks skip the step
    has_work: bool = True  # some rank has more to do than create state
    activity: Activity = Activity.ACTIVE
    repeats: bool = False  # some matrix is computed by several ranks, by each for itself


class RankStatus(NamedTuple):
    """What a rank tells the others before a step, beside its plan inputs."""

    has_grad: tuple[bool, ...]  # for each plan input, whether it has a gradient; the same object for as long as they are equal
    prepared_plan: Plan | None  # the plan that it has buffers for
    nonfinite: bool  # it has a gradient that must not be used
    has_work: bool  # it has more to do than create state
    activity: Activity
    # Returns those of each param group, as text; ranks that share its parameters must have the same. A single rank never asks.
    hyperparameters: Callable[[], Sequence[str]]
    without_state: Sequence[int]  # indices of the plan inputs whose state it would start at zero
    presence: StatePresence  # which state it has; read only where ranks differ
