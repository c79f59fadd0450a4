"""What was last seen of a group's parameters, kept so that one cheap look tells whether all of it is still so.

Lists are compared as wholes, which happens outside of Python's loops and takes a fraction of a microsecond per parameter.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..params.option_table import ParamGroup
from ..torch_compat import SHARD_FACTS, SHARD_GRADIENT_FACTS, has_local_part

__all__ = ["GroupSnapshot", "facts_of"]

_PLAIN_FACTS = operator.attrgetter("shape", "dtype", "device")
_PLAIN_GRADIENT = operator.attrgetter("__class__", "shape", "dtype", "layout")


class GroupSnapshot:
    """A group as a step found it: which parameters, how they lie, which have gradients, and what state they have.

    Args:
        group: the group.
        treatment: what the group says of its parameters; compared by identity.
    """

    def __init__(self, group: ParamGroup, recipe: object) -> None:
        self._group, self._recipe_of = group, recipe
        self._params: list[Tensor] = list(group["params"])
        self._names: list[str] = list(group["param_names"])
        self._facts = [_facts_getter(param) for param in self._params]
        self._were = self._facts_of(self._params)
        self._active = [param.grad is not None for param in self._params]
        self._stepped = [param for param in self._params if param.grad is not None]
        self._gradient_facts = [SHARD_GRADIENT_FACTS if has_local_part(p) else _PLAIN_GRADIENT for p in self._stepped]
        self._gradients: list[Any] | None = None  # facts of the gradients that were found to fit
        self._keys: list[list[str]] | None = None  # of the state that was found to fit
        self._values: list[weakref.ref[Tensor]] = []  # of the tensors in it, which must be free to go

    def still_holds(self, group: ParamGroup, recipe: object) -> bool:
        """Whether the group and its parameters are as they were."""
        params = group["params"]
        return (
            self._group is group
            and self._recipe_of is recipe
            and len(params) == len(self._params)
            and all(map(operator.is_, params, self._params))
            and self._names == group["param_names"]
            and self._were == self._facts_of(params)
            and self._active == [param.grad is not None for param in params]
        )

    def same_gradients(self) -> bool:
        """Whether gradients are like those that were accepted."""
        return self._gradients is not None and self._gradients == self._facts_of_gradients()

    def accept_gradients(self) -> None:
        """The gradients fit."""
        self._gradients = self._facts_of_gradients()

    def same_state(self, states: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether the state is the very one that was accepted."""
        if self._keys is None:
            return False
        entries, values = self._state(states)
        return (
            self._keys == list(map(list, entries))
            and len(values) == len(self._values)
            and all(value is known() for value, known in zip(values, self._values, strict=True))
        )

    def accept_state(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """The state fits."""
        entries, values = self._state(states)
        self._keys, self._values = list(map(list, entries)), list(map(weakref.ref, values))

    def _state(self, states: Mapping[Tensor, dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Tensor]]:
        entries = [states.get(param, {}) for param in self._stepped]
        return entries, [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]

    def forget_state(self) -> None:
        """Lets go of the state."""
        self._keys, self._values = None, []

    def _facts_of(self, params: Sequence[Tensor]) -> list[Any]:
        return [facts(param) for facts, param in zip(self._facts, params, strict=True)]

    def _facts_of_gradients(self) -> list[Any] | None:
        try:
            return [facts(param.grad) for facts, param in zip(self._gradient_facts, self._stepped, strict=True)]
        except AttributeError:  # a plain gradient of a DTensor
            return None


def facts_of(param: Tensor) -> Any:
    """Shape, dtype, device and layout of a parameter, to be compared with those of an earlier step."""
    return _facts_getter(param)(param)


def _facts_getter(param: Tensor) -> Callable[[Tensor], Any]:
    return SHARD_FACTS if has_local_part(param) else _PLAIN_FACTS
