"""Which learning rate and weight decay: the demo's model trained with meshmuon and with AdamW over a grid of both.

Two questions, one figure each: which learning rate each optimizer wants (tuning.png), and what weight decay changes
(tuning_decay.png). With the same seed all runs start from the same weights and see the same data.

    python benchmarks/tuning.py
    python benchmarks/tuning.py --seeds 0 --steps 100 --lrs 0.004 0.016
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common  # first: it sets what torch reads when it starts
from common import ROOT, Goal, Report
from figures import draw

sys.path.insert(0, str(ROOT / "examples"))

from demo import options as demo
from demo.data import Corpus
from demo.progress import QuietProgress
from demo.train import NonFiniteLossError, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
Line = tuple[str, str, dict[float, list[float]]]  # label, colour, losses by lr
KEYS = ("optimizer", "weight_decay", "lr", "seed")
LRS = (0.002, 0.004, 0.008, 0.016, 0.032, 0.064)
DECAYS = (0.0, 0.1, 1.0)
WIDTH, DECAY = 64, 0.1  # the decay at which the optimizers are compared
TITLES = {"muon": "meshmuon", "adamw": "AdamW"}
LINES = {"muon": "#3d8fc4", "adamw": "#d98b2b"}
SIZE = (7.0, 4.2)
_text: list[Corpus] = []  # read once


def grid(options: argparse.Namespace) -> list[Row]:
    """The runs: every lr and weight decay of both optimizers; all seeds at the decay that most use, else the first
    one.
    """
    values = product(TITLES, options.decays, options.seeds, options.lrs)
    runs = [dict(zip(KEYS, (name, decay, lr, seed), strict=True)) for name, decay, seed, lr in values]
    return [row for row in runs if row["weight_decay"] == DECAY or row["seed"] == options.seeds[0]]


def final_loss(row: Row, options: argparse.Namespace) -> float | None:
    """The last validation loss of one run; None if it diverged."""
    parser = argparse.ArgumentParser()
    for add_options_of in (demo.add_model_options, demo.add_train_options, demo.add_optimizer_options):
        add_options_of(parser)
    width, rows, whose = *((16, 2) if options.quick else (WIDTH, 16)), "adamw-" if row["optimizer"] == "adamw" else ""
    sizes = (
        f"--d-model {width} --layers 2 --heads 2 --seq-len 64 --batch-size {rows} --device cpu --threads "
        f"{options.threads}"
    )
    flags = f"{sizes} --steps {options.steps} --eval-every {options.steps} --seed {row['seed']}"
    args = parser.parse_args(f"{flags} --{whose}lr {row['lr']} --{whose}weight-decay {row['weight_decay']}".split())
    if not _text:
        _text.append(demo.corpus(args))
    configs = demo.model_config(args), demo.optimizer_config(args), demo.train_config(args)
    run = Run(row["optimizer"], _text[0], *configs, demo.runtime(args))
    try:
        return run.train(QuietProgress()).evals[-1].loss
    except NonFiniteLossError:
        return None


def measure(options: argparse.Namespace, report: Report) -> list[Row]:
    done = (
        [json.loads(line) for line in options.keep.read_text().splitlines()]
        if options.keep and options.keep.exists()
        else []
    )
    losses = {tuple(row[key] for key in KEYS): row["loss"] for row in done}
    runs = [tuple(row.values()) for row in grid(options)]
    for run in report.each([run for run in runs if run not in losses], lambda run: ", ".join(map(str, run))):
        losses[run] = final_loss(dict(zip(KEYS, run, strict=True)), options)
        if options.keep:
            with options.keep.open("a") as file:
                file.write(json.dumps({**dict(zip(KEYS, run, strict=True)), "loss": losses[run]}) + "\n")
    return [{**dict(zip(KEYS, run, strict=True)), "loss": losses[run]} for run in runs]


def curve(rows: Iterable[Row], **wanted: Any) -> dict[float, list[float]]:
    """The losses of all seeds by lr, of the runs with the ``wanted`` values; an lr at which a seed diverged is left
    out.
    """
    losses: dict[float, list[float | None]] = {}
    for row in rows:
        if all(row[key] == value for key, value in wanted.items()):
            losses.setdefault(row["lr"], []).append(row["loss"])
    return {
        lr: [loss for loss in seeds if loss is not None] for lr, seeds in sorted(losses.items()) if None not in seeds
    }


def best(losses: dict[float, list[float]]) -> float:
    """The lr with the lowest mean loss."""
    return min(losses, key=lambda lr: statistics.mean(losses[lr]))


def show(rows: list[Row], report: Report) -> None:
    """The table, and the figure that ``plot_lr`` does not draw."""
    lrs = sorted({row["lr"] for row in rows})
    lines = []
    for optimizer, decay in dict.fromkeys((row["optimizer"], row["weight_decay"]) for row in rows):
        losses = curve(rows, optimizer=optimizer, weight_decay=decay)
        cells = [f"{statistics.mean(losses[lr]):.4f}" if lr in losses else "diverged" for lr in lrs]
        spread = max(max(seeds) - min(seeds) for seeds in losses.values())
        lines.append((TITLES[optimizer], f"{decay:g}", *cells, f"{spread:.4f}" if spread else "one seed"))
    columns = ("optimizer", "weight decay", *(f"lr {lr:g}" for lr in lrs), "seeds differ by ≤")
    report.table("final validation loss, mean over seeds", columns, lines)
    report.folder.mkdir(parents=True, exist_ok=True)
    draw(lambda figure: plot_decay(rows, figure), SIZE, report.folder / f"{report.name}_decay.png")


def goals(rows: list[Row], options: argparse.Namespace) -> list[Goal]:
    """Advice that the page gives, as figures of this run."""
    muon, adamw = (curve(rows, optimizer=name, weight_decay=DECAY) for name in ("muon", "adamw"))
    carried = best(adamw)
    lowest = [min(map(statistics.mean, losses.values())) for losses in (muon, adamw)]
    return [
        Goal("meshmuon's best loss minus AdamW's", lowest[0] - lowest[1], most=0.0),
        Goal(
            f"meshmuon's loss at AdamW's best lr ({carried:g}) minus AdamW's there",
            statistics.mean(muon[carried]) - lowest[1] if carried in muon else None,
            most=0.0,
        ),
        Goal("meshmuon's best lr ÷ AdamW's", best(muon) / carried, least=1.0),
    ]


def draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """A line through the means over seeds, a dot per seed, a ring at the lowest mean."""
    import matplotlib.ticker

    for label, colour, losses in lines:
        means = {lr: statistics.mean(seeds) for lr, seeds in losses.items()}
        axes.plot(list(means), list(means.values()), color=colour, lw=2, label=label)
        points = [(lr, loss) for lr, seeds in losses.items() for loss in seeds]
        axes.plot(*zip(*points, strict=True), "o", color=colour, ms=3)
        lowest = best(losses)
        axes.plot([lowest], [means[lowest]], "o", color=colour, ms=11, mfc="none", mew=1.8)
    lrs = sorted({lr for _, _, losses in lines for lr in losses})
    axes.set_xscale("log")
    axes.set_xticks(lrs, [f"{lr:g}" for lr in lrs])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("final validation loss")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def plot_lr(rows: list[Row], figure: Figure) -> None:
    axes = figure.subplots()
    lines = [(TITLES[name], LINES[name], curve(rows, optimizer=name, weight_decay=DECAY)) for name in TITLES]
    draw_lines(axes, lines)
    lowest = ", ".join(f"{label} at lr {best(losses):g}" for label, _, losses in lines)
    axes.set_title(f"Lowest loss: {lowest}", fontsize=11)


def plot_decay(rows: list[Row], figure: Figure) -> None:
    axes = figure.subplots()
    first = min(row["seed"] for row in rows)  # which all decays have
    colours = ("#6a9a4a", LINES["muon"], "#8e6bbf")
    lines = [
        (f"weight decay {decay:g}", colour, curve(rows, optimizer="muon", weight_decay=decay, seed=first))
        for decay, colour in zip(sorted({row["weight_decay"] for row in rows}), colours, strict=False)
    ]
    draw_lines(axes, lines)
    axes.set_title("meshmuon, one seed: the lowest loss of each weight decay is ringed", fontsize=11)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="seeds (default 0 1)")
    parser.add_argument(
        "--decays", type=float, nargs="+", default=list(DECAYS), help=f"weight decays (default {DECAYS})"
    )
    parser.add_argument("--lrs", type=float, nargs="+", default=list(LRS), help=f"peak learning rates (default {LRS})")
    parser.add_argument("--steps", type=int, default=None, help="steps of a run (default 300)")
    parser.add_argument(
        "--keep", type=Path, help="file for the runs that are done: the same command continues after them"
    )


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.steps = options.steps or (3 if options.quick else 300)
    if options.quick:
        options.lrs, options.seeds, options.decays = options.lrs[:2], options.seeds[:1], [DECAY, 1.0]


BENCHMARK = common.Benchmark(
    "tuning", __doc__, measure, show, goals, plot_lr, SIZE, add_options=add_options, settle_options=settle_options
)

if __name__ == "__main__":
    BENCHMARK.main()
