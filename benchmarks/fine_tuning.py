"""Which optimizer for fine-tuning: the demo's small GPT, pretrained with each of two optimizers and fine-tuned with
each.

Pretraining is on the Python files of the standard library without ``pydoc_data``; fine-tuning on ``pydoc_data``, the
language reference in English prose. Reported are the loss on the new text and the rise of the loss on the old text
(forgetting), over several fine-tuning learning rates: a larger one learns and forgets more, so that combinations are
compared as curves.

    python benchmarks/fine_tuning.py
    python benchmarks/fine_tuning.py --seeds 0 --steps 100
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import common  # first: it sets what torch reads when it starts
import torch
from common import COLOURS, ROOT, Goal, Report
from demo_losses import SMALL, TINY, spread

sys.path.insert(0, str(ROOT / "examples"))
from demo import options as demo
from demo.data import Corpus, default_source_root, load_corpus, read_files, valid_batches
from demo.model import GPT
from demo.processes import Runtime
from demo.progress import QuietProgress
from demo.train import Run
from train_gpt import parser as demo_parser

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEW = "pydoc_data/"
WINDOWS = 128  # of validation
LRS = {"muon": 0.016, "adamw": 0.004}  # of pretraining: the best of benchmarks/results/tuning.txt
PARTS = (1 / 16, 1 / 4, 1.0)  # of them, in fine-tuning
TITLES = {"muon": "meshmuon", "adamw": "AdamW"}
Results = list[dict[str, Any]]


def texts() -> tuple[Corpus, Corpus]:
    """The old text and the new one; of the new one's files the last tenth is for validation."""
    root = default_source_root()
    whole = load_corpus(root, 0.1)
    train, valid = (
        tuple(name for name in side if not name.startswith(NEW)) for side in (whole.train_files, whole.valid_files)
    )
    old = Corpus(read_files(root, train), read_files(root, valid), train, valid)
    names = tuple(name for name in (*whole.train_files, *whole.valid_files) if name.startswith(NEW))
    data = read_files(root, names)
    cut = data.numel() * 9 // 10
    return old, Corpus(data[:cut], data[cut:], names, names)


class Trial:
    """Pretraining and fine-tuning with one seed."""

    def __init__(self, seed: int, options: argparse.Namespace, old: Corpus, new: Corpus) -> None:
        self.seed, self.options, self.old, self.new = seed, options, old, new

    def train(self, name: str, corpus: Corpus, steps: int, lr: float, start: GPT | None = None) -> GPT:
        """The demo's run with one optimizer, from ``start`` or from the seed's weights."""
        flags = [*(TINY if self.options.quick else SMALL), "--adamw-weight-decay", "0.1", "--seed", str(self.seed)]
        flags += ["--steps", str(steps), "--eval-every", str(steps), "--lr", str(lr), "--adamw-lr", str(lr)]
        args = demo_parser().parse_args(flags)
        configs = demo.model_config(args), demo.optimizer_config(args), demo.train_config(args)
        run = Run(name, corpus, *configs, Runtime(torch.device("cpu")))
        if start is not None:
            run.model.load_state_dict(start.state_dict())
        run.train(QuietProgress())
        return run.model

    @torch.no_grad()
    def losses(self, model: GPT) -> dict[str, float]:
        """Validation losses on both texts."""
        sums = {"old": 0.0, "new": 0.0}
        for key, corpus in (("old", self.old), ("new", self.new)):
            for tokens, targets in valid_batches(corpus.valid, model.config.seq_len, 32, WINDOWS):
                sums[key] += model.loss(tokens, targets).item() * len(tokens) / WINDOWS
        return sums


def measure(options: argparse.Namespace, report: Report) -> Results:
    old, new = texts()
    results: Results = []
    for seed, first in report.each(list(product(options.seeds, LRS)), "seed {0[0]}, pretrained with {0[1]}".format):
        trial = Trial(seed, options, old, new)
        base = trial.train(first, old, options.steps, LRS[first])
        before = trial.losses(base)
        for then, part in product(LRS, PARTS):
            after = trial.losses(trial.train(then, new, options.steps // 4, LRS[then] * part, base))
            forgotten = after["old"] - before["old"]
            case = {"seed": seed, "pretrained": first, "tuned": then, "lr": LRS[then] * part}
            results.append({**case, "before": before, "new": after["new"], "forgotten": forgotten})
    return results


def cases(results: Results) -> list[tuple[str, str, float, list[float], list[float]]]:
    """Both optimizers, the lr of fine-tuning, and for every seed the loss on the new text and the forgetting."""
    keys = ("pretrained", "tuned", "lr")
    found = list(dict.fromkeys(tuple(result[key] for key in keys) for result in results))
    rows = [[result for result in results if tuple(result[key] for key in keys) == case] for case in found]
    pairs = [([row["new"] for row in case], [row["forgotten"] for row in case]) for case in rows]
    return [(*case, *pair) for case, pair in zip(found, pairs, strict=True)]


def shown(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {spread(values):.4f}"


def show(results: Results, report: Report) -> None:
    for name in LRS:
        before = {
            str(result["before"]): result["before"] for result in results if result["pretrained"] == name
        }.values()
        old, new = ([losses[key] for losses in before] for key in ("old", "new"))
        report.note(f"pretrained with {TITLES[name]}: loss {shown(old)} on the old text, {shown(new)} on the new one")
    rows = [
        (TITLES[first], TITLES[then], f"{lr:g}", shown(new), shown(lost))
        for first, then, lr, new, lost in cases(results)
    ]
    columns = ("pretrained with", "fine-tuned with", "lr", "loss on the new text", "forgetting")
    report.table("after fine-tuning; mean ± standard error over seeds", columns, rows)


def goals_of(results: Results, options: argparse.Namespace) -> list[Goal]:
    """At each combination's best lr for the new text: with the optimizer of pretraining, minus with the other one."""
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for first, then, _, new, lost in cases(results):
        means = statistics.mean(new), statistics.mean(lost)
        best[first, then] = min(best.get((first, then), means), means)
    other = {"muon": "adamw", "adamw": "muon"}
    return [
        Goal(
            f"pretrained with {TITLES[name]}: {text} with the same optimizer minus with the other",
            best[name, name][place] - best[name, other[name]][place],
            most=0.0,
        )
        for name, (place, text) in product(LRS, enumerate(("loss on the new text", "forgetting")))
    ]


def plot(results: Results, figure: Figure) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    for axis, name in zip(axes, LRS, strict=True):
        for then in LRS:
            found = [(new, lost) for first, tuned, _, new, lost in cases(results) if (first, tuned) == (name, then)]
            points = [(statistics.mean(new), statistics.mean(lost)) for new, lost in found]
            colour = COLOURS["ours" if then == "muon" else "AdamW"]
            axis.plot(*zip(*points, strict=True), "o-", color=colour, label=f"fine-tuned with {TITLES[then]}")
        axis.set(title=f"pretrained with {TITLES[name]}", xlabel="loss on the new text")
    axes[0].set_ylabel("forgetting: rise of the loss on the old text")
    axes[0].legend()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (default 0 1 2)")
    parser.add_argument(
        "--steps", type=int, default=None, help="steps of pretraining; fine-tuning takes a quarter (default 240)"
    )


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.steps = options.steps or (8 if options.quick else 240)
    options.seeds = options.seeds[:1] if options.quick else options.seeds


BENCHMARK = common.Benchmark(
    "fine_tuning",
    __doc__,
    measure,
    show,
    goals_of,
    plot,
    (9, 4),
    add_options=add_options,
    settle_options=settle_options,
)

if __name__ == "__main__":
    BENCHMARK.main()
