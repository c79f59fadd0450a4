"""Ranks as positions in tensors: the ranks of a plan need not be consecutive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RankIndex:
    """The positions of ranks in the order of a plan: of ranks 2, 3 and 7 they are 0, 1 and 2."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._first = self.ranks[0] if self.ranks else 0
        consecutive = self.ranks == tuple(range(self._first, self._first + len(self.ranks)))
        self._position = None if consecutive else {rank: position for position, rank in enumerate(self.ranks)}

    def __len__(self) -> int:
        return len(self.ranks)

    def of(self, rank: int) -> int:
        """The position of one rank."""
        return rank - self._first if self._position is None else self._position[rank]

    def tensor(self, ranks: Sequence[Sequence[int]] | Sequence[int]) -> Tensor:
        """The positions of ranks, in the shape of ``ranks``."""
        values = torch.tensor(ranks, dtype=torch.int64)
        if self._position is None:
            return values - self._first
        return torch.tensor([self._position[rank] for rank in values.flatten().tolist()], dtype=torch.int64).view(values.shape)
