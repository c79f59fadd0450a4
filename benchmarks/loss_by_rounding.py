"""What bfloat16 weights cost in loss: the demo with float32 weights, and with bfloat16 weights rounded in either way.

Every run is ``examples/train_gpt.py`` in one process. The model computes in float32 throughout; only weights, gradients, momentum
and moments are bfloat16, and there is no float32 copy of the weights. With the same seed all runs start from the same weights and
see the same data, so that differences are taken seed by seed.

    python benchmarks/loss_by_rounding.py
    python benchmarks/loss_by_rounding.py --seeds 0 1 --steps 100 --lrs 0.016
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common  # first: it sets what torch reads when it starts
from common import COLOURS, Goal, Report
from loss_by_scheme import DEMO, TINY, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFERENCE, NEAREST, STOCHASTIC = "float32", "bfloat16, nearest", "bfloat16, stochastic"
FLAGS = {
    REFERENCE: ("--weights", "float32"),
    NEAREST: ("--weights", "bfloat16", "--rounding", "nearest"),
    STOCHASTIC: ("--weights", "bfloat16", "--rounding", "stochastic"),
}
SIZES = ("--d-model", "64", "--layers", "2", "--heads", "2", "--seq-len", "64", "--batch-size", "32")


def final_loss(weights: str, seed: int, lr: float, options: argparse.Namespace) -> float:
    """The last validation loss of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(DEMO), "--only", "muon", "--nproc", "1", "--no-plot", "--out", folder]
        command += [*FLAGS[weights], "--seed", str(seed), "--lr", str(lr), "--steps", str(options.steps)]
        command += ["--threads", str(options.threads), "--eval-every", str(options.steps), *(TINY if options.quick else SIZES)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        log = json.loads(next(Path(folder).rglob("log.json")).read_text())
    return float(log["runs"]["muon"]["evals"][-1]["loss"])


def measure(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    runs = list(product(options.lrs, options.seeds, FLAGS))
    return [
        {"lr": lr, "seed": seed, "weights": weights, "loss": final_loss(weights, seed, lr, options)}
        for lr, seed, weights in report.each(runs, "lr {0[0]}, seed {0[1]}, {0[2]}".format)
    ]


def differences(results: Sequence[dict[str, Any]], lr: float, weights: str) -> list[float]:
    """The loss with these weights minus that of float32 weights, seed by seed."""
    losses = {(result["seed"], result["weights"]): result["loss"] for result in results if result["lr"] == lr}
    return [loss - losses[seed, REFERENCE] for (seed, name), loss in losses.items() if name == weights]


def cases(results: Sequence[dict[str, Any]]) -> list[tuple[float, str]]:
    return list(dict.fromkeys((result["lr"], result["weights"]) for result in results))


def show(results: Sequence[dict[str, Any]], report: Report) -> None:
    rows = []
    for lr, weights in cases(results):
        losses = [result["loss"] for result in results if (result["lr"], result["weights"]) == (lr, weights)]
        apart = differences(results, lr, weights)
        rows.append(
            (
                f"{lr:g}",
                weights,
                f"{statistics.mean(losses):.4f} ± {spread(losses):.4f}",
                "–" if weights == REFERENCE else f"{statistics.mean(apart):+.4f} ± {spread(apart):.4f}",
                "–" if weights == REFERENCE else " ".join(f"{value:+.4f}" for value in apart),
            )
        )
    columns = ("lr", "weights", "final loss", f"minus {REFERENCE}'s", "seed by seed")
    report.table("validation loss of the demo; mean ± standard error over seeds", columns, rows)


def goals_of(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Goal]:
    """Stochastic rounding costs less than rounding to nearest."""
    costs = {(lr, weights): statistics.mean(differences(results, lr, weights)) for lr, weights in cases(results)}
    return [
        Goal(f"lr {lr:g}: loss of {STOCHASTIC} minus that of {NEAREST}", costs[lr, STOCHASTIC] - costs[lr, NEAREST], most=0.0)
        for lr in dict.fromkeys(lr for lr, _ in costs)
    ]


def plot(results: Sequence[dict[str, Any]], figure: Figure) -> None:
    axes = figure.subplots()
    shown = [(lr, weights) for lr, weights in cases(results) if weights != REFERENCE]
    for place, (lr, weights) in enumerate(shown):
        values = differences(results, lr, weights)
        axes.plot(values, [place] * len(values), "o", color=COLOURS["others"], ms=4)
        axes.plot([statistics.mean(values)], [place], "|", color=COLOURS["ours"], ms=16, mew=3)
    axes.set_yticks(range(len(shown)), [f"{weights}, lr {lr:g}" for lr, weights in shown])
    axes.axvline(0.0, color=COLOURS["line"], lw=0.8, ls="--")
    axes.set_xlabel(f"final validation loss minus {REFERENCE}'s, same seed")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="seeds (default 0 to 2)")
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.016, 0.002], help="learning rates (default 0.016 0.002)")
    parser.add_argument("--steps", type=int, default=None, help="steps of a run (default 400)")


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.seeds = options.seeds or ([0, 1] if options.quick else [0, 1, 2])
    options.steps = options.steps or (4 if options.quick else 400)
    if options.quick:
        options.lrs = options.lrs[:1]


BENCHMARK = common.Benchmark(
    "loss_by_rounding", __doc__, measure, show, goals_of, plot, (7, 4), add_options=add_options, settle_options=settle_options
)

if __name__ == "__main__":
    BENCHMARK.main()
