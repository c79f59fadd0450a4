"""Trainer, SFTTrainer and Accelerate in one process, and on two with DDP and FSDP2: the bits of a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from meshmuon import ConfigError, Muon, UnsupportedError
from tests.support.processes import JobRanks, job_ranks

from . import hf_cases
from .hf_cases import Trainer, TrainingArguments, muon
from .hf_reference import small_llama


@pytest.mark.parametrize("kind", ["trainer", "sft"])
def test_one_process_gives_the_bits_of_a_plain_loop(kind: str, tmp_path: Path) -> None:
    hf_cases.check_trainer(tmp_path, kind, "single")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_gives_the_bits_of_a_plain_loop(precision: str, tmp_path: Path) -> None:
    hf_cases.check_accelerate(tmp_path, hf_cases.Accelerated("single", precision=precision))


ranks = job_ranks(hf_cases.jobs, tuple(hf_cases.RANK_CASES))


@pytest.mark.parametrize("name", hf_cases.RANK_CASES)
def test_two_ranks_give_the_bits_of_a_plain_loop(name: str, ranks: JobRanks) -> None:
    ranks.check(name)


def untrained(folder: Path, wanted: Any) -> Trainer:
    args = TrainingArguments(**hf_cases.arguments(folder, "single"))
    return Trainer(small_llama(), args, train_dataset=hf_cases.reference.samples(), optimizer_cls_and_kwargs=wanted)


def test_weight_decay_is_that_of_trainer(tmp_path: Path) -> None:
    """Trainer's own AdamW is the oracle, for a model with biases, norms and a norm's name inside another one."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Linear(4, 6)
            self.norm, self.q_norm = nn.LayerNorm(6), nn.RMSNorm(6)
            self.norm_free = nn.Linear(6, 6, bias=False)
            self.relative_bias = nn.Parameter(torch.zeros(2, 5))

    model = Odd()
    theirs = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, weight_decay=0.3)).create_optimizer()
    decayed = {id(param) for group in theirs.param_groups if group["weight_decay"] for param in group["params"]}
    optimizer = muon()(model, lr=1e-3, weight_decay=0.3)
    of = {name: (group, param) for group in optimizer.param_groups for name, param in _named(group)}
    assert of.keys() == dict(model.named_parameters()).keys()
    assert {name: group["weight_decay"] for name, (group, _) in of.items()} == {
        name: 0.3 if id(param) in decayed else 0.0 for name, (_, param) in of.items()
    }
    assert {name for name, (group, _) in of.items() if group["weight_decay"]} == {"rows.weight", "norm_free.weight"}


def _named(group: Any) -> list[tuple[str, torch.Tensor]]:
    return list(zip(group["param_names"], group["params"], strict=True))


def test_options_come_from_the_arguments_unless_given(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, learning_rate=2e-3, weight_decay=0.25, adam_beta1=0.8, adam_epsilon=1e-6
    )
    _, taken, _ = muon()(small_llama(), args).param_groups
    assert (taken["lr"], taken["weight_decay"], taken["adamw_betas"], taken["adamw_eps"]) == (
        2e-3,
        0.25,
        (0.8, 0.999),
        1e-6,
    )
    # Options by the trainer's names go before the arguments.
    matrices, tables, _ = muon()(small_llama(), args, lr=1e-3, betas=(0.5, 0.75), eps=1e-3, momentum=0.5).param_groups
    assert (tables["lr"], tables["weight_decay"], tables["adamw_betas"], tables["adamw_eps"]) == (
        1e-3,
        0.25,
        (0.5, 0.75),
        1e-3,
    )
    assert (matrices["use_muon"], matrices["momentum"]) == (True, 0.5)


def test_no_lr_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'muon was given no lr.*\(muon, \{"training_args": args\}\)'):
        untrained(tmp_path, (muon, {})).train()


def test_the_optimizer_itself_names_the_factory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer_cls_and_kwargs=\(muon, .*meshmuon\.integrations\.hf"):
        untrained(tmp_path, (Muon, {"lr": 1e-3})).train()


def test_deepspeed_is_refused() -> None:
    """DeepSpeed is not installed: only Transformers' record of its configuration is there, which the factory reads."""
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    class Record:
        config: ClassVar[dict[str, Any]] = {"zero_optimization": {"stage": 2}}

    record = Record()  # Transformers keeps a weak reference
    set_hf_deepspeed_config(record)
    try:
        with pytest.raises(UnsupportedError, match=r"DeepSpeed ZeRO flattens the weights.*FSDP2"):
            muon()(small_llama(), lr=1e-3)
    finally:
        unset_hf_deepspeed_config()
    assert isinstance(muon()(small_llama(), lr=1e-3), Muon)
