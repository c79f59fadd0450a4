"""What share of a training step the optimizer takes in the demo: its model, its batch, its optimizers, in one process.

A step is the loss of a batch, its gradients, and the optimizer. The floor is orthogonalising the model's matrices with nothing
else done: no Muon can take less. Beside the floor meshmuon should cost about as much as AdamW does.

    python benchmarks/demo_share.py
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import common  # first: it sets what torch reads when it starts
import torch
from common import ROOT, Goal, Report, Samples, Step, progress_bar, quartiles, race
from single_device import alone_on

from meshmuon import Muon
from meshmuon.ortho import resolve_scheme

sys.path.insert(0, str(ROOT / "examples"))

from demo.model import ModelConfig, build_model
from demo.optimizers import build_optimizer
from demo.options import model_config, optimizer_config, train_config
from train_gpt import parser as demo_parser

GRADIENTS, MUON, ADAMW, FLOOR = "loss and gradients", "meshmuon", "AdamW, fused", "orthogonalisation alone"
MOST = 1.5  # shares of AdamW's beside the floor


def matrices_of(optimizer: Muon) -> list[tuple[int, int]]:
    """Rows and columns of what Muon steps in the demo's model, which has neither experts nor convolutions."""
    return [(p.size(0), p.size(1)) for group in optimizer.param_groups if group["use_muon"] for p in group["params"]]


def steps_of(model_options: ModelConfig, demo: argparse.Namespace) -> dict[str, Step]:
    """The parts of a training step, of both optimizers, on two copies of the model."""
    model, other = (build_model(model_options, demo.seed, torch.device("cpu")) for _ in range(2))
    settings, train = optimizer_config(demo), train_config(demo)
    muon, adamw = build_optimizer("muon", model, settings), build_optimizer("adamw", other, settings)
    assert isinstance(muon, Muon)
    generator = torch.Generator().manual_seed(0)
    shape = (train.batch_size, model_options.seq_len)
    tokens, targets = (torch.randint(256, shape, generator=generator) for _ in range(2))

    def gradients(of: torch.nn.Module) -> None:
        of.zero_grad(set_to_none=True)
        torch.autograd.backward(of.loss(tokens, targets))  # type: ignore[operator]

    return {
        GRADIENTS: Step(lambda: gradients(model)),
        MUON: Step(muon.step, lambda: gradients(model)),
        ADAMW: Step(adamw.step, lambda: gradients(other)),
        FLOOR: alone_on(matrices_of(muon), resolve_scheme(settings.scheme, settings.ns_steps)),
    }


def shares(times: dict[str, Samples]) -> dict[str, Any]:
    """Of a training step, round by round: each optimizer's, the floor's in meshmuon's, and the figure of the goal."""
    rows = zip(*(times[name].clock for name in (GRADIENTS, MUON, ADAMW, FLOOR)), strict=True)
    found: dict[str, list[float]] = {MUON: [], ADAMW: [], FLOOR: [], "beside the floor ÷ AdamW": []}
    for gradients, muon, adamw, floor in rows:
        found[MUON].append(muon / (gradients + muon))
        found[ADAMW].append(adamw / (gradients + adamw))
        found[FLOOR].append(floor / (gradients + muon))
        found["beside the floor ÷ AdamW"].append((found[MUON][-1] - found[FLOOR][-1]) / found[ADAMW][-1])
    return {name: quartiles(values) for name, values in found.items()}


def plot(found: dict[str, Any], figure: Any) -> None:
    axes = figure.add_subplot()
    floor, muon, adamw = (found[name].median for name in (FLOOR, MUON, ADAMW))
    axes.bar(["meshmuon"], [floor], color="#c9e0c5", label=FLOOR)
    axes.bar(["meshmuon"], [muon - floor], bottom=[floor], color="#2a6f97", label="beside it")
    axes.bar(["AdamW"], [adamw], color="#d9a05b", label="AdamW")
    axes.set_ylabel("share of a training step")
    axes.legend(frameon=False)


def main() -> None:
    parser = common.make_parser(__doc__)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = Report("demo_share", options)
    demo = demo_parser().parse_args(
        ["--d-model", "64", "--heads", "2", "--layers", "1", "--seq-len", "16"] if options.quick else []
    )
    rounds = options.rounds or (2 if options.quick else 15)
    with progress_bar(report.console) as bar:
        task = bar.add_task("rounds", total=rounds)
        times = race(steps_of(model_config(demo), demo), rounds, warmups=3, seconds=120.0, advance=lambda: bar.advance(task))
    found = shares(times)
    milliseconds = [(name, quartiles(one.clock).text(1e3, 2)) for name, one in times.items()]
    report.table("the demo's training step in one process", ("part", "ms"), milliseconds)
    report.table("share of a training step", ("of", "share"), [(name, one.text(1.0, 3)) for name, one in found.items()])
    goal = Goal("meshmuon's share beside the floor ÷ AdamW's", found["beside the floor ÷ AdamW"].median, most=MOST)
    results = {"ms": dict(milliseconds), "shares": {name: one.median for name, one in found.items()}}
    report.finish(results, [goal], lambda figure: plot(found, figure), (4, 4))


if __name__ == "__main__":
    main()
