"""A model as plain data: the names and shapes of its parameters, who steps them, and how tensor parallelism cuts
them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import ConfigError
from ...matrices import ParamMatrices, check_matrices, with_stars
from .inputs import read_preset

FORMAT, VERSION = "meshmuon model", 1
_MOST_ELEMENTS = 2**44  # of a parameter: the bytes of thousands of layers still fit into 63 bits
_MOST_LAYERS = 2**20
_TEXTS = ("name", "title", "source", "published", "active")
TP_STYLES = ("colwise", "rowwise", "packed_colwise", "replicate")
"""How tensor parallelism cuts a weight: its outputs, its inputs, the outputs of each of two fused parts, or not at
all.
"""


@dataclass(frozen=True, slots=True)
class ModelParam:
    """One parameter of a model."""

    name: str
    shape: tuple[int, ...]
    use_muon: bool  # False: AdamW steps it
    matrices: ParamMatrices | None = None  # which matrices it holds, if it is not one (out, in) matrix
    tp: str = "replicate"  # one of ``TP_STYLES``
    expert: bool = False  # its first dim counts experts, and expert parallelism cuts it
    layer: int | None = None  # the number of its layer; None for what is before or after the layers

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelDescription:
    """The parameters of a model in the order of ``model.named_parameters()``, and where they are from."""

    name: str
    title: str
    source: str  # where its sizes were published
    params: tuple[ModelParam, ...] = field(repr=False)
    published: str = ""  # its parameters as published, such as "8.03B"
    active: str = ""  # the parameters that each token uses as published, where they are fewer
    experts_per_token: int = 0  # how many of the experts a token uses; 0 if there are none
    has_tp_plan: bool = False  # whether ``ModelParam.tp`` says how tensor parallelism cuts it

    def __post_init__(self) -> None:
        for param in self.params:
            if max(param.size, *param.shape, 0) > _MOST_ELEMENTS:
                raise ConfigError(
                    f"{param.name[:120]}: no parameter has more than {_MOST_ELEMENTS:,} elements. Write the sizes of "
                    "its dims."
                )

    @property
    def size(self) -> int:
        return sum(param.size for param in self.params)

    @property
    def experts(self) -> int:
        """Number of experts of a layer; 0 if there are none."""
        return max((param.shape[0] for param in self.params if param.expert), default=0)

    @property
    def active_size(self) -> int:
        """Number of parameters that a token uses: all but those of the experts that it is not sent to."""
        unused = sum(
            param.size // param.shape[0] * max(0, param.shape[0] - self.experts_per_token)
            for param in self.params
            if param.expert and self.experts_per_token
        )
        return self.size - unused

    @property
    def layers(self) -> int:
        return 1 + max((param.layer for param in self.params if param.layer is not None), default=-1)

    def to_json(self) -> dict[str, Any]:
        """The content of a model's file; layers with the same parameters share their rows."""
        outside: list[dict[str, Any]] = []
        before = 0  # rows of ``outside`` that stand before the layers
        by_layer: dict[int, list[dict[str, Any]]] = {}
        for param in self.params:
            if param.layer is not None and with_stars(param.name).count("*") == 1:
                by_layer.setdefault(param.layer, []).append(_row(param, with_stars(param.name)))
            else:
                before += not by_layer
                outside.append(_row(param, param.name))
        alike: dict[str, list[int]] = {}  # the rows of a layer → all layers that have these
        for layer, rows in by_layer.items():
            alike.setdefault(json.dumps(rows), []).append(layer)
        inside = []
        for text, layers in alike.items():
            first, last = layers[0], layers[-1]
            span = {"first": first, "last": last} if layers == list(range(first, last + 1)) else layers
            inside += [{**row, "layers": span} for row in json.loads(text)]
        return {
            "format": FORMAT,
            "version": VERSION,
            **{key: getattr(self, key) for key in (*_TEXTS, "experts_per_token", "has_tp_plan")},
            "params": [*outside[:before], *inside, *outside[before:]],
        }

    @classmethod
    def from_json(cls, content: Any) -> ModelDescription:
        if not isinstance(content, Mapping) or content.get("format") != FORMAT or content.get("version") != VERSION:
            raise ConfigError(
                f"it is no description of a model: it must be a JSON object with format {FORMAT!r} and version "
                f"{VERSION}. Write one with meshmuon plan --hf-config config.json --save-model FILE."
            )
        texts = {key: str(content.get(key, "")) for key in _TEXTS}
        rows = content.get("params")
        if not isinstance(rows, Sequence) or not rows:
            raise ConfigError("its params must be a list with a row for each parameter.")
        return cls(
            params=tuple(_in_model_order([_read_row(row) for row in rows])),
            experts_per_token=int(content.get("experts_per_token", 0)),
            has_tp_plan=bool(content.get("has_tp_plan", False)),
            **texts,
        )


