"""QK-clip's options, which parameters are the projections of a layer according to their names, and which rows are
which head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import ConfigError, shown
from ..matrices import StridedRange, find_matrices
from ..models import name_parts
from ..params.groups import matrix_options_of
from ..params.param_record import ParamRecord

LayerKey: TypeAlias = int | str
"""A layer's number, or the name of its attention module (or of a module that contains it) where numbers are
ambiguous.
"""

_KINDS = {
    "q": ("q_proj", "wq", "c_q", "to_q", "query", "q_b_proj", "wq_b"),
    "k": ("k_proj", "wk", "c_k", "to_k", "key"),
    "kv_b": ("kv_b_proj", "wkv_b"),
    "qkv": ("qkv_proj", "qkv", "c_qkv", "c_attn", "wqkv", "query_key_value"),
}
_KIND_OF = {module: kind for kind, modules in _KINDS.items() for module in modules}
_DIRECT = {"in_proj_weight": "qkv", "in_proj_bias": "qkv"}  # held by nn.MultiheadAttention itself
_DIRECT |= {f"{kind}_proj_{what}": kind for kind in ("q", "k") for what in ("weight", "bias")}

_MLA = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_KEYS = ("head_dim", "threshold", "q_indices", "k_indices", *_MLA, "patterns")
_EXAMPLE = '{"head_dim": 128, "threshold": 100}'


class Projection(NamedTuple):
    """A parameter that is a projection, its index among all parameters, and what its name says."""

    record: ParamRecord
    param_index: int
    module_name: str  # without the components that wrappers insert
    # number of its layer; None where the name has none. A user's pattern may give a name instead
    layer: LayerKey | None
    kind: str  # "q", "k", "kv_b" (MLA's keys and values) or "qkv" (fused)
    bias: bool  # whether it is a bias; otherwise it is a weight


@dataclass(frozen=True, slots=True)
class ClipConfig:
    """``clip_config``, checked."""

    threshold: float  # largest logit that is not scaled
    head_dim: int | None  # rows of a head of Wq and Wk; None where all layers are MLA
    q_indices: tuple[int, ...] | None  # query head of each logit; None if logit i belongs to query head i
    # key head of each logit; None if the query heads share the key heads equally, in order
    k_indices: tuple[int, ...] | None
    # Rows per head of MLA layers: without position, with rotary position, values; None if there are none.
    mla: tuple[int, ...] | None
    # a user's own (kind, regular expression) pairs, which are tried first
    patterns: tuple[tuple[str, re.Pattern[str]], ...]


def read_clip_config(given: Mapping[str, Any]) -> ClipConfig:
    if not isinstance(given, Mapping):
        raise ConfigError(f"clip_config={shown(given)} must be a mapping such as {_EXAMPLE}.")
    if unknown := sorted(str(key) for key in given if key not in _KEYS):
        raise ConfigError(f"clip_config has unknown keys {unknown}; it may have {', '.join(_KEYS)}.")
    threshold = given.get("threshold")
    limits = torch.finfo(torch.float32)  # factors are computed in it
    if (
        not isinstance(threshold, (int, float))
        or isinstance(threshold, bool)
        or not limits.tiny <= threshold <= limits.max
    ):
        raise ConfigError(
            f"clip_config: threshold={shown(threshold)} must be a positive number of float32: the largest logit that "
            "is not scaled."
        )
    parts = {key: _positive(given, key) for key in _MLA}
    mla = tuple(size for size in parts.values() if size is not None)
    if mla and len(mla) < len(_MLA):
        raise ConfigError(f"clip_config: an MLA model needs all of {', '.join(_MLA)}; got {parts}.")
    head_dim = _positive(given, "head_dim")
    if head_dim is None and not mla:
        raise ConfigError(f"clip_config needs head_dim, the rows of one head of Wq and Wk: {_EXAMPLE}.")
    q_indices, k_indices = _indices(given, "q_indices"), _indices(given, "k_indices")
    if q_indices is not None and k_indices is not None and len(q_indices) != len(k_indices):
        raise ConfigError(
            f"clip_config: {len(q_indices)} q_indices but {len(k_indices)} k_indices. Logit i belongs to query head "
            "q_indices[i] and to key head k_indices[i]: with shared key heads k_indices repeats them, as in [0, 0, 1, "
            "1]. Or leave both out."
        )
    return ClipConfig(float(threshold), head_dim, q_indices, k_indices, mla or None, _patterns(given.get("patterns")))


def find_projections(params: Sequence[ParamRecord], config: ClipConfig) -> list[Projection]:
    """Those of the parameters that are query or key projections according to their names."""
    found = []
    for index, record in enumerate(params):
        parts = name_parts(record.name)
        name = ".".join(parts)
        matches = ((kind, match) for kind, pattern in config.patterns if (match := pattern.search(name)))
        layer: LayerKey | None
        if by_pattern := next(matches, None):
            kind, layer = by_pattern[0], by_pattern[1]["layer"]
            layer = int(layer) if layer.isdigit() else layer
        else:
            kind = _DIRECT.get(parts[-1], "")
            if not kind and len(parts) > 1 and parts[-1] in ("weight", "bias"):
                kind = _KIND_OF.get(parts[-2].lower(), "")
            layer = next((int(part) for part in reversed(parts) if part.isdigit()), None)
        if kind:
            found.append(
                Projection(record, index, name, layer, kind, bias=parts[-1] == "bias" or parts[-1].endswith("_bias"))
            )
    return found


def belongs_to(projection: Projection, layer: LayerKey) -> bool:
    """Whether a projection belongs to the layer that a user names by number or by a module's name."""
    if isinstance(layer, int) or projection.layer == layer:
        return projection.layer == layer
    return projection.module_name.startswith(".".join([*name_parts(layer), ""]))


