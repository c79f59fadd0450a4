"""Lightning's and Fabric's own loops on one and on two gloo processes, each beside a plain loop on the same data.

Each case runs 10 steps that accumulate two batches, clip, and change the learning rate; then it resumes in the middle.
"""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from meshmuon import Muon, clip_grad_norm_

from ..support.optional import need
from ..support.processes import Job
from .example_cases import example_cases
from .plain_loop import (
    ACCUMULATED,
    BATCH,
    LARGEST_NORM,
    OPTIONS,
    STEPS,
    build_model,
    loss_of,
    optimizer_of,
    rank_batches,
    same_weights,
    schedule,
    sequences,
    train_plainly,
)

need("lightning")

import lightning
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy

from meshmuon.integrations.lightning import MuonMonitor, muon

EPOCHS = 2
BATCHES = STEPS * ACCUMULATED // EPOCHS  # of a rank in an epoch
PROCESSES = {"single": 1, "ddp": 2, "fsdp2": 2, "tp": 2}
SCALE = 2.0**27  # at which float16 overflows at first


def parallelise(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """What a user writes for either axis of the mesh that Lightning and Fabric create."""
    if mesh["tensor_parallel"].size() > 1:
        parallelize_module(model, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        fully_shard(model, mesh=mesh["data_parallel"])
    return model


def mesh_sizes(layout: str) -> dict[str, int]:
    return {"data_parallel_size": 1 if layout == "tp" else 2, "tensor_parallel_size": 2 if layout == "tp" else 1}


def model_for(layout: str) -> nn.Module:
    return build_model(hidden=40 if layout == "tp" else 41)  # torch's tensor parallelism wants even parts


def batches_for(layout: str) -> list[Tensor]:
    rank, world = (dist.get_rank(), 2) if layout in ("ddp", "fsdp2") else (0, 1)
    return list(rank_batches(rank, world, EPOCHS, BATCHES))


def plain(layout: str, **options: Any) -> tuple[nn.Module, Muon, list[float]]:
    """Model, optimizer and losses of a loop without a trainer on the same layout."""
    model = model_for(layout)
    if layout == "ddp":
        model = DistributedDataParallel(model)
    if layout in ("fsdp2", "tp"):
        sizes = mesh_sizes(layout)
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=("data_parallel", "tensor_parallel"))
        parallelise(model, mesh)
    optimizer = optimizer_of(model)
    return model, optimizer, train_plainly(model, optimizer, batches_for(layout), **options)


# Lightning.


class Module(lightning.LightningModule):
    """What a user writes."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout, self.net = layout, model_for(layout)

    def configure_model(self) -> None:
        if self.layout in ("fsdp2", "tp"):
            parallelise(self.net, self.device_mesh)

    def training_step(self, tokens: Tensor) -> Tensor:
        loss = loss_of(self.net, tokens)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = muon(self, **OPTIONS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}


class ClippedOnAnyMesh(Module):
    """Plain tensors beside DTensors: torch's clipping refuses the mixture, meshmuon's does not."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **_: Any) -> None:
        clip_grad_norm_((p for group in optimizer.param_groups for p in group["params"]), gradient_clip_val)


def strategy_for(layout: str, **options: Any) -> Any:
    if layout in ("fsdp2", "tp"):
        return ModelParallelStrategy(**mesh_sizes(layout), **options)
    return "ddp" if layout == "ddp" else "auto"


def fit(module: Module, checkpoint: Path | None = None, **options: Any) -> Module:
    layout = module.layout
    if checkpoint is not None:
        nn.init.zeros_(module.net.up.weight)  # what the checkpoint must overwrite
    tokens = sequences(BATCHES * (2 if layout in ("ddp", "fsdp2") else 1))
    # Lightning's own shuffles
    sampler = DistributedSampler(tokens, shuffle=False) if layout in ("ddp", "fsdp2") else None
    defaults = {"plugins": [LightningEnvironment()], "strategy": strategy_for(layout), "logger": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=PROCESSES[layout],
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=LARGEST_NORM,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in options.get("callbacks", [])),
        use_distributed_sampler=False,
        **{**defaults, **options},
    )
    trainer.fit(
        module, DataLoader(tokens, BATCH, sampler=sampler), ckpt_path=None if checkpoint is None else str(checkpoint)
    )
    return module


class NeedsPlan(lightning.Callback):
    """Demands that the first step was prepared."""

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        assert trainer.optimizers[0].plan()  # type: ignore[attr-defined]


def lightning_case(layout: str, folder: Path) -> None:
    """All that a trainer does: accumulation, clipping, a schedule, logging, checkpoints; and a second trainer that
    resumes.
    """
    folder, handler = folder / f"lightning-{layout}", BufferingHandler(capacity=10_000)
    logging.getLogger("lightning.pytorch").addHandler(handler)
    try:
        saves = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        logger = CSVLogger(folder, name="log", version="")
        module = fit(
            Module(layout), logger=logger, callbacks=[saves, MuonMonitor(), NeedsPlan(), LearningRateMonitor()]
        )
    finally:
        logging.getLogger("lightning.pytorch").removeHandler(handler)
    expected, _, losses = plain(layout)
    same_weights(module, expected)
    optimizer = module.optimizers().optimizer
    assert isinstance(optimizer, Muon)
    assert (optimizer.replica_group is not None) == (layout == "ddp")

    tables = [record for record in handler.buffer if "net.up.weight" in record.getMessage()]
    assert len(tables) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        check_log(folder / "log" / "metrics.csv", losses)
    same_weights(fit(Module(layout), folder / "epoch=0.ckpt"), expected)


