"""What metrics cost: optimizer steps that measure beside the same steps that do not, in turns, in seconds of the
process.

A step that measures takes longer; the figure that counts is what that adds to a step on average if every 10th one
measures. The gradients are fixed, so that both do the same otherwise. Forward and backward are not part of it: in a
training, the share is smaller.

    python benchmarks/metrics.py
    python benchmarks/metrics.py --rounds 5
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import common  # first: it sets what torch reads when it starts
import torch
from common import COLOURS, Goal, Quartiles, Report, Step, race, ratio
from torch import nn

from meshmuon import Muon

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVERY = 10
MOST = 0.02


@dataclass(frozen=True, slots=True)
class Model:
    """The matrices of a transformer, with a gain for each."""

    width: int
    layers: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Four projections of attention, two of the MLP."""
        return [(self.width, self.width)] * 4 * self.layers + [
            (4 * self.width, self.width),
            (self.width, 4 * self.width),
        ] * self.layers

    def __str__(self) -> str:
        return f"{self.layers} layer{'s' if self.layers > 1 else ''} of width {self.width}"


MODELS = (Model(256, 4), Model(512, 2), Model(1024, 1))
QUICK = (Model(32, 1),)


@dataclass(frozen=True, slots=True)
class Result:
    """Of one model: the time of a measured step over that of one that is not."""

    model: str
    ratio: Quartiles

    @property
    def added(self) -> float:
        """What every 10th step adds to the mean step."""
        return (self.ratio.median - 1) / EVERY


def optimizer_of(model: Model, metrics: int | None) -> Muon:
    generator = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=generator) / shape[1] ** 0.5) for shape in model.shapes]
    gains = [nn.Parameter(torch.ones(shape[0])) for shape in model.shapes]
    for param in (*matrices, *gains):
        param.grad = torch.randn(param.shape, generator=generator)
    groups = [{"params": matrices, "use_muon": True}, {"params": gains, "use_muon": False}]
    return Muon(groups, lr=1e-4, none_grad=False, metrics=metrics)


def measure(model: Model, rounds: int, seconds: float) -> Result:
    optimizers = {every: optimizer_of(model, every) for every in (None, 1)}
    steps = {"measured" if every else "plain": Step(optimizer.step) for every, optimizer in optimizers.items()}
    samples = race(steps, rounds, warmups=2, seconds=seconds)
    return Result(str(model), ratio(samples["measured"].clock, samples["plain"].clock))


def draw(figure: Figure, results: Sequence[Result]) -> None:
    axis = figure.subplots()
    axis.bar(range(len(results)), [100 * result.added for result in results], width=0.5, color=COLOURS["ours"])
    axis.axhline(100 * MOST, color=COLOURS["line"], linestyle="--", linewidth=1, label="goal")
    axis.set_xticks(range(len(results)), [result.model for result in results])
    axis.set(ylabel="% of an optimizer step", title=f"What metrics add if every {EVERY}th step measures")
    axis.legend()


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options: argparse.Namespace = common.make_parser(__doc__).parse_args(arguments)
    torch.set_num_threads(options.threads)
    report = Report("metrics", options)
    models = QUICK if options.quick else MODELS
    rounds = options.rounds or (2 if options.quick else 15)
    results = [measure(model, rounds, 60.0) for model in report.each(models, str)]
    rows = [(result.model, result.ratio.text(), f"{result.added:.2%}") for result in results]
    report.table(
        "Cost of metrics, optimizer step alone", ("model", "measured step ÷ other step", "every 10th adds"), rows
    )
    goals = [Goal(f"every {EVERY}th step adds to a step of {one.model}", one.added, most=MOST) for one in results]
    content: list[dict[str, Any]] = [{"model": result.model, "ratio": asdict(result.ratio)} for result in results]
    report.finish(content, goals, lambda figure: draw(figure, results), (7, 4))


if __name__ == "__main__":
    main()
