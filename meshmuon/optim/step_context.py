"""One call of ``step()``: what is found out about it, decided and needed on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..agree.plan_input import PlanInput
from ..agree.planner import StepDecision
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
        scaling: what a GradScaler has set.
        failure: this rank's first error, until the agreement raises it on all ranks.
        nonfinite: this rank has a gradient that must not be used, as far as the host knows.
        busy: this rank has more to do than create state.
        decision: what all ranks have agreed on.
        skip_mask: on a device, whether nothing may change; None where the host knows.
        diverged: an error now would leave replicas unequal.
    """

    params: list[NamedParam]
    plan_inputs: tuple[PlanInput, ...]
    qk_logits: Any
    scaling: Scaling = NO_SCALING
    failure: Exception | None = None
    nonfinite: bool = False
    busy: bool = True
    decision: StepDecision = field(init=False)
    skip_mask: Tensor | None = None
    diverged: bool = False
