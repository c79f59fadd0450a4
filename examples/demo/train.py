"""The training loop: one model, one optimizer, a schedule, and the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from demo.data import Corpus, TrainBatches, valid_batches
from demo.health import HealthLog
from demo.model import GPT, ModelConfig, build_model
from demo.optimizers import CONTENDERS, TITLES, OptimizerConfig, build_optimizer
from demo.processes import Runtime, mean, shard
from demo.progress import Progress
from meshmuon import MaxLogits, Muon

SCHEDULES = ("linear", "cosine", "constant")


class NonFiniteLossError(RuntimeError):
    """Training diverged: the loss, or an attention logit, is no longer a number."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Length, batch and schedule of a run; the same for every optimizer.

    `microbatches` is the number of equal parts, over all processes, in which a batch is computed; None is one per
    process.
    """

    steps: int
    batch_size: int
    warmup_steps: int
    schedule: str
    grad_clip: float
    eval_every: int
    eval_windows: int
    seed: int
    microbatches: int | None = None


@dataclass(slots=True)
class EvalPoint:
    """Validation loss (nats per byte) after `step` steps and `seconds` of training, evaluation excluded."""

    step: int
    seconds: float
    loss: float


@dataclass(slots=True)
class ResumePoint:
    """The run was stopped and went on from a checkpoint after `step` steps, with `processes` processes."""

    step: int
    processes: int


@dataclass(slots=True)
class RunResult:
    """What one run left behind. Times are in seconds; one entry per step in the lists.

    `largest_logit` is the largest of all layers, heads and sequences in a step's forward, that is, before its update;
    it is empty in runs that do not watch logits. `health` is what `HealthLog` writes down; empty for AdamW.
    """

    name: str
    hyperparameters: dict[str, object]
    status: str = "running"
    evals: list[EvalPoint] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)
    tokens_per_step: int = 0
    routing: str | None = None
    plan: str | None = None
    resumed: list[ResumePoint] = field(default_factory=list)
    largest_logit: list[float] = field(default_factory=list)
    health: list[dict[str, Any]] = field(default_factory=list)

    @property
    def title(self) -> str:
        return TITLES[self.name]

    @property
    def steps_done(self) -> int:
        return len(self.train_loss)

    @property
    def seconds(self) -> float:
        return sum(self.step_seconds)

    @property
    def optimizer_share(self) -> float:
        return sum(self.optimizer_seconds) / self.seconds if self.step_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step * self.steps_done / self.seconds if self.step_seconds else 0.0


def lr_scale(step: int, steps: int, warmup_steps: int, schedule: str) -> float:
    """Factor on the lr at `step` (from 0): linear warm-up, then a decay that ends at zero after the last step."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    if schedule == "linear":
        return 1.0 - done
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0


