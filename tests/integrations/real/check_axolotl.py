"""axolotl's whole training, from its YAML to the saved model, on CPU: clip, accumulate, schedule, log, save and
resume.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", AXOLOTL_DO_NOT_TRACK="1", DO_NOT_TRACK="1")

import pytest
import torch
import yaml
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.integrations.base import BasePlugin, PluginManager
from axolotl.train import train
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from meshmuon import ConfigError, Muon
from meshmuon.integrations.hf import muon

from ..hf_reference import VOCABULARY, small_llama
from ..test_recipes import recipe

STEPS, SAVED = 10, 5


class Recorder(TrainerCallback):
    """Keeps what the optimizer is given at each step: gradients after clipping, and the lr of each group."""

    def __init__(self) -> None:
        self.steps: list[tuple[dict[str, Tensor], list[float]]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        grads = {name: param.grad.clone() for name, param in kwargs["model"].named_parameters()}
        self.steps.append((grads, [group["lr"] for group in kwargs["optimizer"].param_groups]))


class RecorderPlugin(BasePlugin):
    recorders: list[Recorder] = []  # noqa: RUF012  # axolotl makes the instance

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[TrainerCallback]:
        self.recorders.append(Recorder())
        return [self.recorders[-1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its tokenizer and data."""
    folder = tmp_path_factory.mktemp("axolotl")
    small_llama(bos_token_id=1, eos_token_id=2, pad_token_id=0).save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained(folder / "model")
    texts = [" ".join(f"w{3 + (7 * k + j * j) % 90}" for j in range(12)) for k in range(64)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture(autouse=True)
def forget_plugins() -> Iterator[None]:
    """Plugins belong to the process."""
    yield
    PluginManager.plugins.clear()


def run(folder: Path, name: str, **changes: Any) -> Any:
    """One training; returns its trainer."""
    config = {
        "base_model": str(folder / "model"),
        "datasets": [{"path": str(folder / "data.jsonl"), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / name),
        "sequence_len": 32,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "save_steps": SAVED,
        "learning_rate": 0.002,
        "weight_decay": 0.25,
        "lr_scheduler": "cosine",
        "warmup_steps": 2,
        "optimizer": "adamw_torch",
        "optim_args": {"momentum": 0.9},
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "bf16": False,
        "tf32": False,
        "use_cpu": True,
        "attn_implementation": "eager",
        "seed": 1,
        **changes,
    }
    config["plugins"] = [*recipe("axolotl")["plugins"], f"{__name__}.RecorderPlugin"]
    path = folder / f"{name}.yml"
    path.write_text(yaml.safe_dump(config))
    loaded = load_cfg(str(path))
    return train(cfg=loaded, dataset_meta=load_datasets(cfg=loaded))[2]


def weights(path: Path) -> dict[str, Tensor]:
    return dict(LlamaForCausalLM.from_pretrained(path).state_dict())


def test_equal_to_a_plain_loop_and_resumes(folder: Path) -> None:
    trainer = run(folder, "whole")
    assert type(trainer).__module__.startswith("axolotl.")
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, Muon)
    assert {group["momentum"] for group in optimizer.param_groups} == {0.9}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.25, 0.0}
    recorded = RecorderPlugin.recorders[-1].steps
    assert len(recorded) == STEPS
    assert all(lrs != then for (_, lrs), (_, then) in pairwise(recorded))  # scheduled at every step
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    plain = muon()(model, lr=0.002, weight_decay=0.25, betas=(0.9, 0.999), momentum=0.9)
    for grads, lrs in recorded:
        assert torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt() < 0.5001  # clipped
        for name, param in model.named_parameters():
            param.grad = grads[name]
        for group, lr in zip(plain.param_groups, lrs, strict=True):
            group["lr"] = lr
        plain.step()
    saved = weights(folder / "whole")
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]

    run(folder, "resumed", resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{SAVED}"))
    assert len(RecorderPlugin.recorders[-1].steps) == STEPS - SAVED
    resumed = weights(folder / "resumed")
    assert all(torch.equal(saved[name], resumed[name]) for name in saved)


def test_options_that_cannot_be_followed_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"embedding_lr=0\.1 is for axolotl's own param groups"):
        run(folder, "refused", embedding_lr=0.1)
