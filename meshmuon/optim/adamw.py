"""AdamW for the parameters that are not matrices: torch's own functional step, with torch's own state names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.adamw import adamw

from ..params.checks import adamw_betas, adamw_eps
from ..params.dtensors import as_dtensor, memory_order, trailing_elements
from ..params.option_table import ParamGroup
from ..state.adamw_state import can_fuse, empty_laid_out_like, init_state
from ..torch_compat import local_part, mark_overwritten

__all__ = ["adamw_step"]

_LONGEST_VECTOR = 64


def adamw_step(
    group: ParamGroup,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    skip_mask: Tensor | None = None,
) -> None:
    """One AdamW step on the local part of ``params``, exactly as ``torch.optim.AdamW(fused=True)`` does it.

    Where ``skip_mask``, a boolean on a device, is true, nothing changes.
    """
    for fused in (True, False):
        chosen = [k for k, param in enumerate(params) if can_fuse(local_part(param)) is fused]
        if chosen:
            _step(group, [params[k] for k in chosen], [grads[k] for k in chosen], [states[k] for k in chosen], (fused, skip_mask))


def _step(
    group: ParamGroup,
    params: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Any]],
    how: tuple[bool, Tensor | None],
) -> None:
    fused, skip_mask = how
    for param, state in zip(params, states, strict=True):
        if "exp_avg" not in state:
            init_state(param, state)
        for key in ("exp_avg", "exp_avg_sq"):
            if local_part(state[key]).stride() != local_part(param).stride():
                state[key] = empty_laid_out_like(param, state[key].dtype).copy_(state[key])
    sets = [
        _Tensors(
            local,
            _in_layout_of(local, local_part(grad)),
            local_part(state["exp_avg"]),
            local_part(state["exp_avg_sq"]),
            state["step"],
        )
        for local, grad, state in zip([local_part(param) for param in params], grads, states, strict=True)
    ]
    cut = [_as_on_one_device(param, one) if fused else ([one], None) for param, one in zip(params, sets, strict=True)]
    rows = [one for some, _ in cut for one in some]
    beta1, beta2 = adamw_betas(group)
    before = _snapshot(rows) if skip_mask is not None and not fused else None
    adamw(
        [one.param for one in rows],
        [one.grad for one in rows],
        [one.exp_avg for one in rows],
        [one.exp_avg_sq for one in rows],
        [],
        [one.step for one in rows],
        fused=fused,
        foreach=None if fused else False,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"] if isinstance(group["lr"], Tensor) else float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        eps=adamw_eps(group),
        maximize=group["maximize"],
        found_inf=skip_mask.float() if skip_mask is not None and fused else None,
    )
    if before is not None and skip_mask is not None:
        _restore(rows, before, skip_mask)
    for _, put_back in cut:
        if put_back is not None:
            put_back()
    if fused:  # which does not tell autograd
        mark_overwritten([one.param for one in sets if not one.param.is_inference()])


def _snapshot(rows: Sequence[_Tensors]) -> list[_Tensors]:
    return [_Tensors(*(tensor.clone() for tensor in row)) for row in rows]


def _restore(rows: Sequence[_Tensors], before: Sequence[_Tensors], skip_mask: Tensor) -> None:
    """Undoes a step where ``skip_mask`` is true: only torch's fused kernel can leave it out by itself."""
    for row, old in zip(rows, before, strict=True):
        for tensor, was in zip(row, old, strict=True):
            # Step counts of such parameters are in host memory, and only the host must wait for what comes to it.
            near = skip_mask.to(tensor.device, non_blocking=tensor.device.type != "cpu")
            tensor.copy_(torch.where(near, was, tensor))


class _Tensors(NamedTuple):
    """What AdamW reads and writes of one parameter, or, flat, of a part of it."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    def part(self, start: int, stop: int) -> _Tensors:
        """Elements [start, stop); with a step count of its own, since each part would count the step once more."""
        param, grad, exp_avg, exp_avg_sq = (one[start:stop] for one in self[:4])
        return _Tensors(param, grad, exp_avg, exp_avg_sq, self.step.clone())

    def padded(self, size: int) -> _Tensors:
        """A copy with zeros behind."""
        param, grad, exp_avg, exp_avg_sq = (F.pad(one, (0, size - len(one))) for one in self[:4])
        return _Tensors(param, grad, exp_avg, exp_avg_sq, self.step)


def _as_on_one_device(param: Tensor, one: _Tensors) -> tuple[list[_Tensors], Callable[[], None] | None]:
    """Cuts a shard so that every element meets the instructions that it would meet in the whole tensor.

    torch's fused kernel on CPU takes whole vectors first and the rest of a tensor one by one, with another rounding. Where a
    shard ends differently from the whole tensor, what would be inside a vector there is padded to one here.
    """
    sharded, held, total = as_dtensor(param), one.param.numel(), param.numel()
    if sharded is None or param.device.type != "cpu" or not held or not (held % _LONGEST_VECTOR or total % _LONGEST_VECTOR):
        return [one], None
    vector = vector_length(param.dtype)
    inside = held - trailing_elements(sharded, total % vector)
    even = inside - inside % vector
    order = memory_order(param)
    if even == inside or not all(tensor.permute(order).is_contiguous() for tensor in one[:4]):
        return [one], None
    weight, grad, exp_avg, exp_avg_sq = (tensor.permute(order).view(-1) for tensor in one[:4])
    one = _Tensors(weight, grad, exp_avg, exp_avg_sq, one.step)
    odd = one.part(even, inside)
    padded = odd.padded(vector)

    def put_back() -> None:
        for whole, part in zip(odd[:4], padded[:4], strict=True):
            whole.copy_(part[: len(whole)])

    rows = [one.part(0, even)._replace(step=one.step), padded, one.part(inside, held)]
    return rows, put_back


@lru_cache
def vector_length(dtype: torch.dtype) -> int:
    """Elements that torch's fused kernel takes at once on this CPU; 1 if the place of an element does not matter.

    Found by trial, since it depends on how torch was built: the smallest size of chunks in which a tensor can be stepped without
    changing a bit.
    """
    generator = torch.Generator().manual_seed(0)
    values = [torch.rand(_LONGEST_VECTOR * 8, generator=generator).to(dtype) for _ in range(4)]
    step, whole = torch.ones(()), [value.clone() for value in values]

    def run(lists: list[list[Tensor]], steps: list[Tensor]) -> None:
        numbers = {"beta1": 0.9, "beta2": 0.95, "lr": 0.01, "weight_decay": 0.1, "eps": 1e-8}
        untyped: Any = {"fused": True, "foreach": None, "amsgrad": False, "maximize": False, **numbers}
        adamw(lists[0], lists[1], lists[2], lists[3], [], steps, **untyped)

    run([[value] for value in whole], [step.clone()])
    for size in (1, 2, 4, 8, 16, 32):
        chunks = [list(torch.split(value.clone(), size)) for value in values]
        run(chunks, [step.clone() for _ in chunks[0]])
        if torch.equal(torch.cat(chunks[0]), whole[0]):
            return size
    return _LONGEST_VECTOR


def _in_layout_of(param: Tensor, grad: Tensor) -> Tensor:
    """``grad`` in the parameter's memory order: fused kernels walk both by address and would mix up the entries."""
    if grad.stride() == param.stride() and grad.dtype == param.dtype:
        return grad
    return empty_laid_out_like(param, param.dtype).copy_(grad)
