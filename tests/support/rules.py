"""Update rules of the tests' own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drag:
    """Divides each row or column by 1 plus a running mean of its largest element, which it remembers."""

    axis: str = "rows"

    def remembers(self) -> bool:
        return True

    def before(self, momentum: Tensor) -> None: ...

    def after(self, update: Tensor, memory: Tensor | None) -> None:
        assert memory is not None
        assert memory.shape == ((*update.shape[:-1], 1) if self.axis == "rows" else (len(update), 1, update.size(-1)))
        if update.numel():
            memory.mul_(0.5).add_(torch.amax(update.abs(), -1 if self.axis == "rows" else -2, keepdim=True))
            update.div_(1 + memory)
