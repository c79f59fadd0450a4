"""What ranks send each other, as JSON: unlike a pickle, reading a message runs no code.

Beyond JSON there are tuples, dicts with any keys, and the few classes that are marked ``sendable``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")
_classes: dict[str, type] = {}


def sendable(cls: type[_T]) -> type[_T]:
    """Lets ranks send each other instances of ``cls``, a NamedTuple or a dataclass whose fields can be sent."""
    _classes[cls.__name__] = cls
    return cls


def to_bytes(values: Sequence[Any]) -> bytes:
    """``values`` as a message."""
    return json.dumps([_encoded(value) for value in values], separators=(",", ":")).encode()


def from_bytes(message: bytes | memoryview) -> list[Any]:
    """The inverse of ``to_bytes``; raises ``ValueError`` for anything else."""
    try:
        return [_decoded(value) for value in json.loads(bytes(message))]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a message of this version of meshmuon: {error}") from error


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    kind: Any = type(value)
    name = kind.__name__
    if isinstance(value, dict):
        return ["dict", *([_encoded(key), _encoded(part)] for key, part in value.items())]
    if kind in (list, tuple):
        return [name, *map(_encoded, value)]
    if _classes.get(name) != kind:
        raise TypeError(f"ranks do not send each other objects of {kind}")
    if not isinstance(value, tuple):
        value = [getattr(value, field.name) for field in dataclasses.fields(kind) if field.init]
    return [name, *map(_encoded, value)]


def _decoded(data: Any) -> Any:
    if not isinstance(data, list):
        return data
    name, *parts = data
    if name == "dict":
        return {_decoded(key): _decoded(part) for key, part in parts}
    values = [_decoded(part) for part in parts]
    return values if name == "list" else tuple(values) if name == "tuple" else _classes[name](*values)