def _positive(given: Mapping[str, Any], key: str) -> int | None:
    size = given.get(key)
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ConfigError(f"clip_config: {key}={shown(size)} must be a positive whole number of rows.")
    return size


def _indices(given: Mapping[str, Any], key: str) -> tuple[int, ...] | None:
    indices = given.get(key)
    if indices is None:
        return None
    is_list = isinstance(indices, Sequence) and not isinstance(indices, str) and len(indices) > 0
    if not is_list or not all(isinstance(head, int) and not isinstance(head, bool) and head >= 0 for head in indices):
        raise ConfigError(
            f"clip_config: {key}={shown(indices)} must be a list of head numbers, one per logit. Leave it out for "
            "heads in order."
        )
    return tuple(indices)


def _patterns(given: Any) -> tuple[tuple[str, re.Pattern[str]], ...]:
    example = r'{"q": r"blocks\.(?P<layer>\d+)\.attn\.Q\.weight", "k": r"blocks\.(?P<layer>\d+)\.attn\.K\.weight"}'
    if given is None:
        return ()
    if not isinstance(given, Mapping) or not all(kind in _KINDS for kind in given):
        raise ConfigError(
            f"clip_config: patterns={shown(given)} must map {', '.join(_KINDS)} to regular expressions: {example}."
        )
    patterns = []
    for kind, expression in given.items():
        try:
            pattern = re.compile(expression)
        except (TypeError, re.error) as error:
            raise ConfigError(
                f"clip_config: the pattern {expression!r} of {kind!r} is not a regular expression: {error}."
            ) from None
        if "layer" not in pattern.groupindex:
            raise ConfigError(
                f"clip_config: the pattern {expression!r} of {kind!r} needs a group (?P<layer>...): {example}."
            )
        patterns.append((kind, pattern))
    return tuple(patterns)


class Section(NamedTuple):
    """Rows of a parameter that belong to the query heads or to the key heads.

    In a fused QKV weight of 4 heads of 64 rows each, the key section is ``Section("k", StridedRange(256, 256), 4,
    root=64)``. Where query, key and value of each head follow each other, its rows are ``StridedRange(64, 64, count=4,
    period=192)``. In MLA's Wq, a head has rows without position, which are scaled by √γ, and rotary rows, which are
    scaled by γ.
    """

    side: str  # "q" or "k"
    rows: StridedRange  # which rows
    heads: int  # number of heads
    root: int  # number of rows of a head, from its first on, that are scaled by √γ
    full: int = 0  # number of the following rows that are scaled by γ
    rest: int = 0  # number of the remaining rows, which are not scaled

    def write_slots(self, slots: Tensor, first: int) -> None:
        """Writes where the factors of these rows are; ``first`` is this section's first head among all heads."""
        kind = torch.tensor([1] * self.root + [2] * self.full + [0] * self.rest)
        of_heads = torch.where(kind > 0, kind + 2 * (first + torch.arange(self.heads).unsqueeze(1)), 0)
        blocks = self.rows.start + self.rows.period * torch.arange(self.rows.count).unsqueeze(1)
        slots[(blocks + torch.arange(self.rows.size)).flatten()] = of_heads.flatten()


