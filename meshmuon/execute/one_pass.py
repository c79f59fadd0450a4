"""p·decay − rate·update of large tensors in one pass over memory instead of two, where that gives the same bits.

torch has no operation for it by name. ``addr`` adds an outer product, beta·p + u·vᵀ, which is the same if v is the one number
−rate. In its vectors it rounds like the two operations that it replaces, a product and a fused multiply-add, if the compiler has
chosen so. The last elements, which torch processes one by one, may be rounded in another way, and so may those at the borders
between threads. Only whole vectors are therefore left to it, on one thread, where a trial has shown the same bits. The rest is
done in two operations, as everywhere.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

LARGE = 1 << 15  # elements from which one pass is worth its views
VECTORS = 64  # elements; a multiple of what torch processes at a time, which is at most two vectors of 16


@lru_cache
def rounds_alike(dtype: torch.dtype) -> bool:
    """Whether ``addr`` on whole vectors rounds like a product and ``add_`` with ``alpha``, wherever the vectors begin."""
    generator = torch.Generator("cpu").manual_seed(0)
    p, u = (torch.randn(64 * VECTORS + 3, generator=generator, device="cpu").to(dtype) for _ in range(2))

    def alike(start: int, size: int, decay: float, rate: float) -> bool:
        before, update = p[start : start + size], u[start : start + size]
        after = before.clone()
        _subtract_whole(after, update, decay, rate)
        return torch.equal(after, before.mul(decay).add_(update, alpha=-rate))

    sizes, numbers = (VECTORS, 3 * VECTORS, 64 * VECTORS), ((0.9, 0.7), (0.9999, 0.0123), (1.1, -0.3))
    return all(alike(start, size, *pair) for start in (0, 1, 3) for size in sizes for pair in numbers)


def apply_to_large(params: list[Tensor], updates: list[Tensor], decay: float, rate: float) -> tuple[list[Tensor], list[Tensor]]:
    """p ← p·decay − rate·update for those for which one pass is possible and worth it. Returns the others, with their updates."""
    others: list[Tensor] = []
    updates_of_others: list[Tensor] = []
    possible = torch.get_num_threads() == 1 and decay != 0  # with beta = 0, ``addr`` forgets a NaN and the sign of a zero
    for param, update in zip(params, updates, strict=True):
        if possible and param.numel() >= LARGE and _fits(param, update):
            flat, change = param.view(-1), update.view(-1)
            whole = flat.numel() - flat.numel() % VECTORS
            _subtract_whole(flat[:whole], change[:whole], decay, rate)
            flat, change = flat[whole:], change[whole:]
            if not flat.numel():
                continue
            param, update = flat, change
        others.append(param)
        updates_of_others.append(update)
    return others, updates_of_others


def _fits(param: Tensor, update: Tensor) -> bool:
    same = param.dtype == update.dtype and param.is_contiguous() and update.is_contiguous()
    return same and rounds_alike(param.dtype)


def _subtract_whole(param: Tensor, update: Tensor, decay: float, rate: float) -> None:
    minus_rate = torch.tensor([-rate], dtype=param.dtype, device=param.device)  # not on the default device, which a user may set
    param.view(-1, 1).addr_(update, minus_rate, beta=decay, alpha=1)
