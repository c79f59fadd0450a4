"""A small Llama and its data, and what a plain loop makes of them: the reference for Trainer, SFTTrainer and
Accelerate.

The loop runs on the ranks of the trainer, wrapped by DDP or sharded by FSDP2 as there, and adds up in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshmuon import Muon
from tests.support.optional import need

need("transformers")
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

VOCABULARY, LENGTH, BATCH, MICROBATCHES, STEPS = 96, 12, 2, 2, 10
LR, DECAY, WARMUP = 3e-3, 0.05, 2  # not the defaults of Muon or Trainer
CLIPPING = 0.5  # gradients have norms of about 1: every step clips
NO_CLIPPING = 1e9

Batch = dict[str, Tensor]
# of a microbatch of a step in which all ranks predict so many tokens
Loss = Callable[[nn.Module, Batch, Tensor], Tensor]


def small_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **(sizes | changes)))


def samples() -> list[Batch]:
    """As many as two ranks need; one process uses the first half."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(VOCABULARY, (LENGTH,), generator=generator) for _ in range(2 * MICROBATCHES * BATCH * STEPS)]
    return [{"input_ids": row, "labels": row} for row in rows]


def microbatches(step: int, rank: int, world: int) -> list[Batch]:
    """Those of a rank in a step. Ranks take turns, batch by batch."""
    rows = samples()
    places = [((step * MICROBATCHES + micro) * world + rank) * BATCH for micro in range(MICROBATCHES)]
    return [{key: torch.stack([row[key] for row in rows[at : at + BATCH]]) for key in rows[0]} for at in places]


def mean_of_step(model: nn.Module, batch: Batch, tokens: Tensor) -> Tensor:
    """Trainer's loss: each token counts alike, in whichever microbatch it is."""
    loss: Tensor = model(**batch, num_items_in_batch=tokens).loss
    return loss


@dataclass
class PlainRun:
    """A trained model, and the norm of the gradients and the lr of each step."""

    model: nn.Module
    norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)

    def update(self, optimizer: Muon, schedule: Any, max_norm: float, times: int = 1) -> None:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        self.lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for _ in range(times):
            schedule.step()
        self.model.zero_grad()


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return get_scheduler("cosine", optimizer, num_warmup_steps=WARMUP, num_training_steps=STEPS)


def plain_optimizer(model: nn.Module) -> Muon:
    """Groups as one would write them by hand for this model."""
    groups: dict[tuple[bool, float], list[str]] = {}
    params = dict(model.named_parameters())
    for name, param in params.items():
        use_muon = param.dim() == 2 and "embed" not in name and "lm_head" not in name
        groups.setdefault((use_muon, 0.0 if "norm" in name else DECAY), []).append(name)
    return Muon(
        [
            {"params": [params[name] for name in names], "names": names, "use_muon": use_muon, "weight_decay": decay}
            for (use_muon, decay), names in groups.items()
        ],
        lr=LR,
    )


def plain_loop(
    model: nn.Module, layout: str, max_norm: float, loss_of: Loss = mean_of_step, times: int = 1, policy: Any = None
) -> PlainRun:
    """What this rank trains. The schedule advances ``times`` per step; ``policy`` is FSDP2's."""
    rank, world = (0, 1) if layout == "single" else (dist.get_rank(), dist.get_world_size())
    for module in (*model.model.layers, model) if layout == "fsdp2" else ():
        fully_shard(module, mp_policy=policy or MixedPrecisionPolicy())
    wrapped: Any = DistributedDataParallel(model) if layout == "ddp" else model
    run, optimizer = PlainRun(model), plain_optimizer(model)
    schedule, tokens = schedule_of(optimizer), torch.tensor(world * MICROBATCHES * BATCH * (LENGTH - 1))
    for step in range(STEPS):
        for k, batch in enumerate(microbatches(step, rank, world)):
            last = k == MICROBATCHES - 1
            if layout == "fsdp2":
                model.set_requires_gradient_sync(last)
            with wrapped.no_sync() if layout == "ddp" and not last else nullcontext():
                (loss_of(wrapped, batch, tokens) * world).backward()  # DDP and FSDP2 take the mean over ranks
        run.update(optimizer, schedule, max_norm, times)
    return run