class HeadTable:
    """The heads of all layers with logits, numbered through: their logits, and their rows in the parameters.

    Attributes:
        of_logits: for the sides "q" and "k", the head of each logit. In the first layer, 4 query heads that share 2 key
            heads are ``{"q": [0, 1, 2, 3], "k": [4, 4, 5, 5]}``.
        count: number of heads.
        slots: by the index of a parameter, where each row's factor is in the vector (1, √γ of head 0, γ of head 0, √γ
            of head 1, γ of head 1, …).
    """

    def __init__(self) -> None:
        self.of_logits: dict[str, list[int]] = {"q": [], "k": []}
        self.count = 0
        self.slots: dict[int, Tensor] = {}
        self._key_of: dict[int, LayerKey] = {}  # index of a parameter → the layer to which it belongs

    def add_layer(
        self, layer: LayerKey, logit_count: int, projections: Sequence[Projection], config: ClipConfig
    ) -> None:
        """Finds the projections of a layer for which the user passed ``logit_count`` logits, and their heads."""
        members = [member for member in projections if belongs_to(member, layer)]
        weights: dict[str, Projection] = {}
        for member in members:
            if not member.bias and weights.setdefault(member.kind, member) is not member:
                same_kind = [one for one in members if one.kind == member.kind and not one.bias]
                raise ConfigError(
                    f"qk_logits: layer {layer!r} has {len(same_kind)} {member.kind} projections: "
                    f"{', '.join(one.record.name for one in same_kind)}. Name the attention module instead of the "
                    f"number, as in qk_logits={{{same_kind[0].module_name.rsplit('.', 2)[0]!r}: ...}}."
                )
        if set(weights) not in ({"q", "k"}, {"q", "kv_b"}, {"qkv"}):
            raise ConfigError(_missing_projections(layer, set(weights), members, projections))
        sections = {
            kind: _sections_of(layer, weight, config, mla="kv_b" in weights) for kind, weight in weights.items()
        }
        head_counts = {section.side: section.heads for parts in sections.values() for section in parts}
        first_head = {"q": self.count, "k": self.count + head_counts["q"]}
        self.count += sum(head_counts.values())
        for side, heads in _heads_of_logits(layer, logit_count, head_counts, config).items():
            self.of_logits[side] += [first_head[side] + head for head in heads]
        for member in members:
            if member.kind in weights:
                record, index, weight = member.record, member.param_index, weights[member.kind].record
                if record.shape[0] != weight.shape[0]:
                    raise ConfigError(
                        f"{record.name} (layer {layer!r}) has {record.shape[0]} rows, its weight {weight.name} has "
                        f"{weight.shape[0]}."
                    )
                if self._key_of.setdefault(index, layer) != layer:
                    raise ConfigError(
                        f"qk_logits: the layers {self._key_of[index]!r} and {layer!r} both mean {record.name}."
                    )
                self.slots[index] = torch.zeros(record.shape[0], dtype=torch.long)
                for section in sections[member.kind]:
                    section.write_slots(self.slots[index], first_head[section.side])


def _missing_projections(
    layer: LayerKey, kinds: set[str], members: Sequence[Projection], projections: Sequence[Projection]
) -> str:
    names = [member.record.name for member in (members or projections) if not member.bias]
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    what = "has no query and key projections"
    if kinds:
        what = f"has {' and '.join(sorted(kinds))} projections, which do not make a pair of queries and keys"
    return (
        f"qk_logits: layer {layer!r} {what} in this optimizer. Found {'in it' if members else 'in all layers'}: "
        f"{listed or 'none'}. Pass logits only for layers whose projections this optimizer has (a pipeline stage: its "
        "own), or "
        'give patterns for their names in clip_config["patterns"].'
    )


