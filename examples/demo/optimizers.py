"""The contenders, built for the same model: meshmuon's Muon, torch's fused AdamW, and meshmuon without and with
QK-clip.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from demo.health import EVERY
from demo.model import GPT
from meshmuon import Muon, RoutingWarning, get_default_muon_param_groups
from meshmuon.ortho import SchemeName
from meshmuon.params.option_table import Rounding
from meshmuon.params.rules import RuleName

BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Contender:
    """One of the runs that are compared.

    Attributes:
        name: what files and flags call it.
        title: what people read.
        optimizer: "muon" or "adamw".
        color: of its curves.
        watched: whether the largest attention logit of every step is recorded.
        clipped: whether QK-clip acts on it.
        may_diverge: a loss that is not finite is then a finding, and the other runs are still made.
    """

    name: str
    title: str
    optimizer: str
    color: str
    watched: bool = False
    clipped: bool = False
    may_diverge: bool = False


CONTENDERS: Mapping[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender("muon", "meshmuon", "muon", "tab:blue"),
        Contender("adamw", "AdamW", "adamw", "tab:orange"),
        Contender("unclipped", "unclipped", "muon", "tab:red", watched=True, may_diverge=True),
        Contender("clipped", "clipped", "muon", "tab:blue", watched=True, clipped=True),
    )
}
OPTIMIZERS = ("muon", "adamw")
CLIP_RUNS = ("unclipped", "clipped")
TITLES = {name: contender.title for name, contender in CONTENDERS.items()}


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Hyperparameters of all contenders.

    `adam_part_lr` is the lr of embeddings, head and gains inside meshmuon; None means the same as `lr`. `qk_threshold`
    is the largest attention logit that QK-clip leaves alone; None where QK-clip is not the subject.
    """

    lr: float
    adamw_lr: float
    weight_decay: float
    adamw_weight_decay: float
    adam_part_lr: float | None = None
    momentum: float = 0.95
    ns_steps: int = 5
    scheme: SchemeName = "auto"
    rule: RuleName = "plain"
    cautious: bool = False
    rounding: Rounding = "nearest"
    qk_threshold: float | None = None


def build_optimizer(name: str, model: GPT, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of the contender called `name` over all of the model's parameters."""
    if name not in CONTENDERS:
        raise ValueError(f"unknown contender {name!r}: choose one of {', '.join(CONTENDERS)}")
    contender = CONTENDERS[name]
    if contender.optimizer == "muon":
        return _muon(contender, model, config)
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.adamw_lr,
        betas=BETAS,
        weight_decay=config.adamw_weight_decay,
        fused=True,
    )


def _muon(contender: Contender, model: GPT, config: OptimizerConfig) -> Muon:
    groups = get_default_muon_param_groups(model)
    clip_config = {"head_dim": model.config.head_dim, "threshold": config.qk_threshold} if contender.clipped else None
    with warnings.catch_warnings():
        if contender.watched:
            # Logits are watched where the lr is too large on purpose: no need to warn of it.
            warnings.filterwarnings("ignore", message=".*moves entries by", category=RoutingWarning)
        return Muon(
            groups,
            lr=config.lr,
            adamw_lr=config.adam_part_lr,
            momentum=config.momentum,
            nesterov=True,
            ns_steps=config.ns_steps,
            weight_decay=config.weight_decay,
            adamw_betas=BETAS,
            scheme=config.scheme,
            adjust_lr_fn="match_rms_adamw",
            rule=config.rule,
            cautious_weight_decay=config.cautious,
            rounding=config.rounding,
            clip_config=clip_config,
            metrics=EVERY,
        )
