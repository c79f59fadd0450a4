"""p·decay − rate·update of large tensors in one pass over memory instead of two, where that gives the same bits.

torch has no operation for just this. Its ``addr`` adds an outer product, beta·p + u·vᵀ, and gives the update if v is the single
number −rate. torch processes most elements in vectors. There ``addr`` rounds like the two operations that it replaces, a product
and ``add_`` with ``alpha``, if the compiler has fused its multiplication and addition. The last elements, which torch processes
one by one, may be rounded in another way, and so may those at the borders between threads. ``addr`` is therefore used for whole
vectors only, on one thread, and only if a trial has shown the same bits. All other elements take two operations.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

LARGE = 1 << 15  # elements from which one pass saves more than making its views costs
VECTOR_MULTIPLE = 64  # a multiple of the elements that torch processes at a time, at most two vectors of 16


@lru_cache
def rounds_alike(dtype: torch.dtype) -> bool:
    """Whether ``addr`` on whole vectors rounds like a product and ``add_`` with ``alpha``, wherever the vectors begin."""
    generator = torch.Generator("cpu").manual_seed(0)
    p, u = (torch.randn(64 * VECTOR_MULTIPLE + 3, generator=generator, device="cpu").to(dtype) for _ in range(2))

    def same_bits(start: int, size: int, decay: float, rate: float) -> bool:
        before, update = p[start : start + size], u[start : start + size]
        after = before.clone()
        _update_whole_vectors(after, update, decay, _minus(rate, after))
        return torch.equal(after, before.mul(decay).add_(update, alpha=-rate))

    sizes, numbers = (VECTOR_MULTIPLE, 3 * VECTOR_MULTIPLE, 64 * VECTOR_MULTIPLE), ((0.9, 0.7), (0.9999, 0.0123), (1.1, -0.3))
    return all(same_bits(start, size, *pair) for start in (0, 1, 3) for size in sizes for pair in numbers)


def apply_to_large(params: list[Tensor], updates: list[Tensor], decay: float, rate: float) -> tuple[list[Tensor], list[Tensor]]:
    """p ← p·decay − rate·update for large parameters, where one pass is possible. The parameters have one dtype.

    Returns what is still to be updated, with its updates: the other parameters, and the last elements of the large ones.
    """
    # With beta = 0, ``addr`` forgets a NaN and the sign of a zero.
    if decay == 0 or torch.get_num_threads() > 1 or not params or not rounds_alike(params[0].dtype):
        return params, updates
    remaining_params: list[Tensor] = []
    remaining_updates: list[Tensor] = []
    minus_rate = _minus(rate, params[0])
    for param, update in zip(params, updates, strict=True):
        size = param.numel()
        if size >= LARGE and param.dtype is update.dtype and param.is_contiguous() and update.is_contiguous():
            last = size % VECTOR_MULTIPLE
            if not last:
                _update_whole_vectors(param, update, decay, minus_rate)
                continue
            param, update = param.view(-1), update.view(-1)
            _update_whole_vectors(param[: size - last], update[: size - last], decay, minus_rate)
            param, update = param[size - last :], update[size - last :]
        remaining_params.append(param)
        remaining_updates.append(update)
    return remaining_params, remaining_updates


def _minus(rate: float, param: Tensor) -> Tensor:
    return torch.tensor([-rate], dtype=param.dtype, device=param.device)  # not on the default device, which a user may set


def _update_whole_vectors(param: Tensor, update: Tensor, decay: float, minus_rate: Tensor) -> None:
    param.view(-1, 1).addr_(update.view(-1), minus_rate, beta=decay, alpha=1)
