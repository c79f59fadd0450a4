"""The data of one call of ``step()``, which its phases share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..agree.step_decision import PlanInput, StepDecision
from ..params.named_params import NamedParam
from .nonfinite import NO_SCALING, Scaling

__all__ = ["StepContext"]


@dataclass(slots=True)
class StepContext:
    """What the phases of a step (inspect, agree, prepare, run, finish) hand to each other.

    Attributes:
        params: all parameters, param group by param group.
        plan_inputs: what the planner must know about each of them, in the same order.
        qk_logits: the logits given to ``step()``.
        scaling: what a GradScaler has told the optimizer.
        failure: this rank's first error, until the agreement raises it on all ranks.
        nonfinite: the host knows that this rank has a gradient that must not be used.
        has_work: this rank has more to do than create state.
        decision: what all ranks have agreed on.
        skip_mask: a boolean on a device, true if nothing may change; None if the host knows.
        would_diverge: an error at this point would make replicas diverge.
    """

    params: list[NamedParam]
    plan_inputs: tuple[PlanInput, ...]
    qk_logits: Any
    scaling: Scaling = NO_SCALING
    failure: Exception | None = None
    nonfinite: bool = False
    has_work: bool = True
    decision: StepDecision = field(init=False)
    skip_mask: Tensor | None = None
    would_diverge: bool = False
