"""A small language model, its data, and the loop that a trainer must reproduce."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from meshmuon import Muon, get_default_muon_param_groups

from ..support.tensors import same

VOCABULARY, WIDTH, LENGTH, BATCH = 24, 16, 6, 4
STEPS, ACCUMULATED, LARGEST_NORM = 10, 2, 0.5  # the norm is about 1, so that every step is clipped
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


class Model(nn.Module):
    """Two matrices for Muon; an embedding, a head, a norm and biases for AdamW."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        out: Tensor = self.head(x + self.down(F.gelu(self.up(self.norm(x)))))
        return out


def build_model(hidden: int = 41) -> Model:
    """The same weights on every rank, whatever was drawn before. 41 rows do not divide evenly."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Model(hidden)


def sequences(batches: int) -> Tensor:
    """(batches · BATCH, LENGTH) tokens."""
    return torch.randint(VOCABULARY, (batches * BATCH, LENGTH), generator=torch.Generator().manual_seed(2))


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """The loss of predicting each token from the one before it."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Another learning rate at every step."""
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def rank_batches(rank: int, world: int, repeats: int, batches: int) -> Iterator[Tensor]:
    """The batches of a rank in the order of torch's DistributedSampler without shuffling: sequences rank, rank +
    world, …
    """
    own = sequences(batches * world)[rank::world]
    for _ in range(repeats):
        yield from own.split(BATCH)


def train_plainly(
    model: nn.Module,
    optimizer: Muon,
    batches: Iterable[Tensor],
    *,
    precision: torch.dtype = torch.float32,
    scale: float | None = None,
    clip: Callable[[Iterable[Tensor], float], Tensor] = nn.utils.clip_grad_norm_,
) -> list[float]:
    """Accumulates, clips, steps and schedules, as a user without a trainer does; returns the loss of every batch.

    Gradients are clipped in the order of the optimizer's groups, as trainers do: that order rounds the norm.
    """
    losses: list[float] = []
    scheduler = schedule(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    for k, tokens in enumerate(batches):
        last = k % ACCUMULATED == ACCUMULATED - 1
        with nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync():
            with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32, cache_enabled=False):
                loss = loss_of(model, tokens)
            scaler.scale(loss / ACCUMULATED).backward()
        losses.append(loss.item())
        if last:
            scaler.unscale_(optimizer)
            clip((param for group in optimizer.param_groups for param in group["params"]), LARGEST_NORM)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
    return losses


def optimizer_of(model: nn.Module, **options: object) -> Muon:
    return Muon(get_default_muon_param_groups(model), **{**OPTIONS, **options})  # type: ignore[arg-type]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of every parameter, by its name without wrappers."""
    parts = {}
    for name, param in model.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        parts[name.replace("_forward_module.", "").removeprefix("module.").removeprefix("net.")] = (
            local.detach().clone()
        )
    return parts


def same_weights(model: nn.Module, expected: nn.Module) -> None:
    """Demands that every parameter of both models has the same bits on this rank."""
    weights, expected_weights = weights_of(model), weights_of(expected)
    assert weights.keys() == expected_weights.keys()
    for name, weight in expected_weights.items():
        same(weights[name], weight, name)
