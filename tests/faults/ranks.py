"""Real gloo processes, a few milliseconds each: forked from a server that has imported torch and has done nothing else."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshmuon import Muon

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SHAPES = ((8, 6), (6, 9), (5, 7), (12, 4), (4, 4), (10,))  # the last one is AdamW's

_IN_ADVANCE = ["torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "pytest", "hypothesis", __name__]

Main = Callable[..., Any]


@dataclass(frozen=True)
class Ended:
    """How a rank ended: with what its function returned, or in trouble: a traceback, "killed" or "hangs"."""

    said: Any = None
    trouble: str = ""


def run_ranks(world: int, main: Main, folder: Path, *args: Any, timeout: float = 150.0, seconds: float = 120.0) -> list[Ended]:
    """Runs ``main(rank, folder, *args)`` on ``world`` ranks of one gloo group.

    Args:
        world: number of ranks.
        main: a function of a module; its result must be storable.
        folder: an empty folder that the ranks share.
        args: more for ``main``.
        timeout: of the group.
        seconds: after which a rank hangs; imports count only where the server could not import in advance.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IN_ADVANCE)
    given = (world, main, folder, timeout, args)
    ranks = [context.Process(target=_rank_main, args=(rank, *given), daemon=True) for rank in range(world)]
    for one in ranks:
        one.start()
    end = time.monotonic() + seconds
    for one in ranks:
        one.join(max(0.0, end - time.monotonic()))
    hung = [one.is_alive() for one in ranks]
    for one in ranks:
        one.kill()
        one.join()
    return [Ended(trouble="hangs") if hung[rank] else _read(folder / f"rank{rank}.pt") for rank in range(world)]


def _rank_main(rank: int, world: int, main: Main, folder: Path, timeout: float, args: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=timeout))
        ended = Ended(said=main(rank, folder, *args))
    except BaseException:
        ended = Ended(trouble=traceback.format_exc())
    torch.save(ended, folder / f"rank{rank}.new")
    (folder / f"rank{rank}.new").rename(folder / f"rank{rank}.pt")


def _read(path: Path) -> Ended:
    found: Ended = torch.load(path, weights_only=False) if path.exists() else Ended(trouble="killed")
    return found


def said_by_all(ended: Sequence[Ended]) -> list[Any]:
    """What all ranks returned; none may be in trouble."""
    trouble = {rank: one.trouble for rank, one in enumerate(ended) if one.trouble}
    assert not trouble, "\n".join(f"rank {rank}: {text}" for rank, text in trouble.items())
    return [one.said for one in ended]


# A small model, whole or on a mesh.


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def seeded(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def on_mesh(value: Tensor, mesh: DeviceMesh | None, placement: Any = S0) -> Tensor:
    return value if mesh is None else distribute_tensor(value, mesh, [placement], src_data_rank=None)


def initial(mesh: DeviceMesh | None, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(on_mesh(seeded(shape, k), mesh)) for k, shape in enumerate(shapes)]


def muon_of(params: Sequence[nn.Parameter], **options: Any) -> Muon:
    """Matrices to Muon, the rest to AdamW; named a, b, c, …"""
    named = [("abcdefghijk"[k], param) for k, param in enumerate(params)]
    groups = [
        {"params": chosen, "use_muon": use_muon}
        for use_muon in (True, False)
        if (chosen := [pair for pair in named if (pair[1].dim() == 2) is use_muon])
    ]
    return Muon(groups, lr=0.01, **options)


def give_gradients(params: Sequence[nn.Parameter], step: int) -> None:
    for k, param in enumerate(params):
        param.grad = like(param, seeded(param.shape, 1000 + 100 * step + k))


def like(param: Tensor, value: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return value.clone()
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """A copy of what this rank holds."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def after(steps: int, shapes: Sequence[tuple[int, ...]] = SHAPES, **options: Any) -> list[Tensor]:
    """The parameters of one device after so many steps."""
    params = initial(None, shapes)
    optimizer = muon_of(params, **options)
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
    return [param.detach() for param in params]


def assert_equal(params: Sequence[Tensor], whole: Sequence[Tensor]) -> None:
    """Bit for bit what one device has, in this rank's part."""
    for k, (mine, other) in enumerate(zip(params, whole, strict=True)):
        same(local(mine), local(like(mine, other)), f"parameter {k}")


def same(one: Tensor, other: Tensor, what: str) -> None:
    assert one.shape == other.shape, f"{what}: {tuple(one.shape)} and {tuple(other.shape)}"
    assert torch.equal(one.nan_to_num(nan=12345.0), other.nan_to_num(nan=12345.0)), f"{what} differs"


def everything(optimizer: Muon) -> list[Tensor]:
    """All that a step could write: parameters and state."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = [local(param) for param in params]
    for param in params:
        found += [local(value) for _, value in sorted(optimizer.state.get(param, {}).items())]
    return found


def assert_untouched(optimizer: Muon, before: Sequence[Tensor]) -> None:
    now = everything(optimizer)
    assert len(now) == len(before), "a refused step has made or lost state"
    for one, other in zip(now, before, strict=True):
        same(one, other, "what a refused step must not write")
