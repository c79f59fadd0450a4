"""Checks of steps on layouts, each beside the same steps on one device; also of weights in host memory, and of a
checkpoint.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...optim import DistMuon
from ...params.dtensors import as_dtensor
from ...plan import counted
from ...torch_compat import dtensor_like, local_part
from .comparison import Comparison, Net, muon_on, named
from .context import Context, Finding
from .numerics import seeded

_STEPS, _STRESS_STEPS, _QUICK_STRESS_STEPS = 3, 200, 40
_LONGEST_DELAY = 0.002  # seconds that a rank may come late under stress
# For equal bits on any device. Powers of two: kernels that fuse different operations then still round identically, a
# host too. One matrix per batch and wave, so that several are in flight at the same time.
_EXACT_OPTIONS: dict[str, Any] = {
    "lr": 2.0**-7,
    "momentum": 0.5,
    "weight_decay": 0.125,
    "adjust_lr_fn": lambda rows, cols: 0.5,
    "chunk_size": 1,
}


def _sharded(context: Context, model: nn.Module, *mesh: int, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    with context.doing("sharding a model with FSDP2"):
        fully_shard(model.to(context.device), mesh=context.mesh(*mesh), **options)
    return model


def _compared(context: Context, layout: str, model: nn.Module, whole: nn.Module, **options: Any) -> Finding:
    params, alone = named(model), named(whole.to(context.device))
    comparison = Comparison(context, params, alone, muon_on(params, **options), wire=options.get("comm_dtype"))
    return comparison.run(range(_STEPS)).finding(layout)


def check_fsdp2(context: Context, what: str = "uneven shards", **options: Any) -> Finding:
    """With rows that do not divide."""
    world = context.world
    sizes = (24, 3 * world + 1, 2 * world + 3)
    return _compared(
        context, f"FSDP2 on {world}, {what}", _sharded(context, Net(*sizes), world), Net(*sizes), **options
    )


def check_bf16_wire(context: Context) -> Finding:
    return check_fsdp2(context, "bfloat16 on the wire", comm_dtype=torch.bfloat16)


def check_empty_shards(context: Context) -> Finding:
    """FSDP2 with fewer rows than ranks."""
    world, rows = context.world, max(1, context.world // 2)
    layout, sizes = f"FSDP2 with {counted(rows, 'row')} on {world}", (16, rows, 24)
    return _compared(context, layout, _sharded(context, Net(*sizes), world), Net(*sizes))


def check_hsdp(context: Context) -> Finding:
    replicas, shards = context.two_axes()
    sizes = (24, 3 * shards + 1, 2 * shards + 3)
    model = _sharded(context, Net(*sizes), replicas, shards)
    return _compared(context, f"HSDP on {replicas} × {shards} (replicas × shards)", model, Net(*sizes))


def check_tp_fsdp(context: Context) -> Finding:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    tp, dp = context.two_axes()
    sizes = (4 * tp * dp, 2 * tp * dp, 3 * dp)  # which divide, as FSDP2 over TP asks for
    model, mesh = Net(*sizes).to(context.device), context.mesh(dp, tp)
    with context.doing("sharding a model with tensor parallelism and FSDP2"):
        parallelize_module(model, mesh["b"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(model, mesh=mesh["a"])
    return _compared(context, f"TP × FSDP2 on {tp} × {dp}", model, Net(*sizes))


def check_ep_fsdp(context: Context) -> Finding:
    """Experts over one axis of a mesh, and their rows over the other."""
    from torch.distributed.tensor import Shard, distribute_tensor

    ep, dp = context.two_axes()
    mesh, experts = context.mesh(dp, ep), 2 * ep + 1
    whole = _seeded_params(context, {"experts.w1": (experts, 3 * dp + 1, 12), "experts.w2": (experts, 12, 2 * dp + 1)})
    params = {
        name: nn.Parameter(distribute_tensor(param.detach().clone(), mesh, [Shard(1), Shard(0)], src_data_rank=None))
        for name, param in whole.items()
    }
    return Comparison(context, params, whole).run(range(_STEPS)).finding(f"EP × FSDP on {ep} × {dp}, {experts} experts")


def _seeded_params(context: Context, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: nn.Parameter(seeded(shape, k).to(context.device)) for k, (name, shape) in enumerate(shapes.items())}


def check_ddp(context: Context) -> Finding:
    """Replicas divide the orthogonalisations."""
    sizes = (24, 18, 11)
    with context.doing("wrapping a model with DistributedDataParallel"):
        wrapped = nn.parallel.DistributedDataParallel(Net(*sizes).to(context.device))
    with context.doing("a forward and a backward pass"):
        wrapped(seeded((4, 24), context.rank).to(context.device)).square().mean().backward()
    return _compared(
        context, f"DDP on {context.world}, work divided", wrapped, Net(*sizes), replica_group=dist.group.WORLD
    )


def check_dist_muon(context: Context) -> Finding:
    """Every rank has its own gradients, which ``DistMuon`` averages."""
    shapes = {"a": (13, 9), "b": (6, 14), "c": (5, 5), "d": (1, 7)}
    own, alone = _seeded_params(context, shapes), _seeded_params(context, shapes)
    optimizer = DistMuon(list(own.items()), deterministic=True)
    reference = muon_on(alone, lr=0.02, adjust_lr_fn="original", weight_decay=0.0)
    comparison = Comparison(context, own, alone, optimizer, reference)

    def give_gradients(step: int) -> None:
        for name, param in alone.items():
            seeds = (10_000 * step + 100 * rank + ord(name) for rank in range(context.world))
            gradients = [seeded(shapes[name], seed).to(context.device) for seed in seeds]
            own[name].grad, param.grad = gradients[context.rank], sum(gradients[1:], gradients[0]) / context.world

    return comparison.run(range(_STEPS), give_gradients).finding(f"DistMuon on {context.world}")


class ExpertNet(Net):
    """Two layers, whose shards are exchanged, and a stack of experts, which FSDP2 leaves whole on their ranks."""

    def __init__(self, experts: int, width: int, hidden: int, out: int) -> None:
        super().__init__(width, hidden, out)
        self.experts = nn.Parameter(seeded((experts, 7, out), 9))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("eoi,bi->beo", self.experts, super().forward(x)))


def check_host_memory(context: Context) -> Finding:
    on_cpu = context.device.type == "cpu"
    return (
        Finding("the weights are in host memory anyway", skipped=True) if on_cpu else with_and_without_offload(context)
    )


def with_and_without_offload(context: Context) -> Finding:
    """FSDP2 with and without ``CPUOffloadPolicy``, with the gradients of real passes."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    world = context.world
    sizes = (2 * world, 24, 3 * world + 1, 2 * world + 3)
    offloaded = _sharded(context, ExpertNet(*sizes), world, offload_policy=CPUOffloadPolicy())
    resident = _sharded(context, ExpertNet(*sizes), world)

    def backward(step: int) -> None:
        x = seeded((4, sizes[1]), 100 * step + context.rank).to(context.device)
        offloaded(x).square().mean().backward()

    layout = f"FSDP2 with CPUOffloadPolicy on {world}"
    return stepped_side_by_side(context, layout, named(offloaded), named(resident), backward)


