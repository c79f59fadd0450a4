"""Output heads: by what the model says, by their size, by name, or because they are the last linear layer of the
model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from .names import is_embedding_name, is_head_name, is_number
from .place import ParamPlace, is_a

_HEAD_METHODS = ("get_output_embeddings", "get_classifier")  # of transformers, of timm
_SIZES = re.compile(r"\w*vocab_size|n_words|num_\w*(labels|classes|answers)|codebook_size")
_OTHER_TABLES = re.compile(r"pos|wpe|time|type|segment|level|layer|bucket|query|relative")
_HEAD_CLASSES = r"(Classification|Classifier|Regression|ISTFT|CTC|Rec|Contrastive|Segmentation|Diarization)\w*Head$"


def declared_heads(model: nn.Module) -> Iterator[Tensor]:
    """The parameters of the modules that a model, or a part of it, names as its head."""
    for module in model.modules():
        for method in _HEAD_METHODS:
            get_head = getattr(module, method, None)
            if callable(get_head):
                try:
                    head = get_head()
                except (
                    Exception
                ):  # base classes define it without implementing it; a model's own error is no answer either
                    continue
                if isinstance(head, nn.Module):
                    yield from head.parameters()


def last_linear(model: nn.Module, places: Sequence[ParamPlace]) -> ParamPlace | None:
    """The weight of the last linear layer, or 1×1 convolution, if it is the head of a model that names none.

    A layer of a repeated block is none, nor is a square one at the end of a base model, such as a pooler. A base model
    of transformers has no head at all: those with one are named after their task.
    """
    weights = [place for place in places if place.param.dim() >= 2 and not is_embedding_name(list(place.parts))]
    model = places[0].modules[0] if places else model  # without what is wrapped around it
    of_transformers = hasattr(getattr(model, "config", None), "model_type")
    if len(weights) < 2 or (of_transformers and not is_a(model, "For[A-Z]")):
        return None
    place = weights[-1]
    square = place.param.shape[0] == place.param.shape[1]
    pointwise = isinstance(place.module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and math.prod(place.param.shape[2:]) == 1
    return place if (_is_linear(place) or pointwise) and not square and not is_repeated(place) else None


def _is_linear(place: ParamPlace) -> bool:
    return isinstance(place.module, nn.Linear) and place.parts[-1] == "weight"


def is_repeated(place: ParamPlace) -> bool:
    """Whether it is inside a block that its container holds several times."""
    for container, module, part in zip(place.modules, place.modules[1:], place.parts, strict=False):
        if not is_number(part):
            continue
        if isinstance(container, (nn.ModuleList, nn.ModuleDict)):  # also of one block, as in a pipeline stage
            return True
        children = list(container.children())
        twins = sum(type(child) is type(module) for child in children)
        if module is not place.module and (twins > 1 or len(children) == 1):  # a single one may be a stage's only block
            return True
    return False


class HeadFinder:
    """Tells why a parameter is that of an output head: by name, by the module around it, or by its size."""

    def __init__(self, places: Sequence[ParamPlace]) -> None:
        linear = [place for place in places if _is_linear(place) and place.param.dim() == 2]
        self._takers: dict[int, set[str]] = {}  # number of inputs → the linear layers that take that number
        for place in linear:
            self._takers.setdefault(place.param.shape[1], set()).add(place.name)
        tables = (
            place
            for place in places
            if isinstance(place.module, nn.Embedding) and not _OTHER_TABLES.search(place.label)
        )
        self._vocabularies = {tuple(place.param.shape) for place in tables}

    def reason(self, place: ParamPlace) -> str | None:
        """Why, in a few words for the routing table; None if it is no head."""
        if is_head_name(list(place.parts)):
            return "output head: by name"
        if place.param.dim() != 2 or is_repeated(place):
            return None
        rows, cols = place.param.shape
        if rows == cols:
            return None
        owner = place.owner
        if is_a(owner, _HEAD_CLASSES) and _is_linear(place) and [*owner.children()][-1] is place.module:
            return "output head: the last layer of a head"
        if (
            (rows, cols) in self._vocabularies
            and _is_linear(place)
            and not self._takers.get(rows, set()) - {place.name}
        ):
            return "output head: the shape of an embedding"
        what = "output head" if place.parts[-1] == "weight" else "table"
        for name, size in _known_sizes(place):
            if rows in (size, size + 1) and not self._takers.get(rows, set()) - {place.name}:
                return f"{what}: rows equal {name}"
            if name == "vocab_size" and cols == size and not self._takers.get(cols, set()) - {place.name}:
                return f"{what}: columns equal {name}"
        return None


def _known_sizes(place: ParamPlace) -> Iterator[tuple[str, int]]:
    """Numbers of words and labels that the configs around a parameter tell."""
    for source in _configs(place):
        names = [name for name in vars(source) if _SIZES.fullmatch(name)]
        for name in (*names, "num_labels"):
            try:
                size = getattr(source, name, None)
            except Exception:  # a property of the model that fails tells no size
                continue
            if isinstance(size, int) and not isinstance(size, bool) and size > 1:
                yield name, size


def _configs(place: ParamPlace) -> Iterator[Any]:
    for module in reversed(place.modules):
        yield module
        config = getattr(module, "config", None)
        if hasattr(config, "__dict__"):
            yield config
            yield from (
                part for part in vars(config).values() if hasattr(part, "model_type") and hasattr(part, "__dict__")
            )
