"""A param group as the last step found it. Comparing with it tells cheaply whether anything has changed since.

A comparison takes a fraction of a microsecond per parameter. The metadata of each parameter are read, compared and dropped before
those of the next one: lists of a hundred thousand tuples would trigger Python's garbage collector, which takes as long as the
rest of the step.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..params.option_table import ParamGroup
from ..torch_compat import SHARD_GRADIENT_METADATA, SHARD_METADATA, has_local_part

_METADATA = operator.attrgetter("shape", "dtype", "device")
_GRADIENT_METADATA = operator.attrgetter("__class__", "shape", "dtype", "layout")


class GroupSnapshot:
    """Which parameters a param group had, their shapes, dtypes and layouts, those of their gradients, and which state they had.

    ``recipe`` says how the group treats its parameters. It is compared by identity. The metadata of a gradient (class, shape,
    dtype, layout) are kept while the gradient is missing, and compared when there is one again.
    """

    def __init__(self, group: ParamGroup, recipe: object) -> None:
        self._group, self._recipe = group, recipe
        self._params: list[Tensor] = list(group["params"])
        self._names: list[str] = list(group["param_names"])
        self._metadata_getters = [_metadata_getter(param) for param in self._params]
        self._metadata = list(self._metadata_of(self._params))
        self._grad_metadata_getters = [SHARD_GRADIENT_METADATA if has_local_part(p) else _GRADIENT_METADATA for p in self._params]
        self._grad_metadata: list[Any] = [None] * len(self._params)  # of the gradients that were accepted last; None for none yet
        self._state_keys: list[tuple[str, ...]] | None = None  # of the state that was accepted
        self._state_tensors: list[weakref.ref[Tensor]] = []  # its tensors, which the snapshot must not keep alive

    def still_holds(self, group: ParamGroup, recipe: object) -> bool:
        """Whether the group and its parameters are as they were."""
        params = group["params"]
        return (
            self._group is group
            and self._recipe is recipe
            and len(params) == len(self._params)
            and all(map(operator.is_, params, self._params))
            and self._names == group["param_names"]
            and all(map(operator.eq, self._metadata_of(params), self._metadata))
        )

    def same_gradients(self) -> bool:
        """Whether the gradients have the shapes, dtypes and layouts of those that were accepted."""
        try:
            pairs = zip(self._metadata_of_gradients(), self._grad_metadata, strict=True)
            return all(now is None or now == accepted for now, accepted in pairs)
        except AttributeError:  # a plain gradient of a DTensor
            return False

    def accept_gradients(self) -> None:
        """Keeps the metadata of the present gradients, which the caller has checked."""
        try:
            pairs = zip(self._metadata_of_gradients(), self._grad_metadata, strict=True)
            self._grad_metadata = [accepted if now is None else now for now, accepted in pairs]
        except AttributeError:
            pass  # a plain gradient of a DTensor has none that could be accepted

    def same_state(self, states: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether the state consists of the very tensors that were accepted."""
        if self._state_keys is None:
            return False
        entries, tensors = self._state_of(states)
        return (
            all(map(operator.eq, map(tuple, entries), self._state_keys))
            and len(tensors) == len(self._state_tensors)
            and all(tensor is accepted() for tensor, accepted in zip(tensors, self._state_tensors, strict=True))
        )

    def accept_state(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Keeps the tensors of the present state, which the caller has checked."""
        entries, tensors = self._state_of(states)
        self._state_keys, self._state_tensors = list(map(tuple, entries)), list(map(weakref.ref, tensors))

    def invalidate_state(self) -> None:
        """Accepts no state until ``accept_state`` is called again."""
        self._state_keys, self._state_tensors = None, []

    def _state_of(self, states: Mapping[Tensor, dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Tensor]]:
        entries = [states.get(param, {}) for param in self._params]
        return entries, [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]

    def _metadata_of(self, params: Sequence[Tensor]) -> Iterator[Any]:
        return (metadata(param) for metadata, param in zip(self._metadata_getters, params, strict=True))

    def _metadata_of_gradients(self) -> Iterator[Any]:
        """None in the place of a missing gradient; an ``AttributeError`` for a plain gradient of a DTensor."""
        grads = (param.grad for param in self._params)
        return (
            None if grad is None else metadata(grad) for metadata, grad in zip(self._grad_metadata_getters, grads, strict=True)
        )


def metadata_of(param: Tensor) -> Any:
    """Shape, dtype, device and layout of a parameter, to be compared with those of an earlier step."""
    return _metadata_getter(param)(param)


def _metadata_getter(param: Tensor) -> Callable[[Tensor], Any]:
    return SHARD_METADATA if has_local_part(param) else _METADATA