def check_log(path: Path, losses: list[float]) -> None:
    """The learning rate and the loss of every step are logged under its number."""
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    logged = {(key, int(row["step"])): float(row[key]) for row in rows for key in row if row[key] and key != "step"}
    for step in range(STEPS):
        assert logged["muon/lr", step] == logged["muon/lr_adamw", step] == OPTIONS["lr"] * (1.0 / (1 + step))
        assert logged["lr-Muon/pg1", step] == logged["muon/lr", step]  # Lightning's own monitor
        assert logged["muon/skipped_steps", step] == 0
        assert logged["loss", step] == losses[ACCUMULATED * (step + 1) - 1]


def one_file_case(layout: str, folder: Path) -> None:
    """A checkpoint of sharded weights in a single file."""
    folder = folder / "one-file"
    saves = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    module = fit(Module(layout), strategy=strategy_for(layout, save_distributed_checkpoint=False), callbacks=[saves])
    assert (folder / "epoch=0.ckpt").is_file()
    resumed = fit(
        Module(layout), folder / "epoch=0.ckpt", strategy=strategy_for(layout, save_distributed_checkpoint=False)
    )
    same_weights(resumed, module)


def mixed_mesh_case(layout: str, folder: Path) -> None:
    """Lightning clips as torch does, which refuses plain tensors beside DTensors; the hook takes meshmuon's instead."""
    expected, *_ = plain(layout, clip=clip_grad_norm_)
    same_weights(fit(ClippedOnAnyMesh(layout)), expected)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        fit(Module(layout))


def bf16_case(layout: str, folder: Path) -> None:
    expected, *_ = plain(layout, precision=torch.bfloat16)
    same_weights(fit(Module(layout), precision="bf16-mixed"), expected)


def fp16_case(layout: str, folder: Path) -> None:
    """Float16 with a scale that overflows in the first steps: they are skipped, and the others are clipped."""
    expected, optimizer, _ = plain(layout, precision=torch.float16, scale=SCALE)
    assert 0 < optimizer.skipped_steps < STEPS
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))
    module = fit(Module(layout), plugins=[LightningEnvironment(), precision])
    same_weights(module, expected)
    assert module.optimizers().optimizer.skipped_steps == optimizer.skipped_steps


# Fabric.


def fabric_case(layout: str, folder: Path) -> None:
    """The same with Fabric, in float32 and bfloat16."""
    saved = folder / f"fabric-{layout}"
    expected, *_ = plain(layout)
    same_weights(fabric_loop(layout, saved, resumed=False), expected)
    same_weights(fabric_loop(layout, saved, resumed=True), expected)
    expected, *_ = plain(layout, precision=torch.bfloat16)
    same_weights(fabric_loop(layout, folder / f"bf16-{layout}", resumed=False, precision="bf16-mixed"), expected)


def fabric_loop(layout: str, saved: Path, resumed: bool, precision: Any = "32-true") -> nn.Module:
    """What a user writes: saves in the middle, or loads that and continues."""
    strategy: Any = {"single": "auto", "ddp": "ddp"}.get(layout)
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=PROCESSES[layout],
        strategy=strategy or FabricModelParallelStrategy(parallelise, **mesh_sizes(layout)),
        precision=precision,
        plugins=[LightningEnvironment()],
    )
    fabric.launch()
    model = fabric.setup_module(model_for(layout))
    optimizer = fabric.setup_optimizers(muon(model, fabric, **OPTIONS))
    optimizer.prepare()
    assert (optimizer.replica_group is not None) == (layout == "ddp")
    assert len(optimizer.routing_table().rows) == 8  # through Fabric's wrapper
    assert optimizer.param_groups[0]["param_names"] == ["up.weight", "down.weight"]
    scheduler = schedule(optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler.state_dict(), "batch": 0}
    if resumed:
        fabric.load(saved, state)
        scheduler.load_state_dict(state["scheduler"])
    for k, tokens in list(enumerate(batches_for(layout)))[state["batch"] :]:
        last = k % ACCUMULATED == ACCUMULATED - 1
        with fabric.no_backward_sync(model, enabled=not last and layout == "ddp"):
            fabric.backward(loss_of(model, tokens) / ACCUMULATED)
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=LARGEST_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if k + 1 == BATCHES and not resumed:
            fabric.save(saved, {**state, "scheduler": scheduler.state_dict(), "batch": k + 1})
    return model


def jobs() -> dict[str, Job]:
    layouts = ("single", "ddp", "fsdp2")
    cases = {
        **{f"lightning {layout}": partial(lightning_case, layout) for layout in layouts},
        **{f"bf16-mixed {layout}": partial(bf16_case, layout) for layout in layouts},
        **{f"16-mixed {layout}": partial(fp16_case, layout) for layout in ("single", "ddp")},
        "one-file fsdp2": partial(one_file_case, "fsdp2"),
        "mixed-mesh tp": partial(mixed_mesh_case, "tp"),
        **{f"fabric {layout}": partial(fabric_case, layout) for layout in layouts},
        **example_cases(),
    }
    return {name: Job(PROCESSES[name.split()[1]], partial(_as_rank, run)) for name, run in cases.items()}


def _as_rank(run: Callable[[Path], None], folder: Path) -> None:
    """Tells Lightning that someone else started this process, and its rank."""
    os.environ.update(LOCAL_RANK=str(dist.get_rank()), NODE_RANK="0")
    run(folder)
