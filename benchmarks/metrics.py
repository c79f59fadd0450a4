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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import common  # first: it sets what torch reads when it starts
import torch
from common import COLOURS, Goal, Quartiles, Report, Step, race, ratio
from torch import nn

from meshmuon import Muon
from meshmuon.metrics import Metrics

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
KINDS: Mapping[str, Metrics | None] = {
    "no metrics": None,
    "metrics": Metrics(every=1),
    "without the spectra of weights": Metrics(every=1, weight_spectra=False),
}


@dataclass(frozen=True, slots=True)
class Result:
    """Of one model: the time of a measured step over that of one that is not, by kind of metrics."""

    model: str
    ratios: dict[str, Quartiles]

    def added(self, kind: str) -> float:
        """What every 10th step adds to the mean step."""
        return (self.ratios[kind].median - 1) / EVERY


def optimizer_of(model: Model, metrics: Metrics | None) -> Muon:
    generator = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=generator) / shape[1] ** 0.5) for shape in model.shapes]
    gains = [nn.Parameter(torch.ones(shape[0])) for shape in model.shapes]
    for param in (*matrices, *gains):
        param.grad = torch.randn(param.shape, generator=generator)
    groups = [{"params": matrices, "use_muon": True}, {"params": gains, "use_muon": False}]
    return Muon(groups, lr=1e-4, none_grad=False, metrics=metrics)


def measure(model: Model, rounds: int, seconds: float) -> Result:
    optimizers = {name: optimizer_of(model, metrics) for name, metrics in KINDS.items()}
    samples = race(
        {name: Step(optimizer.step) for name, optimizer in optimizers.items()}, rounds, warmups=2, seconds=seconds
    )
    plain = samples["no metrics"].clock
    return Result(str(model), {name: ratio(samples[name].clock, plain) for name in KINDS if name != "no metrics"})


def draw(figure: Figure, results: Sequence[Result]) -> None:
    axis = figure.subplots()
    kinds = list(results[0].ratios)
    for k, (kind, colour) in enumerate(zip(kinds, (COLOURS["ours"], COLOURS["others"]), strict=True)):
        places = [index + 0.35 * (k - 0.5) for index in range(len(results))]
        axis.bar(places, [100 * result.added(kind) for result in results], width=0.33, color=colour, label=kind)
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
    rows = [
        [
            result.model,
            *(text for kind in result.ratios for text in (result.ratios[kind].text(), f"{result.added(kind):.2%}")),
        ]
        for result in results
    ]
    columns = [
        "model",
        *(text for kind in results[0].ratios for text in (f"{kind}: measured step ÷ other step", "every 10th adds")),
    ]
    report.table("Cost of metrics, optimizer step alone", columns, rows)
    goals = [
        Goal(f"every {EVERY}th step adds to a step of {one.model}", one.added("metrics"), most=MOST) for one in results
    ]
    content: list[dict[str, Any]] = [
        {"model": result.model, "ratios": {kind: asdict(value) for kind, value in result.ratios.items()}}
        for result in results
    ]
    report.finish(content, goals, lambda figure: draw(figure, results), (7, 4))


if __name__ == "__main__":
    main()
