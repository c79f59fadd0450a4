"""Telling autograd which weights a step has overwritten."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor

from ..params.dtensors import as_dtensor
from ..params.named_params import NamedParam
from ..torch_compat import FSDP2Weights, mark_overwritten


class Overwritten:
    """Marks the DTensors that steps write through their local tensors, which autograd does not notice.

    If a backward pass has saved such a weight, or needs FSDP2 to gather it again, it then raises, as it does for a plain tensor.
    Plain tensors need no mark, since in-place operations mark them.
    """

    def __init__(self) -> None:
        self._params: Sequence[NamedParam] = ()
        self._shards: list[tuple[int, Tensor]] = []  # those of ``_params`` that are DTensors, with their indices
        self._all_gathered = self._gathered = FSDP2Weights(())  # of these, and of ``_weights``
        # The other arguments that the weights were derived from. Like ``_params`` they are compared by identity: the collector,
        # the planner and QK-clip hand out the same objects while nothing changes.
        self._flags: tuple[object, ...] = ()
        self._weights: list[Tensor] = []

    def mark(
        self,
        params: Sequence[NamedParam],
        has_grad: Sequence[bool],
        zeros: AbstractSet[int],
        clipped: AbstractSet[int],
    ) -> None:
        """Marks the weights that a step has written: those that had a gradient, and those with an index in one of the two sets.

        ``zeros`` are parameters that were stepped although this rank has no gradient of them, ``clipped`` those of scaled heads.
        """
        if params is not self._params:
            shards = ((k, as_dtensor(named.param)) for k, named in enumerate(params))
            self._shards = [(k, shard) for k, shard in shards if shard is not None and not shard.is_inference()]
            self._all_gathered = FSDP2Weights([shard for _, shard in self._shards])
            self._params, self._flags = params, ()
        flags = (has_grad, zeros, clipped)
        if len(self._flags) != len(flags) or any(map(operator.is_not, self._flags, flags)):
            self._weights = [shard for k, shard in self._shards if has_grad[k] or k in zeros or k in clipped]
            self._gathered = self._all_gathered.only(self._weights)
            self._flags = flags
        if self._weights:
            mark_overwritten([*self._weights, *self._gathered.gathered_again()])
