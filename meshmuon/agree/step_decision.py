"""What a rank tells the others before a step, and what all ranks then decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..plan import Plan
from ..transport import Exchange

if TYPE_CHECKING:
    from .state_presence import StatePresence

__all__ = ["RankStatus", "StepDecision"]


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What all ranks have agreed to do.

    Attributes:
        plan: the plan. ``plan.params[i]``, ``members[i]`` and the executor's ``step_params[i]`` are about the same parameter.
        members: for each parameter of the plan, the index of its plan input and the index of its matrix set in ``matrix_sets``
            there. A fused QKV weight that is plan input 3 and is split in three has the members (3, 0), (3, 1), (3, 2).
        zeros: indices of the plan inputs whose gradient only other ranks have. This rank steps them with zeros.
        exchange: sends pieces between ranks; None on a single rank.
        rank: this rank.
        prepares: some rank must create new buffers; all ranks then confirm that they are ready.
        nonfinite: some rank has a gradient that must not be used; all ranks skip the step.
        has_work: some rank has more to do than create state.
        repeats: several ranks compute the same matrix, each for itself.
    """

    plan: Plan
    members: tuple[tuple[int, int], ...]
    zeros: frozenset[int]
    exchange: Exchange | None
    rank: int
    prepares: bool = False
    nonfinite: bool = False
    has_work: bool = True
    repeats: bool = False


class RankStatus(NamedTuple):
    """What a rank tells the others before a step, beside its plan inputs.

    Attributes:
        prepared_plan: the plan that it has buffers for.
        nonfinite: it has a gradient that must not be used.
        has_work: it has more to do than create state.
        hyperparameters: for each param group, its hyperparameters as text. Ranks that share its parameters must have the same.
        without_state: indices of the plan inputs whose state it would start at zero.
        presence: which state it has; read only where ranks differ.
    """

    prepared_plan: Plan | None
    nonfinite: bool
    has_work: bool
    hyperparameters: Sequence[str]
    without_state: Sequence[int]
    presence: StatePresence
