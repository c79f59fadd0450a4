"""AdamW for the parameters that are not matrices: torch's own functional step, with torch's own state names.

torch's fused kernel forms weights of 16 bits in float32 and rounds them once, to nearest. Stochastic rounding needs the
float32 weights, which the kernel does not give: such parameters are stepped here, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.adamw import adamw

from ..device import copy_to, known_to_host
from ..execute import RandomWords, RoundingScratch, advance_counters, chunks_of, elements_held, round_stochastically
from ..params.checks import adamw_betas, adamw_eps
from ..params.dtensors import as_dtensor, held_ranges, memory_order, trailing_elements
from ..params.groups import rounds_stochastically
from ..params.option_table import ParamGroup
from ..state.param_state import COUNTER, can_fuse, empty_laid_out_like, start
from ..torch_compat import local_part, mark_overwritten

_LONGEST_VECTOR = 64
_Member: TypeAlias = tuple[Tensor, Tensor, dict[str, Any]]  # parameter, gradient, state


def adamw_step(
    param_group: ParamGroup,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    skip_mask: Tensor | None = None,
) -> None:
    """One AdamW step on the local part of ``params``, exactly as ``torch.optim.AdamW(fused=True)`` does it.

    Parameters that are rounded stochastically differ from it by rounding. If ``skip_mask``, a boolean tensor without
    dims on a device, is true, nothing changes.
    """
    stochastic, by_kernel = list[_Member](), dict[tuple[bool, torch.device], list[_Member]]()
    for param, grad, state in zip(params, grads, states, strict=True):
        rounds = rounds_stochastically(param, param_group)
        if "exp_avg" not in state or (rounds and COUNTER not in state):
            names = dict(zip(param_group["params"], param_group["param_names"], strict=True))
            start(state, names[param], param, param_group)
        chosen = stochastic if rounds else by_kernel.setdefault((can_fuse(local_part(param)), param.device), [])
        chosen.append((param, grad, state))
    scratch = RoundingScratch()
    for member in stochastic:
        _step_stochastically(param_group, member, scratch, skip_mask)
    advance_counters([state[COUNTER] for _, _, state in stochastic], skip_mask)
    for (fused, device), members in by_kernel.items():
        # torch would copy the mask to host memory without waiting for it.
        mask = None if skip_mask is None else copy_to(skip_mask, device)
        _step(param_group, members, fused=fused, skip_mask=mask)


def _step(param_group: ParamGroup, members: Sequence[_Member], *, fused: bool, skip_mask: Tensor | None) -> None:
    for param, _, state in members:
        for key in ("exp_avg", "exp_avg_sq"):
            if local_part(state[key]).stride() != local_part(param).stride():
                state[key] = empty_laid_out_like(param, state[key].dtype).copy_(state[key])
    chunks: list[_Tensors] = []
    put_back: list[Callable[[], None]] = []
    for param, grad, state in members:
        local = local_part(param)
        moments = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        tensors = _Tensors(local, _in_layout_of(local, local_part(grad)), *moments, state["step"])
        cut, after = _cut_as_on_one_device(param, tensors) if fused else ([tensors], None)
        chunks += cut
        put_back += [] if after is None else [after]
    beta1, beta2 = adamw_betas(param_group)
    lr = param_group["lr"] if isinstance(param_group["lr"], Tensor) else float(param_group["lr"])
    before: list[_Tensors] | None = None
    if skip_mask is not None and not fused:
        before = [_Tensors(*(tensor.clone() for tensor in chunk)) for chunk in chunks]
    adamw(
        [chunk.param for chunk in chunks],
        [chunk.grad for chunk in chunks],
        [chunk.exp_avg for chunk in chunks],
        [chunk.exp_avg_sq for chunk in chunks],
        [],
        [chunk.step for chunk in chunks],
        fused=fused,
        foreach=None if fused else False,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=copy_to(lr, members[0][0].device) if isinstance(lr, Tensor) and not known_to_host(lr) else lr,
        weight_decay=float(param_group["weight_decay"]),
        eps=adamw_eps(param_group),
        maximize=param_group["maximize"],
        found_inf=skip_mask.float() if skip_mask is not None and fused else None,
    )
    if before is not None and skip_mask is not None:  # only torch's fused kernel can skip a step by itself
        for tensor, old in zip(chain(*chunks), chain(*before), strict=True):
            # Per tensor, since step counts of such parameters are in host memory.
            tensor.copy_(torch.where(copy_to(skip_mask, tensor.device), old, tensor))
    for after in put_back:
        after()
    if fused:  # the fused kernel does not tell autograd
        mark_overwritten([local for param, _, _ in members if not (local := local_part(param)).is_inference()])


def _step_stochastically(
    param_group: ParamGroup, member: _Member, scratch: RoundingScratch, skip_mask: Tensor | None
) -> None:
    """One step in float32, of operations that round once; the weights are rounded stochastically, the moments to
    nearest.
    """
    param, grad, state = member
    shard, step = local_part(param), state["step"]
    step.add_(1.0 if skip_mask is None else copy_to((~skip_mask).float(), step.device))
    if not shard.numel():
        return
    beta1, beta2 = adamw_betas(param_group)
    lr, eps = param_group["lr"], adamw_eps(param_group)
    # An lr or a step count on a device stays a tensor: reading it would wait for the device.
    lr = copy_to(lr, param.device).reshape(()) if isinstance(lr, Tensor) and not known_to_host(lr) else float(lr)
    # 0 if the first step is skipped, which uses no result
    count = max(float(step), 1.0) if known_to_host(step) else step
    step_size, root = lr / (1 - beta1**count), (1 - beta2**count) ** 0.5
    decay = 1 - lr * float(param_group["weight_decay"])
    words = RandomWords.of(state[COUNTER], elements_held(param.shape, held_ranges(param), shard.device).hashed())
    moments = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
    for cut in chunks_of(shard.shape, shard.device):
        targets = shard[cut], moments[0][cut], moments[1][cut]

        def take(name: str, value: Tensor) -> Tensor:
            return scratch.take(name, value.shape, torch.float32, value.device)

        weight, mean, square = (
            take(name, x).copy_(x) for name, x in zip(("weight", "mean", "square"), targets, strict=True)
        )
        gradient, change = take("gradient", weight).copy_(local_part(grad)[cut]), take("change", weight)
        if param_group["maximize"]:
            gradient.neg_()
        mean.add_(torch.sub(gradient, mean, out=change).mul_(1 - beta1))
        square.mul_(beta2).add_(torch.mul(gradient, gradient, out=change).mul_(1 - beta2))
        torch.sqrt(square, out=change).div_(root).add_(eps)
        weight.mul_(decay).sub_(torch.div(mean, change, out=change).mul_(step_size))
        round_stochastically(weight, words.cut_out(cut), scratch)
        for target, value in zip(targets, (weight, mean, square), strict=True):
            target.copy_(
                value if skip_mask is None else torch.where(copy_to(skip_mask, value.device), target.float(), value)
            )


class _Tensors(NamedTuple):
    """What AdamW reads and writes of one parameter, or of a chunk of it as flat tensors."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    def changed(self, change: Callable[[Tensor], Tensor], step: Tensor) -> _Tensors:
        """``change`` of all tensors but the step count."""
        return _Tensors(change(self.param), change(self.grad), change(self.exp_avg), change(self.exp_avg_sq), step)

    def chunk(self, start: int, stop: int) -> _Tensors:
        """Elements [start, stop), with a copy of the step count: the kernel adds 1 to the count of every chunk."""
        return self.changed(lambda tensor: tensor[start:stop], self.step.clone())


