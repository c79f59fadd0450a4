"""Runs by Trainer, SFTTrainer and Accelerate, on one process or on ranks, each compared with a plain loop."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy

from meshmuon import UnsupportedError
from tests.support.optional import need
from tests.support.processes import Job

from . import hf_reference as reference
from .hf_reference import BATCH, CLIPPING, DECAY, LR, MICROBATCHES, NO_CLIPPING, STEPS, WARMUP, Batch, PlainRun
from .plain_loop import same_weights

need("transformers")
need("accelerate")
need("trl")
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from meshmuon.integrations.hf import PrepareMuon, muon

SAVED = STEPS // 2  # the step after which a checkpoint is written


# Processes.


def enter(layout: str) -> None:
    """Forgets the runs before, and puts into the environment what a launcher would."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if layout != "single":
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, OMP_NUM_THREADS="1")


def allow_fsdp2_on_cpu(layout: str) -> None:
    """Accelerate ignores the plugin for FSDP if it finds itself on CPUs, though FSDP2 itself works there."""
    if layout == "fsdp2":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def assert_layout(wrapped: nn.Module, layout: str) -> None:
    """The run was really distributed in the way that it was to be."""
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel) == (layout == "ddp")
    assert isinstance(wrapped, FSDPModule) == (layout == "fsdp2")


# Trainer and SFTTrainer.


def arguments(folder: Path, layout: str) -> dict[str, Any]:
    sharding = {"fsdp": True, "fsdp_config": {"version": 2}} if layout == "fsdp2" else {}
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": MICROBATCHES,
        "max_steps": STEPS,
        "learning_rate": LR,
        "weight_decay": DECAY,
        "adam_beta2": 0.95,  # the default of meshmuon
        "lr_scheduler_type": "cosine",
        "warmup_steps": WARMUP,
        "max_grad_norm": CLIPPING,
        "logging_steps": 1,
        "save_steps": SAVED,
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        "report_to": "none",
        **sharding,
    }


def make(kind: str, folder: Path, layout: str, **options: Any) -> Trainer:
    enter(layout)
    given, model = arguments(folder, layout), reference.small_llama()
    args = SFTConfig(**given, bf16=False, gradient_checkpointing=False) if kind == "sft" else TrainingArguments(**given)
    allow_fsdp2_on_cpu(layout)
    wanted = (muon, {"training_args": args, **options})
    if kind == "trainer":
        prepares = [NeedsPlan()]
        return Trainer(
            model, args, train_dataset=reference.samples(), optimizer_cls_and_kwargs=wanted, callbacks=prepares
        )
    words = {"<pad>": 0, "</s>": 1} | {f"word{k}": k for k in range(2, reference.VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="</s>"
    )
    dataset = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in reference.samples()])
    return SFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer, optimizer_cls_and_kwargs=wanted)


class NeedsPlan(PrepareMuon):
    """Demands that the first step was prepared."""

    def on_step_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        assert optimizer.optimizer.plan()


def loss_of_sft(model: nn.Module, batch: Batch, tokens: Tensor) -> Tensor:
    """SFTTrainer's loss; it changes the forward of its model so that logits need not be kept."""
    mask = torch.ones_like(batch["input_ids"])
    return -model(**batch, attention_mask=mask, use_cache=False, fused_lm_head=True).log_probs.sum() / tokens


def check_trainer(folder: Path, kind: str, layout: str, *, shared: bool = False) -> None:
    """Clips, accumulates, schedules, logs and saves as a plain loop does; a run that resumes ends with the same bits.

    ``shared``: the replicas of DDP divide the work. Trainer leaves the process group with the optimizer.
    """
    model = make("sft", folder, "single").model if kind == "sft" else reference.small_llama()
    loss = loss_of_sft if kind == "sft" else reference.mean_of_step
    expected = reference.plain_loop(model, layout, CLIPPING, loss)
    assert min(expected.norms) > CLIPPING
    options = {"replica_group": dist.group.WORLD} if shared else {}
    trainer = make(kind, folder, layout, **options)
    trainer.train()
    assert_layout(trainer.model_wrapped, layout)
    same_weights(trainer.model, expected.model)
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert [entry["learning_rate"] for entry in logs] == expected.lrs
    assert [entry["grad_norm"] for entry in logs] == expected.norms
    resumed = make(kind, folder, layout, **options)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}"))
    assert [entry["step"] for entry in resumed.state.log_history if "grad_norm" in entry] == list(range(1, STEPS + 1))
    same_weights(resumed.model, expected.model)


# Accelerate.


def loss_of_accelerate(model: nn.Module, batch: Batch, tokens: Tensor) -> Tensor:
    """The mean of the microbatch; Accelerate divides it by the number of microbatches, DDP and FSDP2 by that of the
    ranks.
    """
    world = tokens.item() // (MICROBATCHES * batch["labels"][..., 1:].numel())
    loss: Tensor = model(**batch).loss / (MICROBATCHES * world)
    return loss


