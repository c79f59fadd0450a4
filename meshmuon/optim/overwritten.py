"""Telling autograd which weights a step has overwritten."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor

from ..agree.step_decision import PlanInput
from ..params.dtensors import as_dtensor
from ..params.named_params import NamedParam
from ..torch_compat import FSDP2Weights, mark_overwritten


class Overwritten:
    """Marks the DTensors that steps write through their local tensors, which autograd does not notice.

    If a backward pass has saved such a weight, or needs FSDP2 to gather it again, it then raises, as it does for a plain tensor.
    Plain tensors need no mark, since in-place operations mark them.
    """

    def __init__(self) -> None:
        self._marked: tuple[object, ...] = ()  # the arguments that the weights were derived from
        self._weights: list[Tensor] = []
        self._gathered = FSDP2Weights(())

    def mark(
        self,
        params: Sequence[NamedParam],
        plan_inputs: Sequence[PlanInput],
        zeros: AbstractSet[int],
        clipped: AbstractSet[int],
    ) -> None:
        """Marks the weights that a step has written: those with a gradient, and those with an index in one of the two sets.

        ``zeros`` are parameters that were stepped although this rank has no gradient of them, ``clipped`` those of scaled heads.
        """
        arguments = (params, plan_inputs, zeros, clipped)
        if len(self._marked) != len(arguments) or any(map(operator.is_not, self._marked, arguments)):
            written = [k for k, plan_input in enumerate(plan_inputs) if plan_input.has_grad or k in zeros or k in clipped]
            shards = (as_dtensor(params[k].param) for k in written)
            self._weights = [shard for shard in shards if shard is not None and not shard.is_inference()]
            self._gathered = FSDP2Weights(self._weights)
            self._marked = arguments
        if self._weights:
            mark_overwritten([*self._weights, *self._gathered.gathered_again()])
