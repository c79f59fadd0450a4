"""Checks that take longer: a checkpoint that moves to another mesh, and many short steps under stress."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from ...optim import Muon
from ...params.dtensors import as_dtensor
from .check import Finding
from .comparison import Comparison, Net, like, muon_on
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
    model, optimizer = _sharded(context, sizes, context.world)
    with context.doing(f"two steps on {context.world} shards"):
        for step in range(2):
            _give_gradients(model, step)
            optimizer.step()
    with context.doing("saving the checkpoint"):
        saved, state = get_state_dict(model, optimizer)
        save({"model": saved, "optimizer": state}, checkpoint_id=folder / "checkpoint")
    other, other_optimizer = _sharded(context, sizes, *axes)
    with context.doing(f"loading the checkpoint on a mesh of {axes[0]} × {axes[1]}"):
        model_state, optimizer_state = get_state_dict(other, other_optimizer)
        load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "checkpoint")
        set_state_dict(other, other_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    whole = Net(*sizes).to(context.device)
    comparison = Comparison(context, dict(whole.named_parameters()), muon_on(dict(whole.named_parameters())))
    for step in range(4):
        _give_gradients(whole, step)
        comparison.step()
    with context.doing("two steps on the other mesh"):
        for step in range(2, 4):
            _give_gradients(other, step)
            other_optimizer.step()
    text = f"saved on {context.world} (FSDP2), loaded on {axes[0]} × {axes[1]} (HSDP): {comparison.result_text()}"
    return Finding(text, comparison.problems(dict(other.named_parameters())))


def _sharded(context: Context, sizes: tuple[int, int, int], *mesh: int) -> tuple[Net, Muon]:
    from torch.distributed.fsdp import fully_shard

    model = Net(*sizes).to(context.device)
    with context.doing("sharding a model with FSDP2"):
        fully_shard(model, mesh=context.mesh(*mesh))
    return model, muon_on(dict(model.named_parameters()))


def _give_gradients(model: Net, step: int) -> None:
    for k, param in enumerate(model.parameters()):
        param.grad = like(param, seeded(tuple(param.shape), 1000 * (step + 1) + k).to(param.device))


def check_stress(context: Context) -> Finding:
    """Short steps after real forward and backward passes of FSDP2, with late ranks and gradients that come and go."""
    steps = _QUICK_STEPS if context.options.quick else _STRESS_STEPS
    sizes = (12, 2 * context.world + 1, 8)
    model, optimizer = _sharded(context, sizes, context.world)
    whole = Net(*sizes).to(context.device)
    comparison = Comparison(context, dict(whole.named_parameters()), muon_on(dict(whole.named_parameters())))
    late, common = random.Random(context.rank), random.Random("common")
    missing = 0
    for step in range(steps):
        with context.doing(f"step {step + 1} of {steps}"):
            if late.random() < 0.3:
                time.sleep(late.random() * _LONGEST_DELAY)
            optimizer.zero_grad()
            model(seeded((3, 12), 1000 * step + context.rank).to(context.device)).square().mean().backward()
            without = common.choice((None, None, "first.weight", "second.weight"))
            missing += without is not None
            for (name, param), twin in zip(model.named_parameters(), whole.parameters(), strict=True):
                if name == without:
                    param.grad = None
                twin.grad = None if param.grad is None else _gathered(param.grad)
            optimizer.step()
            comparison.step()
    delay = f"ranks up to {1000 * _LONGEST_DELAY:g} ms late, {missing} steps lack a gradient"
    return Finding(f"FSDP2's passes, {delay}: {comparison.result_text()}", comparison.problems(dict(model.named_parameters())))


def _gathered(gradient: Tensor) -> Tensor:
    """The whole gradient, on every rank."""
    sharded = as_dtensor(gradient)
    return gradient.detach().clone() if sharded is None else sharded.full_tensor()
