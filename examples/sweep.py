"""Find Muon's learning rate for your own model: put your training into `train` below, from the model to the loss at its
end.

Start it with: python examples/sweep.py --lr 1e-3, where --lr is what AdamW has today. AdamW trains with it, Muon with
1, 2, 4 and 8 times as much, and further by factors of 2 as long as its smallest or largest lr is the best.
"""

import argparse
import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshmuon import Muon, RoutingWarning

FACTORS = (1, 2, 4, 8)  # Muon's learning rates ÷ --lr
MORE = 4  # learning rates of Muon beyond these
STEPS, CLASSES, WIDTH = 200, 10, 64

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def train(make_optimizer: MakeOptimizer, seed: int) -> float:
    """One whole training, to the end of its schedule; returns the loss that counts, at best one of validation."""
    torch.manual_seed(seed)
    centres = torch.randn(8 * CLASSES, WIDTH)  # eight clusters per class

    def loss_of(samples: int) -> Tensor:
        clusters = torch.randint(8 * CLASSES, (samples,))
        loss: Tensor = F.cross_entropy(model(centres[clusters] + torch.randn(samples, WIDTH)), clusters % CLASSES)
        return loss

    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES)
    )
    optimizer = make_optimizer(model)  # was: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for _ in range(STEPS):
        loss_of(64).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    with torch.no_grad():
        return loss_of(4096).item()


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)


def muon(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    # a large lr is tried on purpose
    warnings.filterwarnings("ignore", message=".*moves entries by", category=RoutingWarning)
    return Muon(model, lr=lr, weight_decay=0.1)


class Losses:
    """The mean loss over the seeds of every lr that one optimizer has tried; infinite where a run diverged."""

    def __init__(
        self, name: str, build: Callable[[nn.Module, float], torch.optim.Optimizer], seeds: Sequence[int]
    ) -> None:
        self.name, self.build, self.seeds = name, build, seeds
        self.of_lr: dict[float, float] = {}

    def try_lr(self, lr: float) -> None:
        losses = [train(lambda model: self.build(model, lr), seed) for seed in self.seeds]
        self.of_lr[lr] = sum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.inf
        print(f"{self.name:<9}  {lr:<8g}  {self.text(lr)}", flush=True)

    def text(self, lr: float) -> str:
        return f"{self.of_lr[lr]:.4f}" if math.isfinite(self.of_lr[lr]) else "diverged"

    @property
    def found(self) -> str:
        if math.isinf(self.of_lr[self.best]):
            return f"{self.name}, which diverged with every lr"
        return f"{self.name} at lr={self.best:g} with {self.text(self.best)}"

    @property
    def best(self) -> float:
        return min(self.of_lr, key=self.of_lr.__getitem__)

    @property
    def beyond(self) -> float | None:
        """Twice the largest lr or half the smallest if that is the best one; else None."""
        if math.isinf(self.of_lr[self.best]):
            return None
        return {min(self.of_lr): self.best / 2, max(self.of_lr): self.best * 2}.get(self.best)


def main(lr: float, adamw_lrs: Sequence[float], lrs: Sequence[float], seeds: Sequence[int]) -> None:
    theirs, ours = Losses("AdamW", adamw, seeds), Losses("Muon", muon, seeds)
    print(f"optimizer  lr        loss{'' if len(seeds) == 1 else f', mean of {len(seeds)} seeds'}")
    for one in adamw_lrs or [lr]:
        theirs.try_lr(one)
    for one in lrs or [lr * factor for factor in FACTORS]:
        ours.try_lr(one)
    for _ in range(0 if lrs else MORE):
        if (beyond := ours.beyond) is not None:
            ours.try_lr(beyond)
    print(f"Best: {ours.found}, beside {theirs.found}.")
    if ours.beyond is not None:
        print("It is the first or last lr that was tried: try more with --lrs.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3, help="the lr that AdamW has today")
    parser.add_argument("--adamw-lrs", type=float, nargs="+", default=[], help="of AdamW, instead of --lr")
    parser.add_argument("--lrs", type=float, nargs="+", default=[], help="of Muon, instead of multiples of --lr")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run for each")
    main(**vars(parser.parse_args()))
