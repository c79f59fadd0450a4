"""torchtitan's own trainer on one and on two gloo processes, beside a plain loop on the same model and data.

torchtitan knows accelerators only. Here it is told that the CPU is one; everything else is its own: config,
parallelisation, data, loss, clipping, accumulation, schedule, checkpoints and metrics.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import FSDPModule

from meshmuon import ConfigError, Muon, get_default_muon_param_groups

from ..support.optional import need
from .example_cases import EXAMPLES
from .plain_loop import same_weights


def _cpu_as_accelerator() -> SimpleNamespace:
    """What torchtitan asks of ``torch.cuda``."""
    memory = 2**30
    return SimpleNamespace(
        set_device=lambda device: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        synchronize=lambda: None,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: SimpleNamespace(total_memory=memory),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda device: {},
    )


assert "torchtitan.tools.utils" not in sys.modules, "torchtitan has chosen its device already"
with (
    mock.patch("torch._utils._get_available_device_type", return_value="cpu"),
    mock.patch("torch._utils._get_device_module", return_value=_cpu_as_accelerator()),
):
    need("torchtitan.trainer")

# torchtitan 0.3 wants a newer torch, only to shorten timeouts after the first step
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda timeout, group: None  # type: ignore[attr-defined]

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

from meshmuon.integrations.torchtitan import MuonContainer, muon

sys.path.insert(0, str(EXAMPLES))

import torchtitan_muon

STEPS, SAVED_AT, ACCUMULATED, BATCH, LENGTH, VOCABULARY = 10, 5, 2, 2, 16, 256
LR, LARGEST_NORM = 3e-3, 0.5  # every step is clipped


class NoTokenizer(BaseTokenizer):
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class SeededTokens(BaseDataLoader):
    """Batch k of rank r is always the same; a checkpoint stores k."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, **_: Any) -> None:
        self._rank, self._next = dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            self._next += 1
            generator = torch.Generator().manual_seed(1000 * self._rank + self._next)
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {f"next{self._rank}": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict[f"next{self._rank}"]


def config_for(folder: Path, degrees: dict[str, int]) -> Trainer.Config:
    """torchtitan's smallest Llama 3, cut to one layer and a small vocabulary, with Muon."""
    config = torchtitan_muon.llama3_debugmodel_muon()
    config.optimizer.lr = LR
    config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    model = config.model_spec.model
    model.layers = model.layers[:1]
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has no backward on CPU
    config.dump_folder = str(folder)
    config.tokenizer, config.dataloader = NoTokenizer.Config(), SeededTokens.Config()
    config.training = TrainingConfig(
        steps=STEPS,
        seq_len=LENGTH,
        local_batch_size=BATCH,
        global_batch_size=ACCUMULATED * BATCH * math.prod(size for axis, size in degrees.items() if "data" in axis),
        max_norm=LARGEST_NORM,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    config.parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **degrees)  # the default wants a newer torch
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=2)
    config.checkpoint = CheckpointManager.Config(enable=True, interval=SAVED_AT, last_save_model_only=False)
    config.debug.seed = 0
    return config


def build(config: Trainer.Config) -> Trainer:
    trainer = Trainer(config)
    for module in (
        module for part in trainer.model_parts for module in part.modules() if isinstance(module, FSDPModule)
    ):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sums of scaled values
    return trainer


def train(config: Trainer.Config) -> tuple[nn.Module, dict[int, dict[str, Any]]]:
    """The model after torchtitan's own ``train()``, and what it logged."""
    trainer, metrics = build(config), {}
    # In place of TensorBoard.
    trainer.metrics_processor.logger = SimpleNamespace(
        log=lambda values, step: metrics.update({step: values}), close=lambda: None
    )
    with mock.patch("time.sleep"):  # the trainer waits two seconds at the end
        trainer.train()
    trainer.close()
    (model,) = trainer.model_parts
    return model, metrics


def lr_factor(step: int) -> float:
    """Two steps of warm-up, then a linear decay that ends just above zero."""
    return min((step + 1) / 2, 1.0, 1 - (step - 2) / (STEPS - 2))


