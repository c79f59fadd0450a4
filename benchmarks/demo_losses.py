"""What a choice costs in loss: the demo with each variant of it, over several seeds and learning rates.

Every run is that of ``examples/train_gpt.py`` or ``examples/train_moe.py`` on one device, on a model that is small
enough for dozens of runs. With the same seed all variants start from the same weights and see the same data, so that
their differences are taken seed by seed.
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
import train_moe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DENSE", "EXPERTS", "Comparison", "Demo", "Results", "cases", "differences", "spread"]

SMALL = ("--d-model", "64", "--layers", "2", "--heads", "2", "--seq-len", "64", "--batch-size", "32")
TINY = ("--d-model", "16", "--layers", "1", "--heads", "2", "--d-ff", "32", "--seq-len", "32", "--batch-size", "2")

Results = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Demo:
    """A demo that is trained.

    Attributes:
        name: what tables and results call it.
        sizes: flags of a model that is small enough for dozens of runs.
        tiny: the same for ``--quick``.
        loss: the last validation loss of a run with these flags, which sizes, variant, seed, lr and steps are among.
    """

    name: str
    sizes: Sequence[str]
    tiny: Sequence[str]
    loss: Callable[[Sequence[str]], float]


def _dense_loss(flags: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--only", "muon", "--no-plot", "--eval-every", "1000000", "--out", folder, *flags]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = train_gpt.main(flags)
        if code:
            raise SystemExit(f"train_gpt.py {' '.join(flags)} failed:\n{printed.getvalue()}")
        log = json.loads(next(Path(folder).rglob("log.json")).read_text())
    return float(log["runs"]["muon"]["evals"][-1]["loss"])


def _experts_loss(flags: Sequence[str]) -> float:
    flags = ["--schedule", "linear", "--warmup-steps", "10", *flags]
    return train_moe.Job(train_moe.parser().parse_args(flags)).run(lambda step, loss: None).valid_loss


DENSE = Demo("dense", SMALL, TINY, _dense_loss)
EXPERTS = Demo(
    "mixture of experts",
    (*SMALL, "--experts", "4", "--d-ff", "128"),
    (*TINY, "--experts", "2", "--valid-fraction", "0.3"),
    _experts_loss,
)


def differences(results: Results, lr: float, variant: str, reference: str, demo: str = DENSE.name) -> list[float]:
    """The variant's loss minus the reference's, seed by seed."""
    of_case = [result for result in results if (_demo_of(result), result["lr"]) == (demo, lr)]
    losses = {(result["seed"], result["variant"]): result["loss"] for result in of_case}
    return [loss - losses[seed, reference] for (seed, name), loss in losses.items() if name == variant]


def spread(values: Sequence[float]) -> float:
    """The standard error of the mean."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def cases(results: Results) -> list[tuple[str, float, str]]:
    """Demo, lr and variant of all results."""
    return list(dict.fromkeys((_demo_of(result), result["lr"], result["variant"]) for result in results))


def _demo_of(result: Mapping[str, Any]) -> str:
    return str(result.get("demo", DENSE.name))  # results from before there were two have none


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
        demos: what is trained.
    """

    name: str
    about: str | None
    variants: Mapping[str, Sequence[str]]
    lrs: Sequence[float]
    goals: Callable[[Results], list[Goal]]
    seeds: int
    steps: int
    demos: Sequence[Demo] = (DENSE,)

    def main(self) -> None:
        """Runs the script."""
        common.Benchmark(
            self.name,
            self.about,
            self._measure,
            self._show,
            lambda results, options: self.goals(results),
            self._plot,
            (7, 2 + 2 * len(self.demos)),
            add_options=self._add_options,
            settle_options=self._settle_options,
        ).main()

    @property
    def reference(self) -> str:
        """The variant that the others are compared with."""
        return next(iter(self.variants))

    def _loss(self, demo: Demo, variant: str, seed: int, lr: float, options: argparse.Namespace) -> float:
        """The last validation loss of one run."""
        flags = ["--nproc", "1", *(demo.tiny if options.quick else demo.sizes), *self.variants[variant]]
        flags += [
            "--seed",
            str(seed),
            "--lr",
            str(lr),
            "--steps",
            str(options.steps),
            "--threads",
            str(options.threads),
        ]
        return demo.loss(flags)

    def _measure(self, options: argparse.Namespace, report: Report) -> Results:
        runs = list(product(self.demos, options.lrs, options.seeds, self.variants))
        return [
            {
                "demo": demo.name,
                "lr": lr,
                "seed": seed,
                "variant": variant,
                "loss": self._loss(demo, variant, seed, lr, options),
            }
            for demo, lr, seed, variant in report.each(runs, "{0[0].name}, lr {0[1]}, seed {0[2]}, {0[3]}".format)
        ]

    def _show(self, results: Results, report: Report) -> None:
        columns = ("lr", "variant", "final loss", f"minus {self.reference}'s", "seed by seed")
        for name in dict.fromkeys(demo for demo, _, _ in cases(results)):
            rows = [self._row(results, *case) for case in cases(results) if case[0] == name]
            report.table(f"validation loss of the demo, {name}; mean ± standard error over seeds", columns, rows)

    def _row(self, results: Results, demo: str, lr: float, variant: str) -> tuple[str, ...]:
        losses = [
            result["loss"]
            for result in results
            if (_demo_of(result), result["lr"], result["variant"]) == (demo, lr, variant)
        ]
        apart = differences(results, lr, variant, self.reference, demo)
        difference = (
            f"{statistics.mean(apart):+.4f} ± {spread(apart):.4f}",
            " ".join(f"{value:+.4f}" for value in apart),
        )
        shown = ("–", "–") if variant == self.reference else difference
        return f"{lr:g}", variant, f"{statistics.mean(losses):.4f} ± {spread(losses):.4f}", *shown

    def _plot(self, results: Results, figure: Figure) -> None:
        names = list(dict.fromkeys(demo for demo, _, _ in cases(results)))
        for name, axes in zip(names, figure.subplots(len(names), squeeze=False, sharex=True)[:, 0], strict=True):
            shown = [case for case in cases(results) if case[0] == name and case[2] != self.reference]
            for place, (demo, lr, variant) in enumerate(shown):
                values = differences(results, lr, variant, self.reference, demo)
                axes.plot(values, [place] * len(values), "o", color=COLOURS["others"], ms=4)
                axes.plot([statistics.mean(values)], [place], "|", color=COLOURS["ours"], ms=16, mew=3)
            axes.set_yticks(range(len(shown)), [f"{variant}, lr {lr:g}" for _, lr, variant in shown])
            axes.axvline(0.0, color=COLOURS["line"], lw=0.8, ls="--")
            axes.set_title("Dots: seeds. Bar: their mean" + (f" ({name})" if len(names) > 1 else ""))
        axes.set_xlabel(f"final validation loss minus {self.reference}'s, same seed (left is better)")

    def _add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, nargs="+", default=None, help=f"seeds (default 0 to {self.seeds - 1})")
        parser.add_argument(
            "--lrs", type=float, nargs="+", default=list(self.lrs), help=f"learning rates (default {self.lrs})"
        )
        parser.add_argument("--steps", type=int, default=None, help=f"steps of a run (default {self.steps})")

    def _settle_options(self, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        options.seeds = options.seeds or list(range(2 if options.quick else self.seeds))
        options.steps = options.steps or (4 if options.quick else self.steps)
        if options.quick:
            options.lrs = options.lrs[:1]
