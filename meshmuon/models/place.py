"""Where a parameter is in a model, and the sizes that the modules around it and their configs tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..matrices import WRAPPERS
from .names import is_number

_INSERTED = WRAPPERS | {"base_layer"}  # PEFT keeps the layer that it adapts under this name

QUANTITIES: Mapping[str, str] = {
    "heads": "num_heads num_attention_heads n_heads n_head heads num_head",
    "kv_heads": "num_key_value_heads num_kv_heads n_kv_heads kv_heads kv_n_heads n_query_groups num_query_groups",
    "head_dim": "head_dim head_size attention_head_size dim_head attention_head_dim",
    "ff": "ffn_hidden_size intermediate_size",
}
"""What a table calls a size, and what libraries call it. Any other name in a table is that of an attribute."""


@dataclass(frozen=True)
class ParamPlace:
    """A parameter, its name, and the modules around it.

    ``parts`` and ``modules`` do without wrappers: of ``layers.0._checkpoint_wrapped_module.up.weight`` the parts are
    ``layers``, ``0``, ``up``, ``weight``, and the modules are the model, its ``layers``, the block and ``up``.
    """

    name: str
    param: Tensor
    parts: tuple[str, ...]
    modules: tuple[nn.Module, ...]

    @property
    def module(self) -> nn.Module:
        return self.modules[-1]

    @property
    def label(self) -> str:
        """The name by which the weight is known: that of its module for ``weight``, else that of the parameter."""
        return self.parts[-2] if self.parts[-1] == "weight" and len(self.parts) > 1 else self.parts[-1]

    @property
    def owner(self) -> nn.Module:
        """The module that uses the weight: it holds the linear layer, or the parameter itself."""
        return self.modules[-2] if self.parts[-1] == "weight" and len(self.modules) > 1 else self.modules[-1]

    def held_by(self, pattern: str) -> bool:
        return is_a(self.module, pattern)

    def owned_by(self, pattern: str) -> bool:
        return is_a(self.owner, pattern)

    def size(self, expression: str, **known: int) -> int | None:
        """The value of sums of products such as ``heads*head_dim+2``; None if a size is unknown or negative, or not
        whole.

        ``fc2.in_features`` is an attribute of the layer ``fc2`` beside it, ``A_log.columns`` the size of a parameter
        beside it.
        """
        total = 0
        for sign, term in re.findall(r"([+-]?)([^+-]+)", expression):
            product = 1
            for operator, factor in re.findall(r"([*/]?)([A-Za-z_][\w.]*|\d+)", term):
                value = int(factor) if factor.isdigit() else known.get(factor) or self._attribute(factor)
                if value is None or (operator == "/" and (value == 0 or product % value)):
                    return None
                product = product // value if operator == "/" else product * value
            total += -product if sign == "-" else product
        return total if total >= 0 else None

    def neighbours(self) -> Iterator[tuple[str, int, int]]:
        """Label, outputs and inputs of the other linear layers of its owner, also of those one level down
        (``to_out.0``).

        For a bare parameter, the other matrices of its owner.
        """
        if self.parts[-1] != "weight":
            for label, param in self.owner._parameters.items():
                if param is not None and param is not self.param and param.dim() == 2:
                    yield label, int(param.shape[0]), int(param.shape[1])
        for label, child in self.owner._modules.items():
            for layer in [] if child is None or child is self.module else [child, *child.children()]:
                weight = getattr(layer, "weight", None)
                if isinstance(weight, Tensor) and weight.dim() == 2:
                    flipped = is_a(layer, "^Conv1D$")
                    outputs, inputs = (
                        (weight.shape[1], weight.shape[0]) if flipped else (weight.shape[0], weight.shape[1])
                    )
                    yield (
                        label,
                        int(getattr(layer, "out_features", outputs)),
                        int(getattr(layer, "in_features", inputs)),
                    )

    def numbers(self) -> set[int]:
        """The whole numbers that its owner has as attributes, and those of its configs that are about heads and
        groups.
        """
        values = list(vars(self.owner).values())
        for source in self._sources():
            told = source if isinstance(source, Mapping) else getattr(source, "__dict__", {})
            values += [value for name, value in told.items() if re.search("head|kv|group", str(name))]
        return {value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0}

    def flag(self, name: str) -> bool:
        """Whether the owner, or its config, says so."""
        return bool(next((getattr(source, name) for source in self._sources() if hasattr(source, name)), False))

    def _attribute(self, name: str) -> int | None:
        if "." in name:  # of a layer beside it
            layer, _, attribute = name.partition(".")
            beside = getattr(self.owner, layer, None)
            if attribute == "columns":
                return int(beside.shape[1]) if isinstance(beside, Tensor) and beside.dim() == 2 else None
            value = getattr(beside, attribute, None)
            return value if isinstance(value, int) else None
        for source in self._sources():
            for synonym in QUANTITIES.get(name, name).split():
                value = getattr(source, synonym, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return None

    def _sources(self) -> Iterator[Any]:
        """Where sizes are looked up: the owner and the modules around it, then configs from the inside out."""
        yield self.owner
        yield from self.modules[-1:-4:-1]
        for module in reversed(self.modules):
            for attribute in ("config", "args", "cfg"):
                if (config := getattr(module, attribute, None)) is not None:
                    yield config


def is_a(module: nn.Module, pattern: str) -> bool:
    """Whether a class of the module matches; FSDP2 and others put their own classes in front."""
    return any(re.search(pattern, cls.__name__) for cls in type(module).__mro__[:-2])


def places_of(model: nn.Module) -> Iterator[ParamPlace]:
    """All parameters of a model, each once, in the order of ``named_parameters``."""
    for name, param in model.named_parameters():
        parts: list[str] = []
        modules = [model]
        *path, last = name.split(".")
        skip = False
        for position, part in enumerate(path):
            inner = modules[-1]._modules[part]
            assert inner is not None
            # PEFT's copy of a module, then the adapter's name
            saved = part == "modules_to_save" and position + 1 < len(path)
            if part in _INSERTED or saved or skip:
                modules[-1] = inner
            else:
                parts.append(part)
                modules.append(inner)
            skip = saved
        # ``up.parametrizations.weight.original``: of ``up``
        if last == "original" and parts[-2:-1] == ["parametrizations"]:
            last = parts[-1]
            del parts[-2:], modules[-2:]
        yield ParamPlace(name, param, (*parts, last), tuple(modules))


def models_in(model: nn.Module, places: Sequence[ParamPlace]) -> list[tuple[nn.Module, Sequence[ParamPlace]]]:
    """The models that a ``ModuleDict`` of several models holds, each with its places; of any other model itself.

    A ModuleDict cannot be called. Its modules are separate models unless one is a single layer, or a block with a
    number.
    """
    root = places[0].modules[0] if places else model
    children = dict(root.named_children()) if type(root) is nn.ModuleDict else {}
    if len(children) < 2 or any(is_number(name) or not any(child.children()) for name, child in children.items()):
        return [(model, places)]
    return [
        (
            child,
            [
                replace(place, parts=place.parts[1:], modules=place.modules[1:])
                for place in places
                if place.parts[0] == name
            ],
        )
        for name, child in children.items()
    ]