def _cut_as_on_one_device(param: Tensor, tensors: _Tensors) -> tuple[list[_Tensors], Callable[[], None] | None]:
    """Cuts a shard into chunks so that every element is rounded as it would be in the whole tensor.

    torch's fused kernel on CPU processes whole vectors first and the rest of a tensor element by element, which rounds
    differently. With vectors of 8 elements, a tensor of 20 has 2 vectors and a rest of 4. If rank 0 holds its first 10
    elements, the last 2 of these are inside a vector of the whole tensor but not of the shard: they are padded to a
    vector.

    Returns:
        The chunks, and what copies the results of padded chunks back; None if nothing is padded.
    """
    sharded, held, total = as_dtensor(param), tensors.param.numel(), param.numel()
    if (
        sharded is None
        or param.device.type != "cpu"
        or not held
        or not (held % _LONGEST_VECTOR or total % _LONGEST_VECTOR)
    ):
        return [tensors], None
    vector = vector_length(param.dtype)
    inside = held - trailing_elements(sharded, total % vector)  # elements that are inside vectors of the whole tensor
    even = inside - inside % vector  # elements that are inside vectors of the shard, too
    order = memory_order(param)
    if even == inside or not all(tensor.permute(order).is_contiguous() for tensor in tensors[:4]):
        return [tensors], None
    flat = tensors.changed(lambda tensor: tensor.permute(order).view(-1), tensors.step)
    odd = flat.chunk(even, inside)
    padded = odd.changed(lambda tensor: F.pad(tensor, (0, vector - len(tensor))), odd.step)

    def put_back() -> None:
        for target, result in zip(odd[:4], padded[:4], strict=True):
            target.copy_(result[: len(target)])

    return [flat.chunk(0, even)._replace(step=flat.step), padded, flat.chunk(inside, held)], put_back


@lru_cache
def vector_length(dtype: torch.dtype) -> int:
    """Elements that torch's fused kernel processes at once on this CPU; 1 if the position of an element does not
    matter.

    It depends on how torch was built and is measured: the smallest chunk size in which a tensor can be stepped without
    changing a bit.
    """
    generator = torch.Generator().manual_seed(0)
    values = [torch.rand(_LONGEST_VECTOR * 8, generator=generator).to(dtype) for _ in range(4)]
    step, whole = torch.ones(()), [value.clone() for value in values]

    def run(lists: list[list[Tensor]], steps: list[Tensor]) -> None:
        hyperparameters = {"beta1": 0.9, "beta2": 0.95, "lr": 0.01, "weight_decay": 0.1, "eps": 1e-8}
        untyped: Any = {"fused": True, "foreach": None, "amsgrad": False, "maximize": False, **hyperparameters}
        adamw(lists[0], lists[1], lists[2], lists[3], [], steps, **untyped)

    run([[value] for value in whole], [step.clone()])
    for size in (1, 2, 4, 8, 16, 32):
        chunks = [list(torch.split(value.clone(), size)) for value in values]
        run(chunks, [step.clone() for _ in chunks[0]])
        if torch.equal(torch.cat(chunks[0]), whole[0]):
            return size
    return _LONGEST_VECTOR


def _in_layout_of(param: Tensor, grad: Tensor) -> Tensor:
    """``grad`` in the parameter's memory order: fused kernels read both by address and would mix up their elements."""
    if grad.stride() == param.stride() and grad.dtype == param.dtype:
        return grad
    return empty_laid_out_like(param, param.dtype).copy_(grad)
