"""Layouts that mean one thing in every supported version of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Replicate, _StridedShard

from meshmuon.torch_compat import strided_shards_nest


def clearly_cut(shape: Sequence[int], grid: Sequence[int], placements: Sequence[Any]) -> tuple[Any, ...]:
    """The placements; in torch 2.9, which cuts uneven strided shards in two ways and where meshmuon refuses them, plain ones."""
    if strided_shards_nest():
        return tuple(placements)
    lengths = [{size} for size in shape]
    clear: list[Any] = []
    for parts, placement in zip(grid, placements, strict=True):
        if isinstance(placement, Replicate):
            clear.append(placement)
            continue
        if isinstance(placement, _StridedShard) and not all(_nests(size, parts, placement) for size in lengths[placement.dim]):
            placement = Shard(placement.dim)
        clear.append(placement)
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        lengths[placement.dim] = {
            sum(len(pieces[part]) for piece in torch.arange(size).chunk(factor) if part < len(pieces := piece.chunk(parts)))
            for size in lengths[placement.dim]
            for part in range(parts)
        }
    return tuple(clear)


def _nests(size: int, parts: int, placement: _StridedShard) -> bool:
    """Whether torch's own cut is that of pieces which are cut themselves."""
    factor = int(placement.split_factor)
    shards = _StridedShard(0, split_factor=factor)._split_tensor(torch.arange(size), parts, with_padding=False)[0]
    pieces = [piece.chunk(parts) for piece in torch.arange(size).chunk(factor)]
    nested = [torch.cat([torch.arange(0), *(piece[part] for piece in pieces if part < len(piece))]) for part in range(parts)]
    return all(map(torch.equal, shards, nested))
