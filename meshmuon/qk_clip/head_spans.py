"""Where the heads of each layer are in the vector that ``MaxLogits`` reduces over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ConfigError
from .names import LayerKey


class ObservedHeads(NamedTuple):
    """What a rank tells the others before the first reduction."""

    tp_rank: int  # its position among the tensor parallel ranks, which divide the heads
    tp_size: int  # number of tensor parallel ranks
    heads: tuple[tuple[LayerKey, int], ...]  # layers, each with the number of heads that this rank has observed


@dataclass(frozen=True, slots=True)
class Span:
    """Where the heads of a layer are in the packed vector.

    With 8 heads over 2 tensor parallel ranks, the second layer has start=8 and stop=16, and rank 1 has own=slice(12, 16).
    """

    start: int
    stop: int
    own: slice


def assign_spans(observed: dict[int, object], tp_rank: int) -> dict[LayerKey, Span]:
    """Assigns each layer its span of the packed vector, from what all ranks have ``observed``; the same on all ranks."""
    counts: dict[LayerKey, dict[int, int]] = {}  # by layer and position among the tensor parallel ranks, the number of heads
    tp_sizes = set()
    for rank, heads_of_rank in observed.items():
        assert isinstance(heads_of_rank, ObservedHeads)
        tp_sizes.add(heads_of_rank.tp_size)
        for layer, heads in heads_of_rank.heads:
            known = counts.setdefault(layer, {}).setdefault(heads_of_rank.tp_rank, heads)
            if known != heads:
                raise ConfigError(
                    f"MaxLogits: layer {layer!r} has {heads} heads on rank {rank} and {known} on another rank at the same "
                    "position of its tp_group."
                )
    if not counts:
        raise ConfigError("MaxLogits: no rank has observed anything: run a forward inside collecting() before collect().")
    if len(tp_sizes) > 1:
        raise ConfigError(f"MaxLogits: ranks have tp_groups of different sizes: {sorted(tp_sizes)}.")
    spans, start = {}, 0
    for layer, head_counts in counts.items():
        if set(head_counts) != set(range(max(tp_sizes))):
            raise ConfigError(
                f"MaxLogits: only {sorted(head_counts)} of {max(tp_sizes)} tensor parallel ranks have observed layer {layer!r}."
            )
        own_start = start + sum(head_counts[position] for position in range(tp_rank))
        stop = start + sum(head_counts.values())
        spans[layer] = Span(start, stop, slice(own_start, own_start + head_counts[tp_rank]))
        start = stop
    return spans
