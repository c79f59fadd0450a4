"""A machine that rounds by address, by place in a tensor and by batch: faults that few machines show appear on every
one.

Under ``HostileArithmetic`` the last bit of a result changes

* of a product, for every matrix of which an operand or the result does not begin at a multiple of 64 bytes (as MKL does
  on AMD);
* of a product of 16 bits, if an operand or the result is transposed in memory (as oneDNN's may);
* of ``a + alpha·b`` and fused AdamW, for the last elements of a tensor (as kernels with vectors do);
* with ``company=True``, of a product, for every matrix of a batch but the first (as BLAS libraries with several threads
  do);

and memory for workspaces is handed out at addresses that are no multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from meshmuon.execute.elementwise import adds_uniformly
from meshmuon.optim.adamw import vector_length

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_")
SCALED_SUMS = ("aten::add", "aten::add_", "aten::_foreach_add", "aten::_foreach_add_")
LINE, VECTOR = 64, 16  # bytes, elements


class HostileArithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes last bits as the module says; ``nudged`` counts how often it did."""

    def __init__(self, *, company: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._company = company
        self.nudged = 0  # how often a last bit was changed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::empty" and len(args[0]) == 1 and args[0][0]:
            return func([args[0][0] + 3], *args[1:], **kwargs)[3:]
        if name == "aten::_fused_adamw_":
            return self._adamw(func, args, kwargs)
        result = func(*args, **kwargs)
        if name in PRODUCTS:
            self._nudge_matrices(
                result, [tensor for tensor in (*args, result) if type(tensor) in (Tensor, nn.Parameter)]
            )
        elif name in SCALED_SUMS and kwargs.get("alpha", 1) != 1:
            for tensor in args[0] if isinstance(args[0], (list, tuple)) else [result]:
                self._nudge_tail(tensor)
        return result

    def _adamw(self, func: Any, args: Any, kwargs: Any) -> None:
        """All elements by whole vectors, whatever this machine would do with the last ones, which are changed
        afterwards.
        """
        lists = args[:4]  # parameters, gradients, first and second moments
        orders = [sorted(range(param.dim()), key=param.stride, reverse=True) for param in lists[0]]
        flat = [
            [tensor.permute(order).reshape(-1) for tensor, order in zip(tensors, orders, strict=True)]
            for tensors in lists
        ]
        padded = [[F.pad(row, (0, -len(row) % 64)) for row in rows] for rows in flat]
        func(*padded, *args[4:], **kwargs)
        for tensors, rows in zip(lists, padded, strict=True):
            for tensor, order, row in zip(tensors, orders, rows, strict=True):
                turned = tensor.detach().permute(order)
                turned.copy_(row[: tensor.numel()].view(turned.shape))
        for tensor in (*lists[0], *lists[2]):
            self._nudge_tail(tensor)

    def _nudge_matrices(self, result: Tensor, operands: list[Tensor]) -> None:
        batches = [tensor if tensor.dim() == 3 else tensor.unsqueeze(0) for tensor in (*operands, result)]
        for k, matrix in enumerate(batches[-1]):
            addresses = [batch.data_ptr() + k * batch.stride(0) * batch.element_size() for batch in batches]
            transposed = any(batch.element_size() == 2 and batch.stride(1) < batch.stride(2) for batch in batches)
            if any(address % LINE for address in addresses) or transposed or (self._company and k):
                self._nudge(matrix, torch.ones_like(matrix, dtype=torch.bool))

    def _nudge_tail(self, result: Tensor) -> None:
        if type(result) not in (Tensor, nn.Parameter) or not result.dim():
            return
        last = torch.zeros_like(result, dtype=torch.bool)  # in the same order of memory if that has no gaps
        order = sorted(range(result.dim()), key=result.stride, reverse=True)
        row = last.permute(order).reshape(-1) if result.permute(order).is_contiguous() else last
        if rest := row.size(-1) % VECTOR:
            row[..., -rest:] = True
            self._nudge(result, last)

    def _nudge(self, result: Tensor, where: Tensor) -> None:
        # Zeros stay zeros: what rounding never touches, such as an update of nothing, stays as it is.
        away = torch.full_like(result, torch.inf)
        result.detach().copy_(torch.where(where & (result != 0), torch.nextafter(result, away), result))
        self.nudged += 1


@contextmanager
def fresh_trials() -> Iterator[None]:
    """Forgets what meshmuon has found out about the machine by trial, on entry and on exit."""
    for trial in (adds_uniformly, vector_length):
        trial.cache_clear()
    try:
        yield
    finally:
        for trial in (adds_uniformly, vector_length):
            trial.cache_clear()


def misplaced(tensor: Tensor, offset: int) -> Tensor:
    """A copy that begins ``offset`` elements behind a multiple of 64 bytes."""
    memory = torch.empty(tensor.numel() + LINE + offset, dtype=tensor.dtype)
    skipped = (-memory.data_ptr() % LINE) // tensor.element_size() + offset
    return memory[skipped : skipped + tensor.numel()].view(tensor.shape).copy_(tensor)
