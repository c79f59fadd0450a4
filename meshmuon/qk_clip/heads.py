"""Where the heads of a layer are: the rows of each in its projections, and the logits that belong to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from ..matrices import find_matrices
from ..params.groups import matrix_options_of
from ..params.named_params import NamedParam
from .names import ClipConfig, LayerKey, Projection, belongs_to

__all__ = ["Found", "Layer", "Section", "check_overlap", "read_layer"]


class Found(NamedTuple):
    """A parameter that is a projection, and its place among all parameters."""

    what: Projection
    one: NamedParam
    place: int


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive rows of a parameter that belong to heads of one side.

    Attributes:
        side: ``"q"`` or ``"k"``.
        start: first row.
        heads: how many heads follow each other.
        size: rows of each head.
        root: its first rows, which take √γ.
        full: the rows after these, which take γ; what is left of a head stays as it is.
    """

    side: str
    start: int
    heads: int
    size: int
    root: int
    full: int = 0

    def slots(self, rows: Tensor, first: int) -> Tensor:
        """Which factor each of ``rows`` takes: 0 is always 1, head *h* has √γ at 1 + 2h and γ at 2 + 2h; ``first`` is head 0."""
        at = rows - self.start
        within = at % self.size
        root = 1 + 2 * (first + at // self.size)
        mine = (at >= 0) & (at < self.heads * self.size)
        rooted = torch.where(mine & (within < self.root), root, 0)
        return torch.where(mine & (within >= self.root) & (within < self.root + self.full), root + 1, rooted)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with logits: its parameters with their sections, and which logits each head of either side has."""

    members: tuple[tuple[Found, tuple[Section, ...]], ...]
    entries: dict[str, list[list[int]]]


def _split_of(found: Found) -> tuple[tuple[int, int], ...]:
    """Row ranges of the parts of a fused weight."""
    if found.what.kind != "qkv" or found.what.bias or found.one.param.dim() != 2:
        return ()
    shape = tuple(found.one.param.shape)
    parts = find_matrices(found.one.name, shape, matrix_options_of(found.one.param_group))
    return tuple((0, shape[0]) if part.window is None else part.window[0] for part in parts)


def read_layer(layer: LayerKey, count: int, found: Sequence[Found], config: ClipConfig) -> Layer:
    """Finds a layer's projections, their heads, and the logits of each head."""
    members = [one for one in found if belongs_to(one.what, layer)]
    kinds = {kind: _only(layer, kind, members) for kind in ("q", "k", "kv_b", "qkv")}
    has = {kind for kind, weight in kinds.items() if weight is not None}
    if has not in ({"q", "k"}, {"q", "kv_b"}, {"qkv"}):
        raise ConfigError(_not_found(layer, has, members, found))
    sections = _Heads(layer, config, mla="kv_b" in has)
    of_kind = {kind: sections.of(weight) for kind, weight in kinds.items() if weight is not None}
    heads = {one.side: one.heads for parts in of_kind.values() for one in parts}
    return Layer(
        tuple(
            (one, _fitting(layer, one, of_kind[one.what.kind], kinds[one.what.kind]))
            for one in members
            if one.what.kind in of_kind
        ),
        _entries(layer, count, heads, config),
    )


def _only(layer: LayerKey, kind: str, members: Sequence[Found]) -> Found | None:
    weights = [one for one in members if one.what.kind == kind and not one.what.bias]
    if len(weights) > 1:
        names = ", ".join(one.one.name for one in weights)
        raise ConfigError(
            f"qk_logits: layer {layer!r} has {len(weights)} {kind} projections: {names}. Name the attention module instead of "
            f"the number, as in qk_logits={{{weights[0].what.name.rsplit('.', 2)[0]!r}: ...}}."
        )
    return weights[0] if weights else None


def _not_found(layer: LayerKey, has: set[str], members: Sequence[Found], found: Sequence[Found]) -> str:
    names = [one.one.name for one in (members or found) if not one.what.bias]
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    what = "has no query and key projections"
    if has:
        what = f"has {' and '.join(sorted(has))} projections, which do not make a pair of queries and keys"
    return (
        f"qk_logits: layer {layer!r} {what} in this optimizer. Found {'in it' if members else 'in all layers'}: "
        f"{listed or 'none'}. Pass logits only for layers whose projections this optimizer has (a pipeline stage: its own), or "
        'tell their names by clip_config["patterns"].'
    )


def _fitting(layer: LayerKey, one: Found, sections: tuple[Section, ...], weight: Found | None) -> tuple[Section, ...]:
    assert weight is not None  # a bias of a kind whose weight is missing never gets here
    rows, wanted = one.one.param.shape[0], weight.one.param.shape[0]
    if rows != wanted:
        raise ConfigError(f"{one.one.name} (layer {layer!r}) has {rows} rows, its weight {weight.one.name} has {wanted}.")
    return sections


class _Heads:
    """Where the heads are in the weights of one layer."""

    def __init__(self, layer: LayerKey, config: ClipConfig, *, mla: bool) -> None:
        self._layer, self._config, self._mla = layer, config, mla

    def of(self, weight: Found) -> tuple[Section, ...]:
        """The sections of a weight, checked against its rows."""
        name, shape = weight.one.name, tuple(weight.one.param.shape)
        if len(shape) != 2:
            raise ConfigError(
                f"{name} (layer {self._layer!r}) has shape {shape}; QK-clip needs two dims, (heads × head_dim, in)."
            )
        kind, rows = weight.what.kind, shape[0]
        if kind == "qkv":
            return self._fused(weight, name, rows)
        if not self._mla:
            return (self._plain(name, kind, 0, rows),)
        if self._config.mla is None:
            raise ConfigError(
                f"layer {self._layer!r} has MLA's kv_b projection beside {name}: clip_config needs qk_nope_head_dim, "
                "qk_rope_head_dim and v_head_dim."
            )
        mla = self._config.mla
        if kind == "q":
            size = mla.nope + mla.rope
            heads = self._heads(name, rows, size, "qk_nope_head_dim + qk_rope_head_dim")
            return (Section("q", 0, heads, size, mla.nope, mla.rope),)
        size = mla.nope + mla.value
        return (Section("k", 0, self._heads(name, rows, size, "qk_nope_head_dim + v_head_dim"), size, mla.nope),)

    def _fused(self, weight: Found, name: str, rows: int) -> tuple[Section, ...]:
        parts = _split_of(weight)
        if len(parts) != 3:
            raise ConfigError(
                f"{name} (layer {self._layer!r}) holds queries, keys and values in {rows} rows, and its group's split has "
                f"{len(parts)} part(s), so which rows are whose is not known. Give the group split=(rows of q, of k, of v)."
            )
        (q, q_end), (k, k_end), _ = parts
        return self._plain(name, "q", q, q_end - q), self._plain(name, "k", k, k_end - k)

    def _plain(self, name: str, side: str, start: int, rows: int) -> Section:
        size = self._config.head_dim
        if size is None:
            raise ConfigError(f"{name} (layer {self._layer!r}) is no MLA projection: clip_config needs head_dim for it.")
        return Section(side, start, self._heads(name, rows, size, "head_dim"), size, size)

    def _heads(self, name: str, rows: int, size: int, what: str) -> int:
        if rows % size or not rows:
            raise ConfigError(
                f"{name} (layer {self._layer!r}) has {rows} rows, which are no whole number of heads of {size} rows "
                f"({what} in clip_config)."
            )
        return rows // size


def _entries(layer: LayerKey, count: int, heads: Mapping[str, int], config: ClipConfig) -> dict[str, list[list[int]]]:
    """For either side, the logits of each head."""
    given: tuple[tuple[str, Sequence[int] | None], ...] = (("q_indices", config.q_indices), ("k_indices", config.k_indices))
    for key, indices in given:
        if indices is not None and len(indices) != count:
            raise ConfigError(
                f"qk_logits: layer {layer!r} has {count} logits, clip_config has {len(indices)} {key}: one per logit."
            )
    if config.q_indices is None and count != heads["q"]:
        raise ConfigError(
            f"qk_logits: layer {layer!r} has {count} logits but {heads['q']} query heads. Pass one logit per query head, or "
            "say by q_indices and k_indices in clip_config to which heads they belong."
        )
    q_indices = range(count) if config.q_indices is None else config.q_indices
    if config.k_indices is None and heads["q"] % heads["k"]:
        raise ConfigError(
            f"layer {layer!r} has {heads['q']} query heads and {heads['k']} key heads, which are no equal groups: give k_indices."
        )
    shared = max(1, heads["q"] // heads["k"])
    k_indices = [head // shared for head in q_indices] if config.k_indices is None else config.k_indices
    found: dict[str, list[list[int]]] = {}
    for side, indices in (("q", q_indices), ("k", k_indices)):
        if max(indices) >= heads[side]:
            raise ConfigError(
                f"clip_config: {side}_indices name head {max(indices)}, but layer {layer!r} has {heads[side]} of them."
            )
        found[side] = [[] for _ in range(heads[side])]
        for entry, head in enumerate(indices):
            found[side][head].append(entry)
    return found


def check_overlap(layers: Mapping[LayerKey, Layer]) -> None:
    """One layer under two keys would be scaled twice."""
    seen: dict[str, LayerKey] = {}
    for key, layer in layers.items():
        for found, _ in layer.members:
            if found.one.name in seen:
                raise ConfigError(f"qk_logits: the layers {seen[found.one.name]!r} and {key!r} both mean {found.one.name}.")
            seen[found.one.name] = key
