"""What a choice costs in loss: the demo with each variant of it, beside the first one, over several seeds and learning
rates.

Every run is that of ``examples/train_gpt.py`` on one device, on a model that is small enough for dozens of runs. With
the same seed all variants start from the same weights and see the same data, so that their differences are taken seed
by seed.

    python benchmarks/losses.py                       # schemes, beside polar_express
    python benchmarks/losses.py --variant "" --variant "--param-dtype bfloat16" --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import common  # first: it sets what torch reads when it starts
from common import Goal, Report

sys.path.insert(0, str(common.ROOT / "examples"))
import train_gpt

SMALL = ("--d-model", "64", "--layers", "2", "--heads", "2", "--seq-len", "64", "--batch-size", "32")
TINY = ("--d-model", "16", "--layers", "1", "--heads", "2", "--d-ff", "32", "--seq-len", "32", "--batch-size", "2")
SCHEMES = [f"--scheme {name}" for name in ("polar_express", "keller", "zolotarev", "hybrid", "halley")]

Results = Sequence[dict[str, Any]]


def loss_of(flags: Sequence[str]) -> float:
    """The last validation loss of a run of the demo with these flags."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--only", "muon", "--no-plot", "--eval-every", "1000000", "--nproc", "1", "--out", folder, *flags]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = train_gpt.main(flags)
        if code:
            raise SystemExit(f"train_gpt.py {' '.join(flags)} failed:\n{printed.getvalue()}")
        log = json.loads(next(Path(folder).rglob("log.json")).read_text())
    return float(log["runs"]["muon"]["evals"][-1]["loss"])


def measure(options: argparse.Namespace, report: Report) -> Results:
    sizes, results = TINY if options.quick else SMALL, []
    runs = list(product(options.lrs, options.seeds, options.variant))
    for lr, seed, variant in report.each(runs, "lr {0[0]}, seed {0[1]}, {0[2]}".format):
        flags = ("--seed", str(seed), "--lr", str(lr), "--steps", str(options.steps), "--threads", str(options.threads))
        loss = loss_of([*sizes, *variant.split(), *flags])
        results.append({"lr": lr, "seed": seed, "variant": variant, "loss": loss})
    return results


def spread(values: Sequence[float]) -> float:
    """The standard error of the mean."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def differences(results: Results, lr: float, variant: str) -> list[float]:
    """The variant's loss minus the first variant's, seed by seed."""
    losses = {(result["seed"], result["variant"]): result["loss"] for result in results if result["lr"] == lr}
    reference = results[0]["variant"]
    return [loss - losses[seed, reference] for (seed, name), loss in losses.items() if name == variant]


def cases(results: Results) -> list[tuple[float, str]]:
    """Learning rates and variants; the first variant is what the others are compared with."""
    return list(dict.fromkeys((result["lr"], result["variant"]) for result in results))


def show(results: Results, report: Report) -> None:
    rows = []
    for lr, variant in cases(results):
        losses = [result["loss"] for result in results if (result["lr"], result["variant"]) == (lr, variant)]
        apart = differences(results, lr, variant)
        shown = [f"{statistics.mean(values):+.4f} ± {spread(values):.4f}" for values in (losses, apart)]
        rows.append((f"{lr:g}", variant, *shown, " ".join(f"{value:+.4f}" for value in apart)))
    columns = ("lr", "variant", "final loss", "minus the first's", "seed by seed")
    report.table("validation loss of the demo; mean ± standard error over seeds", columns, rows)


def goals_of(results: Results, options: argparse.Namespace) -> list[Goal]:
    """No variant costs more than noise."""
    goals = []
    for lr, variant in cases(results):
        if variant != results[0]["variant"]:
            apart = differences(results, lr, variant)
            text = f"lr {lr:g}: loss of {variant} minus the first's, in standard errors"
            goals.append(Goal(text, statistics.mean(apart) / spread(apart), most=2.0))
    return goals


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--variant", action="append", help="flags of the demo, once for each variant (default: schemes)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="seeds (default 0 to 4)")
    parser.add_argument(
        "--lrs", type=float, nargs="+", default=[0.016, 0.032], help="learning rates (default 0.016 0.032)"
    )
    parser.add_argument("--steps", type=int, default=None, help="steps of a run (default 400)")


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.variant = options.variant or (SCHEMES[:2] if options.quick else SCHEMES)
    options.seeds = options.seeds or list(range(2 if options.quick else 5))
    options.steps = options.steps or (4 if options.quick else 400)
    if options.quick:
        options.lrs = options.lrs[:1]


if __name__ == "__main__":
    common.Benchmark("losses", __doc__, measure, show, goals_of, add_options, settle_options).main()
