"""The check of weights in host memory on a mesh of devices, as FSDP2's ``CPUOffloadPolicy`` leaves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...optim import Muon
from ...params.dtensors import as_dtensor
from ...torch_compat import dtensor_like
from .check import Finding
from .comparison import Comparison, Net, held, muon_on, named
from .context import Context
from .numerics import seeded

_STEPS = 3
# Powers of two: a host and a device that fuse different operations then round alike all the same. One matrix per batch and wave,
# so that several of them are under way at the same time.
_OPTIONS: dict[str, Any] = {
    "lr": 2.0**-7,
    "momentum": 0.5,
    "weight_decay": 0.125,
    "adjust_lr_fn": lambda rows, cols: 0.5,
    "chunk_size": 1,
}


class ExpertNet(Net):
    """Two layers, whose shards are exchanged, and a stack of experts, which FSDP2 leaves whole on their ranks."""

    def __init__(self, experts: int, width: int, hidden: int, out: int) -> None:
        super().__init__(width, hidden, out)
        self.experts = nn.Parameter(seeded((experts, 7, out), 9))

    def forward(self, x: Tensor) -> Tensor:
        """What all experts make of the output of the two layers."""
        return torch.tanh(torch.einsum("eoi,bi->beo", self.experts, super().forward(x)))


def check_host_memory(context: Context) -> Finding:
    """FSDP2 with and without ``CPUOffloadPolicy``, with the gradients of real passes."""
    if context.device.type == "cpu":
        return Finding("the weights are in host memory anyway", skipped=True)
    return with_and_without_offload(context)


def with_and_without_offload(context: Context) -> Finding:
    """Steps a model of FSDP2 whose weights are in host memory beside one whose weights are on the device."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    world = context.world
    sizes = (2 * world, 24, 3 * world + 1, 2 * world + 3)
    offloaded, resident = (ExpertNet(*sizes).to(context.device) for _ in range(2))
    with context.doing("sharding a model with FSDP2 and CPUOffloadPolicy"):
        fully_shard(offloaded, mesh=context.mesh(world), offload_policy=CPUOffloadPolicy())
        fully_shard(resident, mesh=context.mesh(world))

    def backward(step: int) -> None:
        x = seeded((4, sizes[1]), 100 * step + context.rank).to(context.device)
        offloaded(x).square().mean().backward()

    layout = f"FSDP2 with CPUOffloadPolicy on {world}"
    return stepped_side_by_side(context, layout, named(offloaded), named(resident), backward)


def stepped_side_by_side(
    context: Context, layout: str, params: Mapping[str, Tensor], resident: Mapping[str, Tensor], backward: Callable[[int], None]
) -> Finding:
    """Steps parameters in host memory and the same ones on the device; ``backward`` makes the gradients of the former.

    The matrices must be equal bit for bit: the same device multiplies the same numbers in the same order.
    """
    optimizer = muon_on(params, **_OPTIONS)
    comparison = Comparison(context, params, resident, optimizer, muon_on(resident, **_OPTIONS))
    comparison.against = "weights on the device"
    # AdamW's weights may differ by rounding: a fused kernel of the host steps them, and another one of the device.
    comparison.exact = {name for name, param in params.items() if param.dim() > 1}

    def give_gradients(step: int) -> None:
        backward(step)
        for name, param in params.items():
            resident[name].grad = _on_device(resident[name], param.grad)

    comparison.run(range(_STEPS), give_gradients)
    misplaced = [problem for name, param in params.items() for problem in _misplaced(optimizer, name, param)]
    return comparison.finding(layout, misplaced)


def _on_device(param: Tensor, grad: Tensor | None) -> Tensor:
    """A gradient in host memory, as the same parameter on the device would have it."""
    assert grad is not None
    on_device, sharded = held(grad).to(held(param).device, copy=True), as_dtensor(param)
    return on_device if sharded is None else dtensor_like(sharded, on_device)


def _misplaced(optimizer: Muon, name: str, param: Tensor) -> list[str]:
    """Whether the parameter and its state are where they must be."""
    tensors = {"": param, **{f"{key} of ": value for key, value in optimizer.state[param].items() if isinstance(value, Tensor)}}
    return [
        f"{key}{name} is on {held(value).device}; it must stay in host memory"
        for key, value in tensors.items()
        if held(value).device.type != "cpu"
    ]
