"""What a scheme costs in loss: the demo with each scheme, over several seeds and learning rates.

Every run is ``examples/train_gpt.py`` in one process. With the same seed all schemes start from the same weights and see the same
data, so that their differences are taken seed by seed. Times are not compared here: ``schemes.py`` does that.

    python benchmarks/loss_by_scheme.py
    python benchmarks/loss_by_scheme.py --seeds 0 1 2 --steps 100
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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEMO = common.ROOT / "examples" / "train_gpt.py"
REFERENCE = "polar_express"
TINY = ("--d-model", "16", "--layers", "1", "--heads", "2", "--d-ff", "32", "--seq-len", "32", "--batch-size", "2")


def final_loss(scheme: str, seed: int, lr: float, options: argparse.Namespace) -> float:
    """The last validation loss of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(DEMO), "--only", "muon", "--nproc", "1", "--no-plot", "--out", folder]
        command += ["--scheme", scheme, "--seed", str(seed), "--lr", str(lr), "--steps", str(options.steps)]
        command += ["--threads", str(options.threads), "--eval-every", str(options.steps), *(TINY if options.quick else ())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        log = json.loads(next(Path(folder).rglob("log.json")).read_text())
    return float(log["runs"]["muon"]["evals"][-1]["loss"])


def measure(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    runs = list(product(options.lrs, options.seeds, options.schemes))
    return [
        {"lr": lr, "seed": seed, "scheme": scheme, "loss": final_loss(scheme, seed, lr, options)}
        for lr, seed, scheme in report.each(runs, "lr {0[0]}, seed {0[1]}, {0[2]}".format)
    ]


def differences(results: Sequence[dict[str, Any]], lr: float, scheme: str) -> list[float]:
    """The scheme's loss minus the reference's, seed by seed."""
    losses = {(result["seed"], result["scheme"]): result["loss"] for result in results if result["lr"] == lr}
    return [loss - losses[seed, REFERENCE] for (seed, name), loss in losses.items() if name == scheme]


def spread(values: Sequence[float]) -> float:
    """The standard error of the mean."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def cases(results: Sequence[dict[str, Any]]) -> list[tuple[float, str]]:
    return list(dict.fromkeys((result["lr"], result["scheme"]) for result in results))


def show(results: Sequence[dict[str, Any]], report: Report) -> None:
    rows = []
    for lr, scheme in cases(results):
        losses = [result["loss"] for result in results if (result["lr"], result["scheme"]) == (lr, scheme)]
        apart = differences(results, lr, scheme)
        rows.append(
            (
                f"{lr:g}",
                scheme,
                f"{statistics.mean(losses):.4f} ± {spread(losses):.4f}",
                "–" if scheme == REFERENCE else f"{statistics.mean(apart):+.4f} ± {spread(apart):.4f}",
                "–" if scheme == REFERENCE else " ".join(f"{value:+.4f}" for value in apart),
            )
        )
    columns = ("lr", "scheme", "final loss", f"minus {REFERENCE}'s", "seed by seed")
    report.table("validation loss of the demo; mean ± standard error over seeds", columns, rows)


def goals_of(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Goal]:
    return [
        Goal(
            f"lr {lr:g}: loss of {scheme} minus {REFERENCE}'s, in standard errors",
            statistics.mean(apart) / spread(apart),
            most=2.0,
        )
        for lr, scheme in cases(results)
        if scheme != REFERENCE and len(apart := differences(results, lr, scheme)) > 1
    ]


def plot(results: Sequence[dict[str, Any]], figure: Figure) -> None:
    axes = figure.subplots()
    shown = [(lr, scheme) for lr, scheme in cases(results) if scheme != REFERENCE]
    for place, (lr, scheme) in enumerate(shown):
        values = differences(results, lr, scheme)
        axes.plot(values, [place] * len(values), "o", color=COLOURS["others"], ms=4)
        axes.plot([statistics.mean(values)], [place], "|", color=COLOURS["ours"], ms=16, mew=3)
    axes.set_yticks(range(len(shown)), [f"{scheme}, lr {lr:g}" for lr, scheme in shown])
    axes.axvline(0.0, color=COLOURS["line"], lw=0.8, ls="--")
    axes.set_xlabel(f"final validation loss minus {REFERENCE}'s, same seed")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schemes", nargs="+", default=[REFERENCE, "keller", "zolotarev", "halley"], help="names of schemes")
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="seeds (default 0 to 4)")
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.016, 0.032], help="learning rates (default 0.016 0.032)")
    parser.add_argument("--steps", type=int, default=None, help="steps of a run (default 250, as the demo)")


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.seeds = options.seeds or ([0, 1] if options.quick else [0, 1, 2, 3, 4])
    options.steps = options.steps or (4 if options.quick else 250)
    if REFERENCE not in options.schemes:
        options.schemes = [REFERENCE, *options.schemes]
    if options.quick:
        options.lrs, options.schemes = options.lrs[:1], options.schemes[:2]


BENCHMARK = common.Benchmark(
    "loss_by_scheme", __doc__, measure, show, goals_of, plot, (7, 4), add_options=add_options, settle_options=settle_options
)

if __name__ == "__main__":
    BENCHMARK.main()