def _sections_of(layer: LayerKey, weight: Projection, config: ClipConfig, *, mla: bool) -> tuple[Section, ...]:
    """The heads in a weight, checked against its rows. ``mla`` says whether the layer has MLA's projections."""
    name, shape, kind = weight.record.name, tuple(weight.record.param.shape), weight.kind
    where = f"{name} (layer {layer!r})"
    if len(shape) != 2:
        raise ConfigError(f"{where} has shape {shape}; QK-clip needs two dims, (heads × head_dim, in).")
    rows = StridedRange(0, shape[0])
    if mla:
        if config.mla is None:
            raise ConfigError(
                f"layer {layer!r} has MLA's kv_b projection beside {name}: clip_config needs qk_nope_head_dim, "
                "qk_rope_head_dim and v_head_dim."
            )
        nope, rope, value = config.mla
        if kind == "q":
            return (_section(where, "q", rows, (nope, rope, 0), "qk_nope_head_dim + qk_rope_head_dim"),)
        return (_section(where, "k", rows, (nope, 0, value), "qk_nope_head_dim + v_head_dim"),)
    parts = {kind: rows}
    if kind == "qkv":
        found = find_matrices(name, shape, matrix_options_of(weight.record.param_group))
        if len(found) != 3:
            raise ConfigError(
                f"{where} holds queries, keys and values in {shape[0]} rows, but its group's split has "
                f"{len(found)} part(s) and does not tell them apart. Give the group split=(rows of q, of k, of v), or "
                "split=Interleaved((rows of q, of k, of v), heads) if they follow each other in every head."
            )
        parts = {side: rows if part.window is None else part.window[0] for side, part in zip("qk", found, strict=False)}
    if config.head_dim is None:
        raise ConfigError(f"{where} is no MLA projection: clip_config needs head_dim for it.")
    return tuple(_section(where, side, part, (config.head_dim, 0, 0), "head_dim") for side, part in parts.items())


def _section(where: str, side: str, rows: StridedRange, head: tuple[int, int, int], what: str) -> Section:
    """A section; ``head`` has the number of rows of a head that are scaled by √γ, by γ, and not at all."""
    heads, rest = divmod(rows.length, sum(head))
    if rest or not heads:
        raise ConfigError(
            f"{where} has {rows.length} rows, which is not a whole number of heads of {sum(head)} rows ({what} in "
            "clip_config)."
        )
    return Section(side, rows, heads, *head)


def _heads_of_logits(
    layer: LayerKey, count: int, heads: Mapping[str, int], config: ClipConfig
) -> dict[str, tuple[int, ...]]:
    """For the sides "q" and "k", the head of each logit. ``heads`` has the number of heads of each side."""
    q_indices, k_indices = config.q_indices, config.k_indices
    for side, indices in (("q", q_indices), ("k", k_indices)):
        if indices is not None and len(indices) != count:
            raise ConfigError(
                f"qk_logits: layer {layer!r} has {count} logits, clip_config has {len(indices)} {side}_indices: one "
                "per logit."
            )
    if q_indices is None:
        if count != heads["q"]:
            raise ConfigError(
                f"qk_logits: layer {layer!r} has {count} logits but {heads['q']} query heads. Pass one logit per "
                "query head, or give q_indices and k_indices in clip_config, the heads that each logit belongs to."
            )
        q_indices = tuple(range(count))
    if k_indices is None:
        if heads["q"] % heads["k"]:
            raise ConfigError(
                f"layer {layer!r} has {heads['q']} query heads, which cannot share {heads['k']} key heads equally: "
                "give k_indices."
            )
        k_indices = tuple(head // (heads["q"] // heads["k"]) for head in q_indices)
    found = {"q": q_indices, "k": k_indices}
    for side, indices in found.items():
        if max(indices) >= heads[side]:
            raise ConfigError(
                f"clip_config: {side}_indices name head {max(indices)}, but layer {layer!r} has {heads[side]} heads."
            )
    return found
