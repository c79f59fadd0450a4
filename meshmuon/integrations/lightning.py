"""Lightning and Fabric: ``muon`` builds the optimizer, ``MuonMonitor`` logs where parameters go and how training
proceeds.

Needs ``pip install lightning``. Clipping, accumulation, schedules and checkpoints are Lightning's: docs/trainers.md.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric, is_wrapped
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..metrics import flat
from ..optim import Muon
from ..params.checks import shown
from .factory import muon_for


def muon(module: nn.Module, fabric: Fabric | None = None, **options: Any) -> Muon:
    """Muon with the default param groups of a module. Under DDP the processes divide the work of a step.

    Call it in ``configure_optimizers``. With Fabric, call it before ``fabric.setup(model, optimizer)``; with Fabric's
    ``ModelParallelStrategy``, which shards the model in ``fabric.setup_module``, after that.

    Args:
        module: the LightningModule, or with Fabric any module.
        fabric: the launched Fabric, if there is one.
        options: options of ``get_default_muon_param_groups`` and of ``Muon``. ``replica_group=None`` lets each DDP
            process compute everything.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"module is a {type(module).__name__}; it must be the LightningModule, or with Fabric any nn.Module."
        )
    if fabric is not None and not isinstance(fabric, Fabric):
        raise ConfigError(f"fabric={shown(fabric)} must be the launched lightning.Fabric, or None without Fabric.")
    options.setdefault("replica_group", dist.group.WORLD if _replicated(module, fabric) else None)
    named: Any = module.module if is_wrapped(module) else module  # with the names that the user gave
    return muon_for(named, **options)


def _replicated(module: nn.Module, fabric: Fabric | None) -> bool:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    if fabric is not None:
        return isinstance(fabric.strategy, FabricDDPStrategy)
    return isinstance(module, LightningModule) and isinstance(module.trainer.strategy, DDPStrategy)


class MuonMonitor(Callback):
    """Logs the routing table when fitting starts, and then learning rates and skipped steps to the trainer's loggers.

    Before the first batch it calls ``prepare()`` of each Muon: the model is sharded then, and a checkpoint is loaded.

    The metrics are ``muon/lr``, ``muon/lr_adamw`` (with a number behind them for further groups) and
    ``muon/skipped_steps``. They belong to the step that is about to be made. An optimizer that was built with
    ``metrics=`` adds its last measurement, by the names of ``meshmuon.metrics.flat``.

    Args:
        every_n_steps: how often to log; by default as often as the trainer logs (``log_every_n_steps``). Counting
            skipped steps waits for a GPU.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        whole = isinstance(every_n_steps, int) and not isinstance(every_n_steps, bool)
        if every_n_steps is not None and (not whole or every_n_steps < 1):
            raise ConfigError(f"every_n_steps={every_n_steps!r} must be a whole number (int) of at least 1, or None.")
        self._every_n_steps = every_n_steps

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the routing table on rank 0."""
        optimizers = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, Muon)]
        if not optimizers:
            names = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "nothing"
            raise ConfigError(
                f"MuonMonitor finds no Muon to monitor: configure_optimizers returned {names}. Return "
                "meshmuon.integrations.lightning.muon(self, lr=...) there, or remove the callback."
            )
        for optimizer in optimizers:
            rank_zero_info(f"Routing table of {type(optimizer).__name__}:\n{optimizer.routing_table()}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepares the first step, on every rank."""
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, Muon):
                optimizer.prepare()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Logs the metrics of one optimizer, if the trainer logs this step."""
        every_n_steps = self._every_n_steps or trainer.log_every_n_steps
        if not isinstance(optimizer, Muon) or (trainer.global_step + 1) % every_n_steps:
            return
        metrics = metrics_of(optimizer)
        if optimizer.measures:
            metrics = {**flat(optimizer.metrics()), **metrics}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)


def metrics_of(optimizer: Muon) -> dict[str, float]:
    """Learning rates and skipped steps, by the names under which ``MuonMonitor`` logs them."""
    if not isinstance(optimizer, Muon):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}; metrics_of reads those of a meshmuon.Muon.")
    metrics: dict[str, float] = {}
    for group in optimizer.param_groups:
        name = "muon/lr" if group["use_muon"] else "muon/lr_adamw"
        number = sum(key == name or key.startswith(f"{name}/") for key in metrics)
        metrics[f"{name}/{number + 1}" if number else name] = float(group["lr"])
    return {**metrics, "muon/skipped_steps": float(optimizer.skipped_steps)}
