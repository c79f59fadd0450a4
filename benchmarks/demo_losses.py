"""What a choice costs in loss: the demo with each variant of it, over several seeds and learning rates.

Every run is that of ``examples/train_gpt.py`` on one device, on a model that is small enough for dozens of runs. With the same
seed all variants start from the same weights and see the same data, so that their differences are taken seed by seed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common  # first: it sets what torch reads when it starts
from common import COLOURS, Goal, Report

sys.path.insert(0, str(common.ROOT / "examples"))
import train_gpt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Comparison", "Results", "differences", "spread"]

SMALL = ("--d-model", "64", "--layers", "2", "--heads", "2", "--seq-len", "64", "--batch-size", "32")
TINY = ("--d-model", "16", "--layers", "1", "--heads", "2", "--d-ff", "32", "--seq-len", "32", "--batch-size", "2")

Results = Sequence[dict[str, Any]]


def differences(results: Results, lr: float, variant: str, reference: str) -> list[float]:
    """The variant's loss minus the reference's, seed by seed."""
    losses = {(result["seed"], result["variant"]): result["loss"] for result in results if result["lr"] == lr}
    return [loss - losses[seed, reference] for (seed, name), loss in losses.items() if name == variant]


def spread(values: Sequence[float]) -> float:
    """The standard error of the mean."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def _cases(results: Results) -> list[tuple[float, str]]:
    return list(dict.fromkeys((result["lr"], result["variant"]) for result in results))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Variants of the demo, beside one that is the reference.

    Attributes:
        name: name of the script and of its files.
        about: its docstring.
        variants: the demo's flags of each variant; the first one is the reference.
        lrs: learning rates.
        goals: figures beside what they should be, from the results.
        seeds: how many seeds.
        steps: steps of a run.
    """

    name: str
    about: str | None
    variants: Mapping[str, Sequence[str]]
    lrs: Sequence[float]
    goals: Callable[[Results], list[Goal]]
    seeds: int
    steps: int

    def main(self) -> None:
        """Runs the script."""
        common.Benchmark(
            self.name,
            self.about,
            self._measure,
            self._show,
            lambda results, options: self.goals(results),
            self._plot,
            (7, 4),
            add_options=self._add_options,
            settle_options=self._settle_options,
        ).main()

    @property
    def reference(self) -> str:
        """The variant that the others are compared with."""
        return next(iter(self.variants))

    def _loss(self, variant: str, seed: int, lr: float, options: argparse.Namespace) -> float:
        """The last validation loss of one run."""
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--only", "muon", "--nproc", "1", "--no-plot", "--out", folder]
            flags += [*self.variants[variant], "--seed", str(seed), "--lr", str(lr), "--steps", str(options.steps)]
            flags += ["--threads", str(options.threads), "--eval-every", str(options.steps), *(TINY if options.quick else SMALL)]
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                code = train_gpt.main(flags)
            if code:
                raise SystemExit(f"train_gpt.py {' '.join(flags)} failed:\n{printed.getvalue()}")
            log = json.loads(next(Path(folder).rglob("log.json")).read_text())
        return float(log["runs"]["muon"]["evals"][-1]["loss"])

    def _measure(self, options: argparse.Namespace, report: Report) -> Results:
        runs = list(product(options.lrs, options.seeds, self.variants))
        return [
            {"lr": lr, "seed": seed, "variant": variant, "loss": self._loss(variant, seed, lr, options)}
            for lr, seed, variant in report.each(runs, "lr {0[0]}, seed {0[1]}, {0[2]}".format)
        ]

    def _show(self, results: Results, report: Report) -> None:
        rows = []
        for lr, variant in _cases(results):
            losses = [result["loss"] for result in results if (result["lr"], result["variant"]) == (lr, variant)]
            apart = differences(results, lr, variant, self.reference)
            difference = f"{statistics.mean(apart):+.4f} ± {spread(apart):.4f}", " ".join(f"{value:+.4f}" for value in apart)
            shown = ("–", "–") if variant == self.reference else difference
            rows.append((f"{lr:g}", variant, f"{statistics.mean(losses):.4f} ± {spread(losses):.4f}", *shown))
        columns = ("lr", "variant", "final loss", f"minus {self.reference}'s", "seed by seed")
        report.table("validation loss of the demo; mean ± standard error over seeds", columns, rows)

    def _plot(self, results: Results, figure: Figure) -> None:
        axes = figure.subplots()
        shown = [(lr, variant) for lr, variant in _cases(results) if variant != self.reference]
        for place, (lr, variant) in enumerate(shown):
            values = differences(results, lr, variant, self.reference)
            axes.plot(values, [place] * len(values), "o", color=COLOURS["others"], ms=4)
            axes.plot([statistics.mean(values)], [place], "|", color=COLOURS["ours"], ms=16, mew=3)
        axes.set_yticks(range(len(shown)), [f"{variant}, lr {lr:g}" for lr, variant in shown])
        axes.axvline(0.0, color=COLOURS["line"], lw=0.8, ls="--")
        axes.set_xlabel(f"final validation loss minus {self.reference}'s, same seed (left is better)")
        axes.set_title("Dots: seeds. Bar: their mean")

    def _add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, nargs="+", default=None, help=f"seeds (default 0 to {self.seeds - 1})")
        parser.add_argument("--lrs", type=float, nargs="+", default=list(self.lrs), help=f"learning rates (default {self.lrs})")
        parser.add_argument("--steps", type=int, default=None, help=f"steps of a run (default {self.steps})")

    def _settle_options(self, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        options.seeds = options.seeds or list(range(2 if options.quick else self.seeds))
        options.steps = options.steps or (4 if options.quick else self.steps)
        if options.quick:
            options.lrs = options.lrs[:1]
