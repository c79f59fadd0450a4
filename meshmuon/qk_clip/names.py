"""QK-clip's options, and which parameters are query and key projections of which layer, according to their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from ..errors import ConfigError
from ..models import name_parts
from ..params.checks import shown

LayerKey: TypeAlias = int | str
"""A layer's number, or the name of its attention module (or of a module that contains it) where numbers are ambiguous."""

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
    """What the name of a projection says."""

    name: str  # without the components that wrappers insert
    layer: LayerKey | None  # number of its layer; None where the name has none. A user's pattern may give a name instead
    kind: str  # "q", "k", "kv_b" (MLA's keys and values) or "qkv" (fused)
    bias: bool  # whether it is a bias; otherwise it is a weight


class MLA(NamedTuple):
    """Rows per head of multi-head latent attention: those without position, those with rotary position, and the values."""

    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class ClipConfig:
    """``clip_config``, checked."""

    threshold: float  # largest logit that is not scaled
    head_dim: int | None  # rows of a head of Wq and Wk; None where all layers are MLA
    q_indices: tuple[int, ...] | None  # query head of each logit; None if logit i belongs to query head i
    k_indices: tuple[int, ...] | None  # key head of each logit; None if the query heads share the key heads equally, in order
    mla: MLA | None  # rows per head of MLA layers; None if there are none
    patterns: tuple[tuple[str, re.Pattern[str]], ...]  # a user's own (kind, regular expression) pairs, which are tried first


def read_clip_config(given: Mapping[str, Any]) -> ClipConfig:
    """Checks what a user passed as ``clip_config``."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"clip_config={shown(given)} must be a mapping such as {_EXAMPLE}.")
    if unknown := sorted(str(key) for key in given if key not in _KEYS):
        raise ConfigError(f"clip_config has unknown keys {unknown}; it may have {', '.join(_KEYS)}.")
    threshold = given.get("threshold")
    limits = torch.finfo(torch.float32)  # factors are computed in it
    if not isinstance(threshold, (int, float)) or isinstance(threshold, bool) or not limits.tiny <= threshold <= limits.max:
        raise ConfigError(
            f"clip_config: threshold={shown(threshold)} must be a positive number of float32: the largest logit that is not "
            "scaled."
        )
    parts = {key: _positive(given, key) for key in _MLA}
    mla = None
    if any(size is not None for size in parts.values()):
        if None in parts.values():
            raise ConfigError(f"clip_config: an MLA model needs all of {', '.join(_MLA)}; got {parts}.")
        mla = MLA(*(size for size in parts.values() if size is not None))
    head_dim = _positive(given, "head_dim")
    if head_dim is None and mla is None:
        raise ConfigError(f"clip_config needs head_dim, the rows of one head of Wq and Wk: {_EXAMPLE}.")
    q_indices, k_indices = _indices(given, "q_indices"), _indices(given, "k_indices")
    if q_indices is not None and k_indices is not None and len(q_indices) != len(k_indices):
        raise ConfigError(
            f"clip_config: {len(q_indices)} q_indices but {len(k_indices)} k_indices. Logit i belongs to query head q_indices[i] "
            "and to key head k_indices[i]: with shared key heads k_indices repeats them, as in [0, 0, 1, 1]. Or leave both out."
        )
    return ClipConfig(float(threshold), head_dim, q_indices, k_indices, mla, _patterns(given.get("patterns")))


@lru_cache(maxsize=1 << 16)  # the names of a model, at every step with logits
def find_projection(name: str, config: ClipConfig) -> Projection | None:
    """The projection that the parameter ``name`` is; None if it is no query or key projection."""
    parts = name_parts(name)
    plain = ".".join(parts)
    bias = parts[-1] == "bias" or parts[-1].endswith("_bias")
    for kind, pattern in config.patterns:
        if match := pattern.search(plain):
            layer = match["layer"]
            return Projection(plain, int(layer) if layer.isdigit() else layer, kind, bias)
    kind_of_name = _DIRECT.get(parts[-1])
    if kind_of_name is None and len(parts) > 1 and parts[-1] in ("weight", "bias"):
        kind_of_name = _KIND_OF.get(parts[-2].lower())
    if kind_of_name is None:
        return None
    numbers = [int(part) for part in parts if part.isdigit()]
    return Projection(plain, numbers[-1] if numbers else None, kind_of_name, bias)


def belongs_to(projection: Projection, layer: LayerKey) -> bool:
    """Whether a projection belongs to the layer that a user names by number or by a module's name."""
    if isinstance(layer, int) or projection.layer == layer:
        return projection.layer == layer
    return projection.name.startswith(".".join([*name_parts(layer), ""]))


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
            f"clip_config: {key}={shown(indices)} must be a list of head numbers, one per logit. Leave it out for heads in order."
        )
    return tuple(indices)


def _patterns(given: Any) -> tuple[tuple[str, re.Pattern[str]], ...]:
    example = r'{"q": r"blocks\.(?P<layer>\d+)\.attn\.Q\.weight", "k": r"blocks\.(?P<layer>\d+)\.attn\.K\.weight"}'
    if given is None:
        return ()
    if not isinstance(given, Mapping) or not all(kind in _KINDS for kind in given):
        raise ConfigError(f"clip_config: patterns={shown(given)} must map {', '.join(_KINDS)} to regular expressions: {example}.")
    patterns = []
    for kind, expression in given.items():
        try:
            pattern = re.compile(expression)
        except (TypeError, re.error) as error:
            raise ConfigError(
                f"clip_config: the pattern {expression!r} of {kind!r} is not a regular expression: {error}."
            ) from None
        if "layer" not in pattern.groupindex:
            raise ConfigError(f"clip_config: the pattern {expression!r} of {kind!r} needs a group (?P<layer>...): {example}.")
        patterns.append((kind, pattern))
    return tuple(patterns)