class Run:
    """One contender's training, from the shared initial weights to the last step or an interruption."""

    def __init__(
        self,
        name: str,
        corpus: Corpus,
        model_config: ModelConfig,
        optimizer_config: OptimizerConfig,
        config: TrainConfig,
        runtime: Runtime,
    ) -> None:
        self.config, self.runtime, self.corpus, self.contender = config, runtime, corpus, CONTENDERS[name]
        self.model: GPT = build_model(model_config, config.seed, runtime.device)
        shard(self.model, runtime)
        self.optimizer = build_optimizer(name, self.model, optimizer_config)
        self.logits = _watch(self.model, runtime) if self.contender.watched else None
        self.peak_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.batches = TrainBatches(corpus.train, model_config.seq_len, config.batch_size, config.seed)
        self.result = RunResult(
            name,
            hyperparameters=_hyperparameters(self.optimizer),
            tokens_per_step=config.batch_size * model_config.seq_len,
            routing=_routing(self.optimizer),
        )
        self._health: HealthLog | None = None

    @property
    def health(self) -> HealthLog:
        """Writes measurements into `result`, also into one that was read from a checkpoint."""
        if self._health is None:
            self._health = HealthLog(self.optimizer, self.result.health)
        return self._health

    def train(self, progress: Progress, after_step: Callable[[Run], None] | None = None) -> RunResult:
        """Train to the end. On Ctrl-C or divergence `result` keeps what was done and the exception passes on.

        `after_step` is called after every step and what belongs to it, when `result` is complete up to there.
        """
        try:
            if self.result.evals:
                progress.evaluated(self.result.evals[-1].step, self.result.evals[-1].loss)
            else:
                self._evaluate(progress)
            for step in range(self.result.steps_done, self.config.steps):
                self._step(step)
                self._report(progress)
                if after_step is not None:
                    after_step(self)
        except KeyboardInterrupt:
            self.result.status = "interrupted"
            raise
        except NonFiniteLossError:
            self.result.status = "diverged"
            raise
        return self.result

    def _report(self, progress: Progress) -> None:
        result = self.result
        logit = result.largest_logit[-1] if result.largest_logit else None
        progress.step(result.steps_done, result.train_loss[-1], result.step_seconds[-1], logit)
        last = result.steps_done == self.config.steps
        if last or result.steps_done % self.config.eval_every == 0:
            self._evaluate(progress)
        if last:
            result.plan = _plan(self.optimizer)
            result.status = "finished"

    def _step(self, step: int) -> None:
        parts = self._parts(step)
        scale = lr_scale(step, self.config.steps, self.config.warmup_steps, self.config.schedule)
        for group, peak in zip(self.optimizer.param_groups, self.peak_lrs, strict=True):
            group["lr"] = peak * scale
        start = self._now()
        with self._watching():
            losses = [self._backward(part, len(parts)) for part in parts]
        if self.config.grad_clip > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        # The loss is read before the weights change: a diverged run must not step on non-finite gradients.
        value = self._finite(mean([sum(losses) / len(losses)], self.runtime)[0], f"training loss at step {step + 1}")
        before_optimizer = self._now()
        self._update(step)
        end = self._now()
        self.health.after_step(step + 1)
        self.optimizer.zero_grad(set_to_none=True)
        self.result.train_loss.append(value)
        self.result.step_seconds.append(end - start)
        self.result.optimizer_seconds.append(end - before_optimizer)

    def _parts(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This process's microbatches, in the order of the rows."""
        rank, world = self.runtime.rank, self.runtime.world_size
        count = (self.config.microbatches or world) // world
        return [self._on_device(self.batches.batch(step, rank * count + part, world * count)) for part in range(count)]

    def _backward(self, part: tuple[Tensor, Tensor], parts: int) -> float:
        """Adds the gradients of a microbatch, one of `parts` equal ones, and returns its loss."""
        loss = self.model.loss(*part)
        torch.autograd.backward(loss / parts)
        return loss.item()

    def _watching(self) -> AbstractContextManager[None]:
        return nullcontext() if self.logits is None else self.logits.collecting()

    def _update(self, step: int) -> None:
        """The optimizer's step; where logits are watched they are written down, and clipped by if the contender
        does that.
        """
        if self.logits is None:
            self.optimizer.step()
            return
        logits = self.logits.collect()
        largest = max(layer.max().item() for layer in logits.values())
        self._finite(largest, f"largest attention logit at step {step + 1}")
        if isinstance(self.optimizer, Muon) and self.contender.clipped:
            self.optimizer.step(qk_logits=logits)
        else:
            self.optimizer.step()
        self.result.largest_logit.append(largest)

    def _evaluate(self, progress: Progress) -> None:
        loss = validation_loss(
            self.model, self.corpus.valid, self.config.batch_size, self.config.eval_windows, self.runtime
        )
        loss = self._finite(loss, f"validation loss after step {self.result.steps_done}")
        point = EvalPoint(self.result.steps_done, self.result.seconds, loss)
        self.result.evals.append(point)
        progress.evaluated(point.step, loss)

    def _finite(self, value: float, what: str) -> float:
        if math.isfinite(value):
            return value
        flag = "--lr" if self.contender.optimizer == "muon" else "--adamw-lr"
        raise NonFiniteLossError(
            f"{self.result.title}: {what} is {value}, peak lr {max(self.peak_lrs):g}. "
            f"Training diverged: lower {flag}, or raise --warmup-steps."
        )

    def _on_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0].to(self.runtime.device), batch[1].to(self.runtime.device)

    def _now(self) -> float:
        if self.runtime.device.type == "cuda":
            # Kernels run behind the host: without this the clock would read launch times.
            torch.cuda.synchronize(self.runtime.device)
        return time.perf_counter()


@torch.no_grad()
def validation_loss(model: GPT, text: Tensor, batch_size: int, windows: int, runtime: Runtime) -> float:
    """The mean loss over evenly spread windows of the text, the same on all processes.

    Process r of w takes batches r, r + w, …; FSDP needs equally many passes of all, so some repeat the last batch.
    """
    rank, world, device, total = runtime.rank, runtime.world_size, runtime.device, 0.0
    batches = list(valid_batches(text, model.config.seq_len, batch_size, windows))
    for first in range(0, len(batches), world):
        index = first + rank
        tokens, targets = batches[min(index, len(batches) - 1)]
        loss = model.loss(tokens.to(device), targets.to(device)).item()
        total += loss * len(tokens) if index < len(batches) else 0.0
    return world * mean([total], runtime)[0] / windows


def warm_up(model_config: ModelConfig, config: TrainConfig, corpus: Corpus, runtime: Runtime) -> None:
    """One throw-away pass, so that the first run's clock does not pay for the process's first kernels."""
    model = build_model(model_config, config.seed, runtime.device)
    batches = TrainBatches(corpus.train, model_config.seq_len, config.batch_size, config.seed)
    tokens, targets = batches.batch(0, runtime.rank, runtime.world_size)
    torch.autograd.backward(model.loss(tokens.to(runtime.device), targets.to(runtime.device)))


def _watch(model: GPT, runtime: Runtime) -> MaxLogits:
    """Watches the attention of all layers, over all processes: each sees a part of the batch only."""
    logits = MaxLogits(dist.group.WORLD if runtime.world_size > 1 else None)
    for number, layer in enumerate(model.layers):
        logits.attach(layer.get_submodule("attention"), number)
    return logits


def _routing(optimizer: torch.optim.Optimizer) -> str | None:
    table: Callable[[], object] | None = getattr(optimizer, "routing_table", None)
    return None if table is None else str(table())


def _plan(optimizer: torch.optim.Optimizer) -> str | None:
    return optimizer.plan().describe() if isinstance(optimizer, Muon) else None


def _hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The groups' options without their parameters, as JSON can hold them."""
    groups: list[Mapping[str, object]] = list(optimizer.param_groups)
    hidden = {"params", "names", "param_names"}
    plain = (bool, int, float, str, type(None))
    return {
        f"group {i}": {
            key: value if isinstance(value, plain) else str(value) for key, value in group.items() if key not in hidden
        }
        for i, group in enumerate(groups)
    }