def train_plainly(config: Trainer.Config) -> tuple[nn.Module, list[float]]:
    """The same model, sharded alike, in a loop without a trainer; and this rank's part of the loss of each step."""
    trainer = build(config)
    (model,) = trainer.model_parts
    optimizer = Muon(get_default_muon_param_groups(model), lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    batches, losses = iter(trainer.dataloader), []
    tokens = torch.tensor(config.training.global_batch_size * LENGTH)
    for _ in range(STEPS):
        parts = []
        for _ in range(ACCUMULATED):
            inputs, labels = next(batches)
            loss, _ = trainer.loss_fn(model(inputs["input"]), labels, tokens)
            loss.backward()
            parts.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM, foreach=True)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(sum(parts))
    trainer.close()
    return model, losses


def trainer_case(name: str, degrees: dict[str, int], folder: Path) -> None:
    """All that the trainer does, beside a plain loop; then a second trainer that resumes in the middle."""
    folder = folder / name
    expected, losses = train_plainly(config_for(folder / "plain", degrees))
    model, metrics = train(config_for(folder, degrees))
    same_weights(model, expected)
    for step in range(STEPS):
        logged = metrics[step + 1]
        assert logged["lr/Muon/0"] == logged["lr/Muon/1"] == LR * lr_factor(step)
        if name != "tp":  # there all ranks have the same loss
            dist.all_reduce(losses[step])
        assert logged["loss_metrics/global_avg_loss"] == losses[step].item()
        assert logged["grad_norm"] > LARGEST_NORM
    saved = FileSystemReader(folder / "checkpoint" / f"step-{SAVED_AT}").read_metadata().state_dict_metadata
    assert any(key.endswith("state.layers.0.attention.wo.weight.momentum_buffer") for key in saved)

    resumed = config_for(folder, degrees)
    resumed.checkpoint.load_step, resumed.debug.seed = SAVED_AT, 1
    model, metrics = train(resumed)
    assert sorted(metrics) == list(range(SAVED_AT + 1, STEPS + 1))
    same_weights(model, expected)


def container_case(name: str, degrees: dict[str, int], folder: Path) -> None:
    """What the config selects: default groups or patterns, options, gradients that stay, and what is refused."""
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 5))
    (optimizer,) = muon(lr=LR, weight_decay=0.0, momentum=0.9).build(model_parts=[model])
    assert [param.name for param in optimizer.plan().params] == ["1.weight", "2.weight"]  # it is prepared
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["1.weight", "2.weight"],
        ["0.weight", "3.weight"],
        ["1.bias", "2.bias", "3.bias"],
    ]
    assert {(group["lr"], group["weight_decay"], group["momentum"]) for group in optimizer.param_groups} == {
        (LR, 0.0, 0.9)
    }

    model(torch.zeros(1, dtype=torch.int64)).sum().backward()
    before = {name: param.grad for name, param in model.named_parameters()}
    optimizer.step()
    # CUDA graphs write into them again
    assert all(param.grad is before[name] for name, param in model.named_parameters())

    patterns = [
        ParamGroupConfig(pattern=r"^2\.weight", optimizer_name="Muon", optimizer_kwargs={"use_muon": True, "lr": 1e-4}),
        ParamGroupConfig(pattern=r"weight", optimizer_name="Muon", optimizer_kwargs={"use_muon": False}),
        ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-4}),
    ]
    both = MuonContainer.Config(lr=LR, param_groups=patterns, implementation="for-loop").build(model_parts=[model])
    assert [type(optimizer) for optimizer in both] == [Muon, torch.optim.AdamW]
    assert [(group["param_names"], group["lr"]) for group in both.optimizers[0].param_groups] == [
        (["2.weight"], 1e-4),
        (["0.weight", "1.weight", "3.weight"], LR),
    ]
    with pytest.raises(ConfigError, match=r"is for torch\.optim\.AdamW"):
        MuonContainer.Config(implementation="fused_opt_states_bf16").build(model_parts=[model])
    unknown = MuonContainer.Config(param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="Lion")])
    with pytest.raises(NotImplementedError, match="Lion"):
        unknown.build(model_parts=[model])

    command = ["--module", "torchtitan_muon", "--config", "llama3_8b_muon", "--optimizer.lr", "0.25"]
    config = ConfigManager().parse_args(command)
    assert isinstance(config.optimizer, MuonContainer.Config)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (0.25, 0.1)
    assert config.to_dict()["optimizer"]["lr"] == 0.25  # what the trainer logs and writes


def run_case(name: str, folder: Path) -> None:
    """Runs a case on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    degrees = {
        "ddp": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
        "fsdp2": {"data_parallel_shard_degree": 2},
        "tp": {"tensor_parallel_degree": 2},
    }
    (container_case if name == "container" else trainer_case)(name, degrees.get(name, {}), folder)
