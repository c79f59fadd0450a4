"""Norms and scaling of this rank's own tensors, batched by device and dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import ConfigError
from ..torch_compat import device_has_foreach, foreach_is_faster

__all__ = ["local_norms", "scale_all"]

_BLOCK = 1 << 16  # a CPU adds float32 up one after the other: 10 million elements at once lose 4e-4 of their norm
_HALF = (torch.float16, torch.bfloat16)


def local_norms(tensors: Sequence[Tensor], order: float, foreach: bool | None) -> list[Tensor]:
    """Norms of the tensors or of blocks of them, one vector per device and dtype."""
    found = []
    for (device, dtype), alike in _batches(block for tensor in tensors for block in _blocks(tensor)).items():
        wanted = _sum_dtype(dtype, device, order)
        if _batched(alike, device, foreach):
            norms = list(torch._foreach_norm(alike, order, dtype=wanted))
        else:
            norms = [torch.linalg.vector_norm(one, order, dtype=wanted) for one in alike]
        found.append(torch.stack(norms))
    return found


def scale_all(tensors: Sequence[Tensor], factor: Tensor, foreach: bool | None) -> None:
    """Multiplies every tensor by ``factor``, which has no dims, in place."""
    for (device, _), alike in _batches(tensors).items():
        here = factor.to(device)
        if _batched(alike, device, foreach):
            torch._foreach_mul_(alike, here)
        else:
            for tensor in alike:
                tensor.mul_(here)


def _sum_dtype(dtype: torch.dtype, device: torch.device, order: float) -> torch.dtype | None:
    """What to add a tensor's powers up in; None if in its own dtype."""
    if device.type == "cpu" and order not in (2.0, math.inf) and dtype in (*_HALF, torch.float32):
        return torch.float64  # these orders are added one after the other: float32 loses 1e-5 of the norm of 65,536 elements
    return torch.float32 if dtype in _HALF else None  # a norm in half precision has two digits


def _blocks(tensor: Tensor) -> list[Tensor]:
    if tensor.device.type != "cpu" or tensor.numel() <= _BLOCK:
        return [tensor]
    dense = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))  # as it lies in memory
    if dense.is_contiguous():
        return list(dense.view(-1).split_with_sizes(_sizes(tensor.numel(), _BLOCK)))
    rows = max(1, _BLOCK // 16 * tensor.size(0) // tensor.numel())  # not vectorised, so that sums run longer
    return list(tensor.split_with_sizes(_sizes(tensor.size(0), rows)))


def _sizes(total: int, most: int) -> list[int]:
    return [min(most, total - start) for start in range(0, total, most)]


def _batches(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return found


def _batched(tensors: list[Tensor], device: torch.device, foreach: bool | None) -> bool:
    if foreach and not device_has_foreach(device):
        raise ConfigError(f"foreach=True, but {device.type} has no batched kernels: pass foreach=None or False.")
    return bool(foreach) or (foreach is None and foreach_is_faster(tensors, device))
