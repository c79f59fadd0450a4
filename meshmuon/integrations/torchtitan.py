"""torchtitan: a container that builds Muon, and the config that selects it.

Needs ``pip install torchtitan``. The trainer's own clipping, accumulation, schedule, checkpoints and metrics work with
it: docs/trainers.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.tools.logging import logger

from ..errors import ConfigError
from ..metrics import flat
from ..optim import Muon
from ..params.checks import shown
from ..routing.param_groups import get_default_muon_param_groups
from .factory import by_own_names


class MuonContainer(OptimizersContainer[Muon]):
    """torchtitan's container of optimizers, with Muon: one per model part, so that pipeline stages plan alone.

    Without ``param_groups`` in the config, each part gets its default param groups. With them, torchtitan's patterns
    decide: an entry with ``optimizer_name="Muon"`` needs ``use_muon`` among its ``optimizer_kwargs``. torchtitan builds
    it after it has sharded and initialised the model, so that it also calls ``prepare()`` of each.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Selects Muon in a torchtitan config."""

        lr: float = 1e-3
        """Learning rate of all groups that set none."""

        weight_decay: float = 0.1
        """Weight decay of all groups that set none."""

        options: dict[str, Any] = field(default_factory=dict)
        """Further options of ``Muon``. ``none_grad`` is False unless set: CUDA graphs write into the same gradients
        again.
        """

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.implementation == "fused_opt_states_bf16":
            raise ConfigError(
                'implementation="fused_opt_states_bf16" is for torch.optim.AdamW; Muon keeps the moments of its AdamW '
                "part in "
                'the dtype of the parameters. Leave implementation="fused"; options={"momentum_dtype": torch.bfloat16} '
                "halves "
                "the momentum of the matrices."
            )
        if not isinstance(config.options, dict):
            raise ConfigError(f"options={shown(config.options)} must be a dict of further options of Muon.")
        by_own_names(config.options)  # refuses unknown ones
        self._options = {"none_grad": False, "lr": config.lr, "weight_decay": config.weight_decay, **config.options}
        super().__init__(config, model_parts=model_parts)
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):
                optimizer.prepare()

    def _resolve_optimizer_factory(self, name: str) -> Callable[..., Optimizer]:  # static in the base
        return partial(Muon, **self._options) if name == "Muon" else super()._resolve_optimizer_factory(name)

    def _build_param_groups(  # static in the base
        self, model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        if param_group_configs:
            return super()._build_param_groups(model, param_group_configs, impl_kwargs)
        groups = get_default_muon_param_groups(
            model, expert_keys=self._options.get("expert_keys"), conv=self._options.get("conv"), frozen=False
        )  # torchtitan demands that its optimizers have just the parameters that train
        for group in groups:
            group["param_names"] = [canonical_fqn(name) for name in group.pop("names")]  # the keys of a checkpoint
        return {"Muon": groups}, {"Muon": ["Muon" if group["use_muon"] else "AdamW" for group in groups]}

    def metrics(self) -> dict[str, float]:
        """The last measurements of all model parts, for ``MetricsProcessor.log(...,
        extra_metrics=container.metrics())``.

        Needs ``muon(..., metrics=10)``. Numbers of part k of a pipeline begin with ``muon/part k/``; those of a single
        part with ``muon/``.
        """
        parts = [optimizer for optimizer in self.optimizers if isinstance(optimizer, Muon) and optimizer.measures]
        found: dict[str, float] = {}
        for k, optimizer in enumerate(parts):
            found |= flat(optimizer.metrics(), prefix="muon/" if len(parts) == 1 else f"muon/part {k}/")
        return found

    def _log_optimizer(self, optimizer: Optimizer, part_idx: int, patterns: list[str]) -> None:
        super()._log_optimizer(optimizer, part_idx, patterns)
        if isinstance(optimizer, Muon) and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.info(f"Routing table of Muon (model_part={part_idx}):\n{optimizer.routing_table()}")


def muon(lr: float = 1e-3, weight_decay: float = 0.1, **options: Any) -> MuonContainer.Config:
    """The ``optimizer`` of a torchtitan config, with the default param groups of the model.

    Args:
        lr: learning rate; with the default rule, begin with AdamW's, and with four times as much for a small model.
        weight_decay: decoupled weight decay of all parameters.
        options: further options of ``Muon``, such as ``expert_keys`` or ``momentum``.

    Example::

        config.optimizer = muon(lr=3e-4)
    """
    return MuonContainer.Config(lr=lr, weight_decay=weight_decay, options=options)
