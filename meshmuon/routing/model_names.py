"""The names of a model's parameters, with a way back to the model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn


class ModelNames(list[str]):
    """A list of names that knows the model they are from, and does not keep it alive.

    A list rather than a key of its own: trainers pass param groups on as plain dicts, and checkpoints store all of their keys. A
    pickle of it is a plain list.
    """

    def __init__(self, model: nn.Module, names: Iterable[str] = ()) -> None:
        super().__init__(names)
        self.model = weakref.ref(model)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)
