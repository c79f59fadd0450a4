"""A small Llama and its data, and what plain loops make of them: the reference for Trainer, SFTTrainer and Accelerate.

The loops add up in the order of the trainers: the gradients of each rank over its microbatches, then over the ranks. With two
ranks and two microbatches each of these is a sum of two numbers, and means are divisions by powers of two, which do not round. So
a single process gives the bits of two ranks, unless gradients are clipped under FSDP2: the norm of a sharded gradient is added
up in another order. Then the reference is a plain loop over ``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshmuon import Muon
from tests.support.optional import need

need("transformers")
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

VOCABULARY, LENGTH, BATCH, MICROBATCHES, STEPS = 96, 12, 2, 2, 10
LR, DECAY, WARMUP = 3e-3, 0.05, 2  # not the defaults of Muon or Trainer
CLIPPING = 0.5  # gradients have norms of about 1: every step clips
NO_CLIPPING = 1e9

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch, Tensor], Tensor]  # of a microbatch of a step in which all ranks predict so many tokens


def small_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **(sizes | changes)))


def samples() -> list[Batch]:
    """As many as two ranks need; one process uses the first half."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(VOCABULARY, (LENGTH,), generator=generator) for _ in range(2 * MICROBATCHES * BATCH * STEPS)]
    return [{"input_ids": row, "labels": row} for row in rows]


def batches() -> list[Batch]:
    rows = samples()
    return [{key: torch.stack([row[key] for row in rows[k : k + BATCH]]) for key in rows[0]} for k in range(0, len(rows), BATCH)]


def steps(world: int) -> Iterator[list[list[Batch]]]:
    """For each step, the microbatches of each rank. Ranks take turns, batch by batch."""
    every = batches()
    for k in range(STEPS):
        first = k * MICROBATCHES * world
        yield [[every[first + micro * world + rank] for micro in range(MICROBATCHES)] for rank in range(world)]


def tokens_in(step: list[list[Batch]]) -> Tensor:
    """How many tokens all ranks predict."""
    return torch.tensor(sum(batch["labels"][..., 1:].numel() for microbatches in step for batch in microbatches))


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


def plain_loop(model: nn.Module, world: int, max_norm: float, loss_of: Loss = mean_of_step, times: int = 1) -> PlainRun:
    """One process that computes what ``world`` ranks compute. The schedule advances ``times`` per step."""
    run, optimizer = PlainRun(model), plain_optimizer(model)
    schedule, params = schedule_of(optimizer), list(model.parameters())
    for step in steps(world):
        totals: list[Tensor] = []
        for microbatches in step:
            for batch in microbatches:
                loss_of(model, batch, tokens_in(step)).backward()
            of_rank = [param.grad for param in params if param.grad is not None]
            totals = [a + b for a, b in zip(totals, of_rank, strict=True)] if totals else of_rank
            model.zero_grad()
        for param, total in zip(params, totals, strict=True):
            param.grad = total
        run.update(optimizer, schedule, max_norm, times)
    return run


def fsdp2_loop(
    model: nn.Module, max_norm: float, loss_of: Loss = mean_of_step, times: int = 1, policy: MixedPrecisionPolicy | None = None
) -> PlainRun:
    """The same on each rank of FSDP2."""
    for module in (*model.model.layers, model):
        fully_shard(module, mp_policy=policy or MixedPrecisionPolicy())
    run, optimizer = PlainRun(model), plain_optimizer(model)
    schedule = schedule_of(optimizer)
    for step in steps(dist.get_world_size()):
        for k, batch in enumerate(step[dist.get_rank()]):
            model.set_requires_gradient_sync(k == MICROBATCHES - 1)
            (loss_of(model, batch, tokens_in(step)) * dist.get_world_size()).backward()  # FSDP2 takes the mean over ranks
        run.update(optimizer, schedule, max_norm, times)
    return run


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    named = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    return {name: param.full_tensor() if hasattr(param, "full_tensor") else param for name, param in named.items()}


def assert_same_bits(model: nn.Module, expected: nn.Module) -> None:
    ours, theirs = whole_parameters(model), whole_parameters(expected)
    assert ours.keys() == theirs.keys()
    off = {name: float((ours[name] - theirs[name]).abs().max()) for name in ours if not torch.equal(ours[name], theirs[name])}
    assert not off, f"largest differences: {off}"
