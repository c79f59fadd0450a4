"""A stand-in for a model of which only the names and the shapes of the parameters are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn

from .names import is_embedding_name, is_head_name, is_table_label
from .place import ParamPlace, places_of

# rows per column, and rows, that no layer has but a table of words, or the head that is as tall
_TALL, _MANY_ROWS = 16, 4096


class Conv1D(nn.Module):
    """A linear layer stored as (in, out), under the name by which the tables know it."""


def model_from_names(named_params: Iterable[tuple[str, Tensor]]) -> nn.Module:
    """Modules as the names tell them, which hold the parameters and cannot be called.

    Those with a ``weight`` of two dims are embeddings, if name or shape say so, or linear layers; those with one of
    more dims are convolutions, with three dims only if the name says so.
    """
    model = nn.Module()
    for name, param in named_params:
        *path, last = name.split(".")
        module = model
        for part in path:
            module = cast(nn.Module, module._modules.setdefault(part, nn.Module()))
        module._parameters[last] = cast(nn.Parameter, param)
    for place in places_of(model):
        if place.parts[-1] == "weight":
            _give_class(place)
    return model


def _give_class(place: ParamPlace) -> None:
    module, sizes, parts = place.module, place.param.shape, list(place.parts)
    if len(sizes) == 2:
        tall = sizes[0] >= max(_MANY_ROWS, _TALL * sizes[1]) and not is_head_name(parts)
        if tall or is_embedding_name(parts) or is_table_label(place.label):
            module.__class__ = nn.Embedding
        elif (bias := module._parameters.get("bias")) is not None and bias.numel() == sizes[1] != sizes[0]:
            module.__class__ = Conv1D
        else:
            module.__class__ = nn.Linear
            vars(module).update(out_features=sizes[0], in_features=sizes[1])
    elif len(sizes) > 3 or (len(sizes) == 3 and "conv" in place.label):
        module.__class__ = nn.Conv2d
        vars(module)["groups"] = sizes[0] if sizes[1] == 1 else 1