def stepped_side_by_side(
    context: Context,
    layout: str,
    params: Mapping[str, Tensor],
    resident: Mapping[str, Tensor],
    backward: Callable[[int], None],
) -> Finding:
    """Steps parameters in host memory and the same ones on the device; ``backward`` makes the gradients of the former.

    The matrices must be equal bit for bit: the same device multiplies the same numbers in the same order.
    """
    optimizer = muon_on(params, **_EXACT_OPTIONS)
    comparison = Comparison(context, params, resident, optimizer, muon_on(resident, **_EXACT_OPTIONS))
    comparison.against = "weights on the device"
    # AdamW's weights may differ by rounding: a fused kernel of the host steps them, and another one of the device.
    comparison.exact = {name for name, param in params.items() if param.dim() > 1}

    def give_gradients(step: int) -> None:
        backward(step)
        for name, param in params.items():
            assert param.grad is not None
            twin, sharded = resident[name], as_dtensor(resident[name])
            on_device = local_part(param.grad).to(local_part(twin).device, copy=True)
            twin.grad = on_device if sharded is None else dtensor_like(sharded, on_device)

    comparison.run(range(_STEPS), give_gradients)
    tensors = dict(params)
    for name, param in params.items():
        state = optimizer.state[param].items()
        tensors |= {f"{key} of {name}": value for key, value in state if isinstance(value, Tensor)}
    places = {name: local_part(value).device for name, value in tensors.items()}
    wrong = [
        f"{name} is on {device}; it must stay in host memory" for name, device in places.items() if device.type != "cpu"
    ]
    return comparison.finding(layout, wrong)


