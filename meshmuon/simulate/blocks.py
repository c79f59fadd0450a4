"""Bytes between blocks of ranks, for the map of traffic: nodes, several nodes where there are many, or ranks on one node."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import ShardedMatrix
from ..plan import Plan
from .rank_index import RankIndex

_MOST_BLOCKS = 64


@dataclass(frozen=True)
class BlockBytes:
    """What blocks send each other in a step, from the first rank of every piece to its last."""

    between: Tensor  # (blocks, blocks): bytes that the ranks of a block send to those of another
    block_ranks: int  # ranks of a block


def bytes_between_blocks(plan: Plan) -> BlockBytes:
    """Counts them, in both directions of the step."""
    counter = _BlockCounter(plan)
    weights: dict[tuple[int, int], int] = defaultdict(int)  # (number of the matrix, owner) → bytes per element
    for wave in plan.wave_owners.itemsizes:
        for number, itemsizes in wave.items():
            for owner, itemsize in itemsizes.items():
                weights[number, owner] += itemsize
    for (number, owner), itemsize in weights.items():
        counter.add(plan.wave_owners.matrices[number], owner, itemsize)
    return BlockBytes(counter.blocks, counter.block_ranks)


class _BlockCounter:
    """Adds one owner's matrices after the other."""

    def __init__(self, plan: Plan) -> None:
        self._index = RankIndex(plan.ranks)
        per_node = 1 if plan.options.nodes is None else max(map(len, plan.options.nodes.ranks))
        nodes = math.ceil(len(plan.ranks) / per_node)
        self.block_ranks = per_node * math.ceil(nodes / _MOST_BLOCKS)
        self._count = math.ceil(len(plan.ranks) / self.block_ranks)
        self.blocks = torch.zeros(self._count, self._count, dtype=torch.int64)
        self._held: dict[tuple[ShardedMatrix, int | None], Tensor] = {}  # elements by block, of one replica or of all

    def add(self, sharded: ShardedMatrix, owner: int, itemsize: int) -> None:
        piece, replica = sharded.holdings[owner]
        block = self._index.of(owner) // self.block_ranks
        self.blocks[:, block] += self._by_block(sharded, replica) * itemsize
        self.blocks[block] += self._by_block(sharded, None) * itemsize
        self.blocks[block, block] -= 2 * sharded.sizes[piece] * itemsize

    def _by_block(self, sharded: ShardedMatrix, replica: int | None) -> Tensor:
        if (sharded, replica) not in self._held:
            held = [(rank, sharded.sizes[p]) for rank, (p, of) in sharded.holdings.items() if replica is None or of == replica]
            ranks, sizes = self._index.tensor([rank for rank, _ in held]), torch.tensor([size for _, size in held])
            by_block = torch.zeros(self._count, dtype=torch.int64)
            self._held[sharded, replica] = by_block.index_add_(0, ranks // self.block_ranks, sizes)
        return self._held[sharded, replica]