def load_model(name: str) -> ModelDescription:
    return read_preset("--model", name, "model", ModelDescription.from_json)


def _row(param: ModelParam, name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "shape": list(param.shape), "muon": param.use_muon}
    if param.matrices is not None:
        plain = ParamMatrices()
        row["matrices"] = {key: value for key, value in param.matrices.fields().items() if value != getattr(plain, key)}
    if param.tp != "replicate":
        row["tp"] = param.tp
    if param.expert:
        row["expert"] = True
    return row


def _read_row(row: Any) -> tuple[ModelParam, tuple[int, ...]]:
    """A row's parameter, and the layers in which it is; none if it is not in a layer."""
    name = row["name"]
    shape = tuple(row["shape"])
    if not isinstance(name, str) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ConfigError(f"the row {row!r} needs a name, and a shape of whole numbers.")
    tp = row.get("tp", "replicate")
    if tp not in TP_STYLES:
        raise ConfigError(f"{name}: tp={tp!r} is unknown; write one of {TP_STYLES}.")
    layers = row.get("layers", ())
    numbers: Sequence[int] = (
        range(layers["first"], layers["last"] + 1) if isinstance(layers, Mapping) else tuple(layers)
    )
    if any(not isinstance(layer, int) or not 0 <= layer < _MOST_LAYERS for layer in (*numbers[:1], *numbers[-1:])):
        raise ConfigError(f"{name[:120]}: layers are numbered from 0, and there are {_MOST_LAYERS:,} at most.")
    if bool(numbers) != (name.count("*") == 1):
        raise ConfigError(f"{name}: a parameter of several layers needs one * in its name and the list of its layers.")
    matrices = None
    if "matrices" in row:
        matrices = check_matrices({name: _tuples(row["matrices"])})[name]
    expert = bool(row.get("expert", False))
    return ModelParam(name, shape, bool(row["muon"]), matrices, tp, expert), tuple(numbers)


def _in_model_order(rows: Sequence[tuple[ModelParam, tuple[int, ...]]]) -> Iterator[ModelParam]:
    """Rows before the first layer's, then layer by layer, then the rest."""
    inside = [index for index, (_, layers) in enumerate(rows) if layers]
    first, last = (inside[0], inside[-1] + 1) if inside else (len(rows), len(rows))
    outside = [param for param, layers in rows[first:last] if not layers]
    if outside:
        raise ConfigError(f"{outside[0].name} is between rows of layers: put it before or after all of them.")
    yield from (param for param, _ in rows[:first])
    for layer in sorted({layer for _, layers in rows[first:last] for layer in layers}):
        for param, layers in rows[first:last]:
            if layer in layers:
                yield replace(param, name=param.name.replace("*", str(layer)), layer=layer)
    yield from (param for param, _ in rows[last:])


def _tuples(value: Any) -> Any:
    """JSON's lists as tuples, inside mappings as well."""
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return {key: _tuples(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value
