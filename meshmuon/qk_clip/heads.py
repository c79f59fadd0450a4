"""Where the heads of a layer are: which rows of its projections, and which logits, belong to each head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from ..matrices import StridedRange, find_matrices
from ..params.groups import matrix_options_of
from ..params.param_record import ParamRecord
from .names import ClipConfig, LayerKey, Projection, belongs_to


class ProjectionParam(NamedTuple):
    """A parameter that is a projection, what its name says, and its index among all parameters."""

    projection: Projection
    named: ParamRecord
    param_index: int


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of a parameter that belong to the query heads or to the key heads.

    In a fused QKV weight of 4 heads of 64 rows each, the key section is ``Section("k", StridedRange(256, 256), 4, 64, root=64)``.
    Where query, key and value of each head follow each other, its rows are ``StridedRange(64, 64, count=4, period=192)``.
    In MLA's Wq, a head has rows without position, which are scaled by √γ, and rotary rows, which are scaled by γ.
    """

    side: str  # "q" or "k"
    rows: StridedRange  # which rows
    heads: int  # number of heads
    size: int  # rows per head
    root: int  # how many rows, from the head's first on, are scaled by √γ
    full: int = 0  # how many of the following rows are scaled by γ; the remaining rows of the head are not scaled

    def slots(self, rows: Tensor, first: int) -> Tensor:
        """The index of the factor of each global row, in the vector (1, √γ of head 0, γ of head 0, √γ of head 1, γ of head 1, …).

        ``first`` is the number of this section's first head among all heads.
        """
        inside, position = self._positions(rows)
        within = position % self.size
        root_slot = 1 + 2 * (first + position // self.size)
        slots = torch.where(inside & (within < self.root), root_slot, 0)
        return torch.where(inside & (within >= self.root) & (within < self.root + self.full), root_slot + 1, slots)

    def _positions(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the global ``rows`` belong to the section, and the position of those that do."""
        offset, period = rows - self.rows.start, self.rows.period or self.rows.size
        block, within = offset // period, offset % period
        return (block >= 0) & (block < self.rows.count) & (within < self.rows.size), block * self.rows.size + within


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with logits: its parameters, each with its sections, and for the sides "q" and "k" which logits each head has.

    With 4 query heads that share 2 key heads, ``logits_of_heads`` is ``{"q": [[0], [1], [2], [3]], "k": [[0, 1], [2, 3]]}``.
    """

    members: tuple[tuple[ProjectionParam, tuple[Section, ...]], ...]
    logits_of_heads: dict[str, list[list[int]]]


def read_layer(layer: LayerKey, count: int, projections: Sequence[ProjectionParam], config: ClipConfig) -> Layer:
    """Finds the projections, their heads and the logits of each head, for a layer for which the user passed ``count`` logits."""
    members = [member for member in projections if belongs_to(member.projection, layer)]
    candidates = {kind: _only_weight(layer, kind, members) for kind in ("q", "k", "kv_b", "qkv")}
    weights = {kind: weight for kind, weight in candidates.items() if weight is not None}
    if set(weights) not in ({"q", "k"}, {"q", "kv_b"}, {"qkv"}):
        raise ConfigError(_missing_projections(layer, set(weights), members, projections))
    sections = {kind: _sections_of(layer, weight, config, mla="kv_b" in weights) for kind, weight in weights.items()}
    head_counts = {section.side: section.heads for parts in sections.values() for section in parts}
    chosen = [member for member in members if member.projection.kind in weights]
    for member in chosen:
        weight = weights[member.projection.kind].named
        rows, weight_rows = member.named.param.shape[0], weight.param.shape[0]
        if rows != weight_rows:
            raise ConfigError(
                f"{member.named.name} (layer {layer!r}) has {rows} rows, its weight {weight.name} has {weight_rows}."
            )
    return Layer(
        tuple((member, sections[member.projection.kind]) for member in chosen),
        _logits_of_heads(layer, count, head_counts, config),
    )


def _only_weight(layer: LayerKey, kind: str, members: Sequence[ProjectionParam]) -> ProjectionParam | None:
    weights = [member for member in members if member.projection.kind == kind and not member.projection.bias]
    if len(weights) > 1:
        names = ", ".join(weight.named.name for weight in weights)
        raise ConfigError(
            f"qk_logits: layer {layer!r} has {len(weights)} {kind} projections: {names}. Name the attention module instead of "
            f"the number, as in qk_logits={{{weights[0].projection.name.rsplit('.', 2)[0]!r}: ...}}."
        )
    return weights[0] if weights else None


def _missing_projections(
    layer: LayerKey, kinds: set[str], members: Sequence[ProjectionParam], projections: Sequence[ProjectionParam]
) -> str:
    names = [member.named.name for member in (members or projections) if not member.projection.bias]
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    what = "has no query and key projections"
    if kinds:
        what = f"has {' and '.join(sorted(kinds))} projections, which do not make a pair of queries and keys"
    return (
        f"qk_logits: layer {layer!r} {what} in this optimizer. Found {'in it' if members else 'in all layers'}: "
        f"{listed or 'none'}. Pass logits only for layers whose projections this optimizer has (a pipeline stage: its own), or "
        'give patterns for their names in clip_config["patterns"].'
    )


def _sections_of(layer: LayerKey, weight: ProjectionParam, config: ClipConfig, *, mla: bool) -> tuple[Section, ...]:
    """The heads in a weight, checked against its rows. ``mla`` says whether the layer has MLA's projections."""
    name, shape, kind = weight.named.name, tuple(weight.named.param.shape), weight.projection.kind
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
        found = find_matrices(name, shape, matrix_options_of(weight.named.param_group))
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
    """A section whose heads have so many rows that are scaled by √γ, by γ, and not at all."""
    root, full, _ = head
    heads, rest = divmod(rows.length, sum(head))
    if rest or not heads:
        raise ConfigError(
            f"{where} has {rows.length} rows, which is not a whole number of heads of {sum(head)} rows ({what} in clip_config)."
        )
    return Section(side, rows, heads, sum(head), root, full)


def _logits_of_heads(layer: LayerKey, count: int, heads: Mapping[str, int], config: ClipConfig) -> dict[str, list[list[int]]]:
    """For the sides "q" and "k", the logits of each head. ``heads`` has the number of heads of each side."""
    given: tuple[tuple[str, Sequence[int] | None], ...] = (("q_indices", config.q_indices), ("k_indices", config.k_indices))
    for key, indices in given:
        if indices is not None and len(indices) != count:
            raise ConfigError(
                f"qk_logits: layer {layer!r} has {count} logits, clip_config has {len(indices)} {key}: one per logit."
            )
    if config.q_indices is None and count != heads["q"]:
        raise ConfigError(
            f"qk_logits: layer {layer!r} has {count} logits but {heads['q']} query heads. Pass one logit per query head, or "
            "give q_indices and k_indices in clip_config, the heads that each logit belongs to."
        )
    q_indices = range(count) if config.q_indices is None else config.q_indices
    if config.k_indices is None and heads["q"] % heads["k"]:
        raise ConfigError(
            f"layer {layer!r} has {heads['q']} query heads, which cannot share {heads['k']} key heads equally: give k_indices."
        )
    shared = max(1, heads["q"] // heads["k"])
    k_indices = [head // shared for head in q_indices] if config.k_indices is None else config.k_indices
    logits_of_heads: dict[str, list[list[int]]] = {}
    for side, indices in (("q", q_indices), ("k", k_indices)):
        if max(indices) >= heads[side]:
            raise ConfigError(
                f"clip_config: {side}_indices name head {max(indices)}, but layer {layer!r} has {heads[side]} heads."
            )
        logits_of_heads[side] = [[] for _ in range(heads[side])]
        for logit, head in enumerate(indices):
            logits_of_heads[side][head].append(logit)
    return logits_of_heads


def check_overlap(layers: Mapping[LayerKey, Layer]) -> None:
    """Raises if two keys mean the same layer, which would be scaled twice."""
    key_of: dict[str, LayerKey] = {}
    for key, layer in layers.items():
        for member, _ in layer.members:
            name = member.named.name
            if name in key_of:
                raise ConfigError(f"qk_logits: the layers {key_of[name]!r} and {key!r} both mean {name}.")
            key_of[name] = key