def check_checkpoint(context: Context) -> Finding:
    """Saves on one mesh with torch's distributed checkpoints, loads on another, and steps on: as if never
    interrupted.
    """
    with context.doing("looking for NumPy"):
        has_numpy = [False] * context.world
        dist.all_gather_object(has_numpy, find_spec("numpy") is not None)
        if not all(has_numpy):
            return Finding("torch's distributed checkpoints need NumPy: pip install numpy", skipped=True)
    made: list[str | None] = [None]
    seen: list[bool] = [False] * context.world
    with context.doing("agreeing on a folder"):
        if context.rank == 0:
            if context.options.folder is not None:
                context.options.folder.mkdir(exist_ok=True)
            made = [tempfile.mkdtemp(prefix="meshmuon-doctor-", dir=context.options.folder)]
        dist.broadcast_object_list(made, 0)
        folder = Path(str(made[0]))
        dist.all_gather_object(seen, folder.is_dir())
    try:
        if not all(seen):
            return Finding(
                f"not all ranks see {folder}: pass --folder with a folder of a shared file system", skipped=True
            )
        return _saved_and_loaded(context, folder / "checkpoint")
    finally:
        if context.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _saved_and_loaded(context: Context, checkpoint: Path) -> Finding:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    sizes, axes = (16, 3 * context.world + 2, 9), context.two_axes()
    model = _sharded(context, Net(*sizes), context.world)
    comparison = Comparison(context, named(model), named(Net(*sizes).to(context.device)))
    comparison.run(range(2))
    with context.doing("saving the checkpoint"):
        saved, state = get_state_dict(model, comparison.optimizer)
        save({"model": saved, "optimizer": state}, checkpoint_id=checkpoint)
    other = _sharded(context, Net(*sizes), *axes)
    comparison.params, comparison.optimizer = named(other), muon_on(named(other))
    with context.doing(f"loading the checkpoint on a mesh of {axes[0]} × {axes[1]}"):
        model_state, optimizer_state = get_state_dict(other, comparison.optimizer)
        load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)
        set_state_dict(other, comparison.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return comparison.run(range(2, 4)).finding(
        f"saved on {context.world} (FSDP2), loaded on {axes[0]} × {axes[1]} (HSDP)"
    )


def check_stress(context: Context) -> Finding:
    """Short steps after real forward and backward passes of FSDP2, with late ranks and gradients that come and go."""
    sizes = (12, 2 * context.world + 1, 8)
    model, whole = _sharded(context, Net(*sizes), context.world), Net(*sizes).to(context.device)
    comparison = Comparison(context, named(model), named(whole))
    late, common = random.Random(context.rank), random.Random("common")
    missing = 0

    def give_gradients(step: int) -> None:
        nonlocal missing
        if late.random() < 0.3:
            time.sleep(late.random() * _LONGEST_DELAY)
        model.zero_grad()
        model(seeded((3, 12), 1000 * step + context.rank).to(context.device)).square().mean().backward()
        without = common.choice((None, None, "first.weight", "second.weight"))
        missing += without is not None
        for (name, param), twin in zip(model.named_parameters(), whole.parameters(), strict=True):
            if name == without:
                param.grad = None
            sharded = None if param.grad is None else as_dtensor(param.grad)
            twin.grad = None if sharded is None else sharded.full_tensor()

    comparison.run(range(_QUICK_STRESS_STEPS if context.options.quick else _STRESS_STEPS), give_gradients)
    return comparison.finding(
        f"FSDP2's passes, ranks up to {1000 * _LONGEST_DELAY:g} ms late, {missing} steps lack a gradient"
    )
