"""What a rank knows and tells the others before a step, and what all ranks then decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from ..errors import KeptError
from ..params.param_record import ParamIndex, ParamRecord
from ..plan import PartIndex, Plan
from ..transport import Exchange

if TYPE_CHECKING:
    from .state_presence import StatePresence


class Activity(IntEnum):
    """How much Muon has to do in a step, on a rank or on all of them; the largest of all ranks counts."""

    NO_MATRIX = 0  # no param group has a matrix for Muon
    ALL_FROZEN = 1  # default param groups have matrices, but none requires a gradient
    FROZEN = 2  # the same in param groups by hand, where the user has put them
    NO_GRADIENT = 3  # there are matrices to train, but none has a gradient
    MAIN_GRAD = 4  # the same, but one has a ``main_grad``, where Megatron's wrapper puts gradients
    ACTIVE = 5  # a matrix has a gradient, or once had one


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What all ranks have agreed to do."""

    # ``plan.params[i]``, ``planned_parts[i]`` and the executor's ``step_params[i]`` are about the same parameter
    plan: Plan
    # For each part of the plan, its parameter and which of that one's ``matrix_sets`` it is. A fused QKV weight that is
    # parameter 3 and is split in three has the entries (3, 0), (3, 1), (3, 2).
    planned_parts: tuple[tuple[ParamIndex, int], ...]
    exchange: Exchange | None  # None on a single rank
    rank: int
    zeros: frozenset[ParamIndex] = frozenset()  # parameters whose gradient only other ranks have: stepped with zeros
    idle: frozenset[PartIndex] = frozenset()  # parts for which no rank has a gradient: not stepped
    prepares: bool = False  # some rank must create new buffers; all ranks then confirm that they are ready
    nonfinite: bool = False  # some rank has a gradient that must not be used; all ranks skip the step
    has_work: bool = True  # some rank has more to do than create state
    activity: Activity = Activity.ACTIVE
    repeats: bool = False  # several ranks compute the same matrix, each on its own


class RankStatus(NamedTuple):
    """What a rank brings to a step, and tells the others."""

    records: tuple[ParamRecord, ...]  # all parameters but those that are frozen and were never stepped
    failure: KeptError  # what keeps it from stepping, if anything; all ranks then raise it
    # for each parameter, whether it has a gradient; the same object for as long as they are equal
    has_grad: tuple[bool, ...]
    prepared_plan: Plan | None  # the plan that it has buffers for
    nonfinite: bool  # it has a gradient that must not be used
    has_work: bool  # it has more to do than create state
    activity: Activity
    # Returns those of each param group, as text; ranks that share its parameters must have the same. A single rank
    # never asks.
    hyperparameters: Callable[[], Sequence[str]]
    without_state: Sequence[ParamIndex]  # parameters whose state it would start at zero
    presence: StatePresence  # which state it has; read only where ranks differ
