"""Checks that take longer: a checkpoint that moves to another mesh, and many short steps under stress."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from ...params.dtensors import as_dtensor
from .check import Finding
from .comparison import Comparison, Net, muon_on, named
from .context import Context
from .numerics import seeded

_STRESS_STEPS, _QUICK_STEPS = 200, 40
_LONGEST_DELAY = 0.002  # seconds that a rank may come late


def shared_folder(context: Context) -> tuple[Path, bool]:
    """A new folder of rank 0, and whether all ranks see it."""
    made: list[str | None] = [None]
    if context.rank == 0:
        if context.options.folder is not None:
            context.options.folder.mkdir(exist_ok=True)
        made = [tempfile.mkdtemp(prefix="meshmuon-doctor-", dir=context.options.folder)]
    dist.broadcast_object_list(made, 0)
    folder = Path(str(made[0]))
    seen: list[bool] = [False] * context.world
    dist.all_gather_object(seen, folder.is_dir())
    return folder, all(seen)


def check_checkpoint(context: Context) -> Finding:
    """Saves on one mesh with torch's distributed checkpoints, loads on another, and steps on: as if never interrupted."""
    with context.doing("agreeing on a folder"):
        folder, visible = shared_folder(context)
    try:
        if not visible:
            return Finding(f"not all ranks see {folder}: pass --folder with a folder of a shared file system", skipped=True)
        return _saved_and_loaded(context, folder)
    finally:
        if context.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _saved_and_loaded(context: Context, folder: Path) -> Finding:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    sizes, axes = (16, 3 * context.world + 2, 9), context.two_axes()
    model = _sharded(context, sizes, context.world)
    comparison = Comparison(context, named(model), named(Net(*sizes).to(context.device)))
    comparison.run(range(2))
    with context.doing("saving the checkpoint"):
        saved, state = get_state_dict(model, comparison.optimizer)
        save({"model": saved, "optimizer": state}, checkpoint_id=folder / "checkpoint")
    other = _sharded(context, sizes, *axes)
    comparison.params, comparison.optimizer = named(other), muon_on(named(other))
    with context.doing(f"loading the checkpoint on a mesh of {axes[0]} × {axes[1]}"):
        model_state, optimizer_state = get_state_dict(other, comparison.optimizer)
        load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "checkpoint")
        set_state_dict(other, comparison.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    comparison.run(range(2, 4))
    return comparison.finding(f"saved on {context.world} (FSDP2), loaded on {axes[0]} × {axes[1]} (HSDP)")


def _sharded(context: Context, sizes: tuple[int, int, int], *mesh: int) -> Net:
    from torch.distributed.fsdp import fully_shard

    model = Net(*sizes).to(context.device)
    with context.doing("sharding a model with FSDP2"):
        fully_shard(model, mesh=context.mesh(*mesh))
    return model


def check_stress(context: Context) -> Finding:
    """Short steps after real forward and backward passes of FSDP2, with late ranks and gradients that come and go."""
    sizes = (12, 2 * context.world + 1, 8)
    model, whole = _sharded(context, sizes, context.world), Net(*sizes).to(context.device)
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
            twin.grad = None if param.grad is None else _gathered(param.grad)

    comparison.run(range(_QUICK_STEPS if context.options.quick else _STRESS_STEPS), give_gradients)
    return comparison.finding(f"FSDP2's passes, ranks up to {1000 * _LONGEST_DELAY:g} ms late, {missing} steps lack a gradient")


def _gathered(gradient: Tensor) -> Tensor:
    """The whole gradient, on every rank."""
    sharded = as_dtensor(gradient)
    return gradient.detach().clone() if sharded is None else sharded.full_tensor()