def loss_in_bfloat16(model: nn.Module, batch: Batch, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of_accelerate(model, batch, tokens).float()


@dataclass(frozen=True)
class Accelerated:
    """How a run with Accelerate differs from the simplest one."""

    layout: str
    max_norm: float = CLIPPING
    precision: str = "no"
    plugin: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def expected(self) -> PlainRun:
        """Accelerate's scheduler advances once for every rank in a step."""
        model, times = reference.small_llama(**self.model), 1 if self.layout == "single" else 2
        if self.precision == "no":
            return reference.plain_loop(model, self.layout, self.max_norm, loss_of_accelerate, times)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
        return reference.plain_loop(model, self.layout, self.max_norm, loss_in_bfloat16, times, policy)


class AcceleratedRun:
    """A loop as Accelerate's documentation has it."""

    def __init__(self, case: Accelerated) -> None:
        enter(case.layout)
        PartialState(cpu=True)
        allow_fsdp2_on_cpu(case.layout)
        plugin = None
        if case.layout == "fsdp2":
            plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="transformer_based_wrap", **case.plugin)
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=MICROBATCHES, mixed_precision=case.precision, fsdp_plugin=plugin
        )
        model = reference.small_llama(**case.model)
        optimizer = muon()(model, lr=LR, weight_decay=DECAY)
        optimizer.prepare()  # too early: Accelerate may exchange its parameters
        loader = torch.utils.data.DataLoader(reference.samples(), batch_size=BATCH)
        schedule = reference.schedule_of(optimizer)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )
        self.optimizer.optimizer.prepare()
        self.max_norm = case.max_norm

    def train(self, first: int, last: int) -> None:
        """The steps from ``first`` up to and without ``last``."""
        done = first
        for batch in skip_first_batches(self.loader, first * MICROBATCHES):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch).loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            done += self.accelerator.sync_gradients
            if done == last:
                return


def check_accelerate(folder: Path, case: Accelerated) -> None:
    """Exchanges parameters, clips, accumulates, schedules as a plain loop does; resumes with the same bits."""
    run, expected = AcceleratedRun(case), case.expected()
    assert_layout(run.model, case.layout)
    params = {name.removeprefix("module."): param for name, param in run.model.named_parameters()}
    for group in run.optimizer.param_groups:
        assert all(params[name] is param for name, param in zip(group["param_names"], group["params"], strict=True))
    run.train(0, SAVED)
    run.accelerator.save_state(str(folder))
    run.train(SAVED, STEPS)
    assert (min(expected.norms) > case.max_norm) == (case.max_norm == CLIPPING)
    same_weights(run.model, expected.model)
    resumed = AcceleratedRun(case)
    resumed.accelerator.load_state(str(folder))
    resumed.train(SAVED, STEPS)
    same_weights(resumed.model, expected.model)


# On two ranks.


def check_that_fsdp1_is_refused(folder: Path) -> None:
    """Under FSDP1 Trainer asks for the optimizer of the wrapped model. Accelerate itself cannot wrap on CPU, torch
    can.
    """
    trainer = make("trainer", folder, "ddp")
    with pytest.raises(UnsupportedError, match=r"has flattened the weights.*FSDP2"):
        trainer.create_optimizer(
            FullyShardedDataParallel(trainer.model, device_id=torch.device("cpu"), use_orig_params=True)
        )


SHARDED = {"cpu_ram_efficient_loading": True, "state_dict_type": "SHARDED_STATE_DICT"}
ACCELERATED = {
    "Accelerate, DDP": Accelerated("ddp"),
    "Accelerate, DDP in bfloat16": Accelerated("ddp", precision="bf16"),
    "Accelerate, FSDP2": Accelerated("fsdp2"),
    "Accelerate, FSDP2 without clipping": Accelerated("fsdp2", NO_CLIPPING, plugin=SHARDED),
    "Accelerate, FSDP2 with tied weights": Accelerated("fsdp2", NO_CLIPPING, model={"tie_word_embeddings": True}),
    "Accelerate, FSDP2 in bfloat16": Accelerated("fsdp2", precision="bf16"),
}
RANK_CASES = {
    "Trainer, DDP": partial(check_trainer, kind="trainer", layout="ddp"),
    "Trainer, DDP whose ranks share the work": partial(check_trainer, kind="trainer", layout="ddp", shared=True),
    "Trainer, FSDP2": partial(check_trainer, kind="trainer", layout="fsdp2"),
    "Trainer, FSDP1": check_that_fsdp1_is_refused,
    "SFTTrainer, DDP": partial(check_trainer, kind="sft", layout="ddp"),
    "SFTTrainer, FSDP2": partial(check_trainer, kind="sft", layout="fsdp2"),
    **{name: partial(check_accelerate, case=case) for name, case in ACCELERATED.items()},
}


def jobs() -> dict[str, Job]:
    return {name: Job(2, partial(_in_own_folder, name)) for name in RANK_CASES}


def _in_own_folder(name: str, folder: Path) -> None:
    RANK_CASES[name](folder / name.replace(" ", "_"))
