"""Bytes between blocks of ranks, for the map of traffic: nodes, several nodes where there are many, or ranks on one node."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from ...layout import ShardedMatrix
from ...plan import Plan

_MOST_BLOCKS = 64


def bytes_between_blocks(plan: Plan) -> dict[str, Any]:
    """What blocks send each other in a step, in both directions, from the first rank of every piece to its last."""
    counter = _BlockCounter(plan)
    weights: dict[tuple[int, int], int] = defaultdict(int)  # (number of the matrix, owner) → bytes per element
    for wave in plan.wave_owners.itemsizes:
        for number, itemsizes in wave.items():
            for owner, itemsize in itemsizes.items():
                weights[number, owner] += itemsize
    for (number, owner), itemsize in weights.items():
        counter.add(plan.wave_owners.matrices[number], owner, itemsize)
    return {"ranks_per_block": counter.block_ranks, "bytes": counter.blocks.tolist()}  # bytes[sender][receiver]


class _BlockCounter:
    """Adds one owner's matrices after the other."""

    def __init__(self, plan: Plan) -> None:
        self._position = {rank: k for k, rank in enumerate(plan.ranks)}
        per_node = 1 if plan.options.nodes is None else max(map(len, plan.options.nodes.ranks))
        nodes = math.ceil(len(plan.ranks) / per_node)
        self.block_ranks = per_node * math.ceil(nodes / _MOST_BLOCKS)
        self._count = math.ceil(len(plan.ranks) / self.block_ranks)
        self.blocks = torch.zeros(self._count, self._count, dtype=torch.int64)
        self._held: dict[tuple[ShardedMatrix, int | None], Tensor] = {}  # elements by block, of one replica or of all

    def add(self, sharded: ShardedMatrix, owner: int, itemsize: int) -> None:
        piece, replica = sharded.holdings[owner]
        block = self._position[owner] // self.block_ranks
        self.blocks[:, block] += self._by_block(sharded, replica) * itemsize
        self.blocks[block] += self._by_block(sharded, None) * itemsize
        self.blocks[block, block] -= 2 * sharded.sizes[piece] * itemsize

    def _by_block(self, sharded: ShardedMatrix, replica: int | None) -> Tensor:
        if (sharded, replica) not in self._held:
            held = [(rank, sharded.sizes[p]) for rank, (p, of) in sharded.holdings.items() if replica is None or of == replica]
            positions, sizes = zip(*((self._position[rank], size) for rank, size in held), strict=True)
            by_block = torch.zeros(self._count, dtype=torch.int64)
            self._held[sharded, replica] = by_block.index_add_(
                0, torch.tensor(positions) // self.block_ranks, torch.tensor(sizes)
            )
        return self._held[sharded, replica]
