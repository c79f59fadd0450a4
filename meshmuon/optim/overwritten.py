"""Autograd hears of the weights that a step has overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor

from ..agree.plan_input import PlanInput
from ..params.dtensors import as_dtensor
from ..params.named_params import NamedParam
from ..torch_compat import FSDP2Weights, mark_overwritten

__all__ = ["Overwritten"]


class Overwritten:
    """Marks the DTensors that steps write through their local tensors, which autograd does not see.

    A backward pass that has saved such a weight, or that FSDP2 would gather the changed one for, then raises as it does for a
    plain tensor. Plain tensors need no mark: operations in place leave one.
    """

    def __init__(self) -> None:
        self._known: tuple[object, ...] = ()
        self._weights: list[Tensor] = []
        self._gathered = FSDP2Weights(())

    def mark(
        self,
        parameters: Sequence[NamedParam],
        plan_inputs: Sequence[PlanInput],
        zeros: AbstractSet[int],
        clipped: AbstractSet[int],
    ) -> None:
        """A step on ``plan_inputs`` was made.

        Args:
            parameters: all parameters of the optimizer.
            demands: what was asked for, one per parameter.
            zeros: places of those that were stepped although this rank has no gradient of them.
            clipped: places of those whose heads were scaled.
        """
        known = (parameters, plan_inputs, zeros, clipped)
        if len(self._known) != len(known) or any(one is not other for one, other in zip(self._known, known, strict=True)):
            written = [k for k, plan_input in enumerate(plan_inputs) if plan_input.has_grad or k in zeros or k in clipped]
            shards = (as_dtensor(parameters[k].param) for k in written)
            self._weights = [shard for shard in shards if shard is not None and not shard.is_inference()]
            self._gathered = FSDP2Weights(self._weights)
            self._known = known
        if self._weights:
            mark_overwritten([*self._weights, *self._gathered.gathered_again()])
