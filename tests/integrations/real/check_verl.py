"""verl's ``FSDPEngine`` with FSDP2 in two gloo processes: build, offload state, clip, schedule, save and resume.

verl knows accelerators only. Its interface for platforms is given one more, the CPU; everything else is verl's.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from meshmuon import ConfigError, Muon, get_default_muon_param_groups
from tests.support.processes import results_of, run_ranks

from ..hf_reference import VOCABULARY, small_llama
from ..plain_loop import same_weights
from ..test_recipes import recipe

STEPS, SAVED, LR = 10, 5, 3e-3


def use_cpu() -> None:
    """Registers the CPU as a platform of verl."""
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import set_platform

    rng = {"get_rng_state": torch.get_rng_state, "set_rng_state": torch.set_rng_state}
    # for its log
    memory = {"memory_allocated": lambda: 0, "memory_reserved": lambda: 0, "mem_get_info": lambda: (0, 0)}
    module = SimpleNamespace(**{**vars(torch.cpu), **rng, **memory, "empty_cache": lambda: None})

    class PlatformCPU(PlatformCUDA):  # type: ignore[misc]
        device_name, vendor_name, device_module = "cpu", "cpu", module

        def is_available(self) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"

        def empty_cache(self) -> None: ...

        def synchronize(self, device_index: int | None = None) -> None: ...

        def communication_backend_name(self) -> str:
            return "gloo"

    set_platform(PlatformCPU())


def engine_of(folder: Path, **changes: Any) -> Any:
    use_cpu()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    float32 = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    schedule = {"lr_warmup_steps": 2, "total_training_steps": STEPS, "lr_scheduler_type": "cosine"}
    attention = {"attn_implementation": "eager"}
    engine = FSDPEngine(
        HFModelConfig(
            path=str(folder / "model"), load_tokenizer=False, use_remove_padding=False, override_config=attention
        ),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=float32, optimizer_offload=True),
        FSDPOptimizerConfig(lr=LR, clip_grad=0.5, **(recipe("verl")["optim"] | changes), **schedule),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    return torch.randint(VOCABULARY, (2, 8), generator=generator)


def train(engine: Any, steps: range) -> list[float]:
    """As ``train_batch`` does: load, forward and backward, clip and step, schedule, offload. Returns norms and
    learning rates.
    """
    numbers = []
    for step in steps:
        engine.to("cpu", model=False, optimizer=True, grad=False)
        tokens = tokens_of(step)
        engine.optimizer_zero_grad()
        engine.module(input_ids=tokens, labels=tokens).loss.backward()
        numbers += [float(engine.optimizer_step()), float(engine.lr_scheduler_step())]
    return numbers


def plain_loop() -> tuple[nn.Module, list[float]]:
    from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_
    from verl.utils.torch_functional import get_cosine_schedule_with_warmup

    model = small_llama(attn_implementation="eager")
    for module in (*model.model.layers, model):
        fully_shard(module)
    optimizer = Muon(
        get_default_muon_param_groups(model), lr=LR, weight_decay=0.01, adamw_betas=(0.9, 0.999), momentum=0.95
    )
    scheduler = get_cosine_schedule_with_warmup(
        optimizer, num_warmup_steps=2, num_training_steps=STEPS, min_lr_ratio=0.0
    )
    numbers = []
    for step in range(STEPS):
        tokens = tokens_of(step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        norm = fsdp2_clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        numbers += [float(norm.full_tensor() if isinstance(norm, DTensor) else norm), float(scheduler.get_last_lr()[0])]
    return model, numbers


def rank_main(rank: int, folder: Path) -> None:
    engine = engine_of(folder)
    assert isinstance(engine.optimizer, Muon)
    numbers = train(engine, range(SAVED))
    engine.save_checkpoint(str(folder / "saved"), global_step=SAVED)
    numbers += train(engine, range(SAVED, STEPS))
    expected, expected_numbers = plain_loop()
    same_weights(engine.module, expected)
    assert numbers == expected_numbers
    resumed = engine_of(folder)
    resumed.load_checkpoint(str(folder / "saved"), del_local_after_load=False)
    assert train(resumed, range(SAVED, STEPS)) == numbers[2 * SAVED :]
    same_weights(resumed.module, expected)


def test_equal_to_a_plain_loop_and_resumes(tmp_path: Path) -> None:
    small_llama().save_pretrained(tmp_path / "model")
    results_of(run_ranks(2, rank_main, tmp_path, seconds=900))


def test_its_builder_gives_lr_decay_and_betas() -> None:
    from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer

    config = FSDPOptimizerConfig(lr=2e-3, weight_decay=0.25, betas=(0.8, 0.9), **recipe("verl")["optim"])
    optimizer = build_optimizer(small_llama().parameters(), config)
    assert isinstance(optimizer, Muon)
    groups = optimizer.param_groups
    assert {(group["lr"], group["weight_decay"], *group["adamw_betas"]) for group in groups} == {(2e-3, 0.25, 0.8, 0.9)}
    with pytest.raises(ConfigError, match="which does not say which module it is from"):
        build_optimizer(list(small_llama().parameters()), config)
