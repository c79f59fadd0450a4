"""The two contenders, built for the same model: meshmuon's Muon and torch's fused AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from meshmuon import Muon, get_default_muon_param_groups

OPTIMIZERS = ("muon", "adamw")
TITLES = {"muon": "meshmuon", "adamw": "AdamW"}
BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Hyperparameters of both contenders.

    `adam_part_lr` is the lr of embeddings, head and gains inside meshmuon; None means the same as `lr`.
    """

    lr: float
    adamw_lr: float
    weight_decay: float
    adamw_weight_decay: float
    adam_part_lr: float | None = None
    momentum: float = 0.95
    ns_steps: int = 5
    scheme: str = "polar_express"
    rule: str = "plain"
    cautious: bool = False


def build_optimizer(name: str, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer called `name` ("muon" or "adamw") over all of the model's parameters."""
    if name == "muon":
        return _muon(model, config)
    if name == "adamw":
        return torch.optim.AdamW(
            model.parameters(),
            lr=config.adamw_lr,
            betas=BETAS,
            weight_decay=config.adamw_weight_decay,
            fused=True,
        )
    raise ValueError(f"unknown optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")


def _muon(model: nn.Module, config: OptimizerConfig) -> Muon:
    groups = get_default_muon_param_groups(model)
    for group in groups:
        if not group["use_muon"] and config.adam_part_lr is not None:
            group["lr"] = config.adam_part_lr
    return Muon(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=True,
        ns_steps=config.ns_steps,
        weight_decay=config.weight_decay,
        adamw_betas=BETAS,
        scheme=config.scheme,
        adjust_lr_fn="match_rms_adamw",
        rule=config.rule,
        cautious_weight_decay=config.cautious,
    )
