"""Norms of this rank's own tensors, batched by device and dtype; their reduction over ranks; scaling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError
from ..torch_compat import device_has_foreach, foreach_is_faster
from ..transport import reduce_largest, reduce_sum

_BLOCK = 1 << 16  # CPUs add float32 elements one by one: the norm of 10 million elements at once is off by 4e-4
_HALF = (torch.float16, torch.bfloat16)


def local_norms(tensors: Sequence[Tensor], order: float, foreach: bool | None) -> list[Tensor]:
    """Norms of the tensors, large ones in blocks: one vector of norms per device and dtype."""
    vectors = []
    for (device, dtype), batch in _by_device_and_dtype(
        block for tensor in tensors for block in _blocks(tensor)
    ).items():
        sum_dtype = _sum_dtype(dtype, device, order)
        if _use_foreach(batch, device, foreach):
            norms = list(torch._foreach_norm(batch, order, dtype=sum_dtype))
        else:
            norms = [torch.linalg.vector_norm(tensor, order, dtype=sum_dtype) for tensor in batch]
        vectors.append(torch.stack(norms))
    return vectors


def reduce_norm(
    value: Tensor, nan: Tensor, flags: tuple[float, float, float], groups: Sequence[dist.ProcessGroup], *, largest: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm over one group after the other, each with one all-reduce; the host does not wait for the device.

    ``value`` is the sum of powers, or the largest magnitude, of what this rank counts, and ``nan`` above 0 if a NaN was
    left out of it, since a maximum over ranks may lose it. ``flags``: whether this rank cannot continue; a number whose
    sum over ranks is 0 if all were given the same; its negative, so that for maxima the two add up to 0 in that case.

    Returns the value of all ranks, whether some rank left out a NaN, and whether some rank cannot continue or ranks
    differ.
    """
    # Filled, not copied from the host: a copy would make the host wait.
    packed = torch.stack([value, nan, *(torch.full_like(value, flag) for flag in flags)])
    for group in groups:
        (reduce_largest if largest else reduce_sum)(packed, group, phase="reduction of the gradients' norm")
        # Later groups join ranks with other parameters: they are only told whether the ranks before them differed.
        packed[3] += packed[4]
        packed[4] = 0.0
    value, nan, failed, difference, _ = packed.unbind()
    return value, nan > 0, (failed != 0) | (difference != 0)


def scale_all(tensors: Sequence[Tensor], factor: Tensor, foreach: bool | None) -> None:
    """Multiplies every tensor by ``factor``, which has no dims, in place."""
    for (device, _), batch in _by_device_and_dtype(tensors).items():
        local_factor = factor.to(device)
        if _use_foreach(batch, device, foreach):
            torch._foreach_mul_(batch, local_factor)
        else:
            for tensor in batch:
                tensor.mul_(local_factor)


def _sum_dtype(dtype: torch.dtype, device: torch.device, order: float) -> torch.dtype | None:
    """The dtype in which a tensor's powers are summed; None for its own dtype."""
    if device.type == "cpu" and order not in (2.0, math.inf) and dtype in (*_HALF, torch.float32):
        return torch.float64  # summed one by one: in float32 the norm of 65,536 elements is off by 1e-5
    return torch.float32 if dtype in _HALF else None  # a norm in half precision has two digits


def _blocks(tensor: Tensor) -> list[Tensor]:
    if tensor.device.type != "cpu" or tensor.numel() <= _BLOCK:
        return [tensor]
    dense = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))  # in the order of memory
    if dense.is_contiguous():
        return list(torch.split(dense.view(-1), _BLOCK))
    # Sums over strided memory are not vectorised: shorter blocks.
    rows = max(1, _BLOCK // 16 * tensor.size(0) // tensor.numel())
    return list(torch.split(tensor, rows))


def _by_device_and_dtype(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    batches: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        batches.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return batches


def _use_foreach(tensors: list[Tensor], device: torch.device, foreach: bool | None) -> bool:
    if foreach and not device_has_foreach(device):
        raise ConfigError(f"foreach=True, but {device.type} has no batched kernels: pass foreach=None or False.")
    return bool(foreach) or (foreach is None and foreach_is_faster(tensors, device))
