"""What share of a training step the optimizer takes in the demo: its model, its batch, its optimizers, in one process.

A step is the loss of a batch, its gradients, and the optimizer. The floor is orthogonalising the model's matrices with
nothing else done: no Muon can take less. Beside the floor meshmuon should cost about as much as AdamW does.

    python benchmarks/demo_share.py
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import common  # first: it sets what torch reads when it starts
import torch
from common import COLOURS, ROOT, Goal, Quartiles, Report, Samples, Step, quartiles, race
from single_device import alone_on

from meshmuon import Muon
from meshmuon.ortho import resolve_scheme

sys.path.insert(0, str(ROOT / "examples"))

from demo.model import GPT, ModelConfig, build_model
from demo.optimizers import build_optimizer
from demo.options import model_config, optimizer_config, train_config
from train_gpt import parser as demo_parser

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRADIENTS, MUON, ADAMW, FLOOR = "loss and gradients", "meshmuon", "AdamW, fused", "orthogonalisation alone"
BESIDE = "beside the floor ÷ AdamW"
MOST = 1.5  # of that


@dataclass(frozen=True, slots=True)
class Shares:
    """Seconds of the parts of a training step, and shares of the whole step."""

    seconds: dict[str, Quartiles]
    shares: dict[str, Quartiles]


def matrices_of(optimizer: Muon) -> list[tuple[int, int]]:
    """Rows and columns of the matrices that Muon steps; the demo's model has neither experts nor convolutions."""
    return [(p.size(0), p.size(1)) for group in optimizer.param_groups if group["use_muon"] for p in group["params"]]


def steps_of(model_options: ModelConfig, demo: argparse.Namespace) -> dict[str, Step]:
    """The parts of a training step, with each optimizer on a copy of the model of its own."""
    model, other = (build_model(model_options, demo.seed, torch.device("cpu")) for _ in range(2))
    settings, train = optimizer_config(demo), train_config(demo)
    muon, adamw = build_optimizer("muon", model, settings), build_optimizer("adamw", other, settings)
    assert isinstance(muon, Muon)
    generator = torch.Generator().manual_seed(0)
    shape = (train.batch_size, model_options.seq_len)
    tokens, targets = (torch.randint(256, shape, generator=generator) for _ in range(2))

    def gradients(gpt: GPT) -> None:
        gpt.zero_grad(set_to_none=True)
        torch.autograd.backward(gpt.loss(tokens, targets))

    return {
        GRADIENTS: Step(lambda: gradients(model)),
        MUON: Step(muon.step, lambda: gradients(model)),
        ADAMW: Step(adamw.step, lambda: gradients(other)),
        FLOOR: alone_on(matrices_of(muon), resolve_scheme(settings.scheme, settings.ns_steps)),
    }


def shares_of(times: dict[str, Samples]) -> dict[str, Quartiles]:
    """Shares of a training step, round by round: of each optimizer, of the floor, and the figure of the goal."""
    rows = zip(*(times[name].clock for name in (GRADIENTS, MUON, ADAMW, FLOOR)), strict=True)
    shares: dict[str, list[float]] = {MUON: [], ADAMW: [], FLOOR: [], BESIDE: []}
    for gradients, muon, adamw, floor in rows:
        shares[MUON].append(muon / (gradients + muon))
        shares[ADAMW].append(adamw / (gradients + adamw))
        shares[FLOOR].append(floor / (gradients + muon))
        shares[BESIDE].append((shares[MUON][-1] - shares[FLOOR][-1]) / shares[ADAMW][-1])
    return {name: quartiles(values) for name, values in shares.items()}


def plot(results: dict[str, dict[str, float]], figure: Figure) -> None:
    axes = figure.add_subplot()
    floor, muon, adamw = (100 * results["shares"][name] for name in (FLOOR, MUON, ADAMW))
    axes.bar(["meshmuon"], [floor], color=COLOURS["floor"], label=FLOOR)
    axes.bar(["meshmuon"], [muon - floor], bottom=[floor], color=COLOURS["ours"], label="everything else of the step")
    axes.bar(["AdamW"], [adamw], color=COLOURS["AdamW"], label="AdamW")
    axes.set_ylabel("% of a training step of the demo")
    axes.set_ylim(top=1.35 * muon)
    axes.grid(visible=False, axis="x")
    axes.set_title("The optimizer's share of training")
    axes.legend(loc="upper right")


def measure(options: argparse.Namespace, report: Report) -> Shares:
    tiny = ["--d-model", "64", "--heads", "2", "--layers", "1", "--seq-len", "16"]
    demo = demo_parser().parse_args(tiny if options.quick else [])
    rounds = options.rounds or (2 if options.quick else 15)
    with report.progress("rounds", rounds) as advance:
        times = race(steps_of(model_config(demo), demo), rounds, warmups=3, seconds=120.0, advance=advance)
    return Shares({name: quartiles(samples.clock) for name, samples in times.items()}, shares_of(times))


def show(results: Shares, report: Report) -> None:
    milliseconds = [(name, seconds.text(1e3, 2)) for name, seconds in results.seconds.items()]
    report.table("the demo's training step in one process", ("part", "ms"), milliseconds)
    shares = [(name, share.text()) for name, share in results.shares.items()]
    report.table("share of a training step", ("of", "share"), shares)


def goals_of(results: Shares, options: argparse.Namespace) -> list[Goal]:
    return [Goal("meshmuon's share beside the floor ÷ AdamW's", results.shares[BESIDE].median, most=MOST)]


def to_json(results: Shares) -> object:
    return {
        "ms": {name: seconds.text(1e3, 2) for name, seconds in results.seconds.items()},
        "shares": {name: share.median for name, share in results.shares.items()},
    }


BENCHMARK = common.Benchmark("demo_share", __doc__, measure, show, goals_of, plot, (4, 4), to_json=to_json)

if __name__ == "__main__":
    BENCHMARK.main()
