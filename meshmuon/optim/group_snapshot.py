"""A param group as the last step found it. Comparing with it tells cheaply whether anything has changed since.

Whole lists are compared, in C instead of in a Python loop: a fraction of a microsecond per parameter.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
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
        self._metadata = self._metadata_of(self._params)
        self._grad_metadata_getters = [SHARD_GRADIENT_METADATA if has_local_part(p) else _GRADIENT_METADATA for p in self._params]
        self._grad_metadata: list[Any] = [None] * len(self._params)  # of the gradients accepted last; None before the first
        self._state_keys: list[list[str]] | None = None  # of the state that was accepted
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
            and self._metadata == self._metadata_of(params)
        )

    def same_gradients(self) -> bool:
        """Whether the gradients have the shapes, dtypes and layouts of those that were accepted."""
        metadata = self._metadata_of_gradients()
        if metadata == self._grad_metadata:
            return True
        pairs = zip(metadata or (), self._grad_metadata, strict=False)
        return metadata is not None and all(now is None or now == accepted for now, accepted in pairs)

    def accept_gradients(self) -> None:
        """Keeps the metadata of the present gradients, which the caller has checked."""
        pairs = zip(self._metadata_of_gradients() or self._grad_metadata, self._grad_metadata, strict=True)
        self._grad_metadata = [accepted if now is None else now for now, accepted in pairs]

    def same_state(self, states: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether the state consists of the very tensors that were accepted."""
        if self._state_keys is None:
            return False
        entries, tensors = self._state_of(states)
        return (
            self._state_keys == list(map(list, entries))
            and len(tensors) == len(self._state_tensors)
            and all(tensor is accepted() for tensor, accepted in zip(tensors, self._state_tensors, strict=True))
        )

    def accept_state(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Keeps the tensors of the present state, which the caller has checked."""
        entries, tensors = self._state_of(states)
        self._state_keys, self._state_tensors = list(map(list, entries)), list(map(weakref.ref, tensors))

    def invalidate_state(self) -> None:
        """Accepts no state until ``accept_state`` is called again."""
        self._state_keys, self._state_tensors = None, []

    def _state_of(self, states: Mapping[Tensor, dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Tensor]]:
        entries = [states.get(param, {}) for param in self._params]
        return entries, [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]

    def _metadata_of(self, params: Sequence[Tensor]) -> list[Any]:
        return [metadata(param) for metadata, param in zip(self._metadata_getters, params, strict=True)]

    def _metadata_of_gradients(self) -> list[Any] | None:
        """The metadata of each gradient, None for a missing one; None for all if a DTensor has a plain gradient."""
        grads = [param.grad for param in self._params]
        try:
            pairs = zip(self._grad_metadata_getters, grads, strict=True)
            return [None if grad is None else metadata(grad) for metadata, grad in pairs]
        except AttributeError:  # a plain tensor has no ``_spec``
            return None


def metadata_of(param: Tensor) -> Any:
    """Shape, dtype, device and layout of a parameter, to be compared with those of an earlier step."""
    return _metadata_getter(param)(param)


def _metadata_getter(param: Tensor) -> Callable[[Tensor], Any]:
    return SHARD_METADATA if has_local_part(param) else _METADATA
