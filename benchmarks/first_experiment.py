"""The first experiment: AdamW swapped for Muon on six small tasks, over learning rates and seeds.

What is asked: at which lr is the swap never worse than AdamW at its usual lr, and why is that not AdamW's own lr? Every
task is trained with both optimizers from the same weights on the same data. AdamW's runs at the usual lr also measure
AdamW's real updates of the matrices that Muon would train, beside the size that the rule ``match_rms_adamw`` assumes.

    python benchmarks/first_experiment.py --keep runs/first_experiment.jsonl   # continues where it was stopped
    python benchmarks/first_experiment.py --tasks GPT ViT --seeds 0
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common  # first: it sets what torch reads when it starts
import torch
from common import Goal, Report
from figures import log_axis
from small_tasks import TASKS, Task
from torch import Tensor, nn
from tuning import LINES, best, draw_lines

from meshmuon import Muon

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
KEYS = ("task", "optimizer", "lr", "seed")
USUAL_LR = 1e-3  # torch.optim.AdamW's default, and what small models are usually trained with
TITLES = {
    "adamw": "AdamW",
    "muon": "meshmuon",
    "muon_apart": f"meshmuon, adamw_lr={USUAL_LR:g}",
    "muon_matched": "meshmuon, rms of every step as AdamW's",  # a warm-up of the rule, from what AdamW's run measured
}
README_LR = 4e-3  # what README shows
LRS = {
    "adamw": (1e-3, 2e-3, 4e-3, 8e-3),
    "muon": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    "muon_apart": (4e-3, 8e-3, 1.6e-2),
    "muon_matched": (USUAL_LR,),
}
ASSUMED_RMS = 0.2  # of match_rms_adamw, at lr 1
DECAY = 0.1
SPANS = {"steps 1–20": (0, 20), "21–100": (20, 100), "101 on": (100, 10**9)}


class UpdateMeter:
    """Sizes of AdamW's updates at lr 1 of the matrices that Muon would train, without the weight decay.

    ``rms`` is over all their entries, at every step. ``spectral`` is the largest singular value ÷ that of Muon's
    update, at every tenth step; the mean over the matrices.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        groups = [group for group in Muon(model, **task.muon).param_groups if group["use_muon"]]
        self.matrices: dict[str, Tensor] = {}
        for group in groups:
            self.matrices |= dict(zip(group["param_names"], group["params"], strict=True))
        self.rms: list[float] = []
        self.spectral: list[float] = []
        self._before: dict[str, Tensor] = {}

    def before_step(self) -> None:
        self._before = {name: matrix.detach().clone() for name, matrix in self.matrices.items()}

    def after_step(self, lr: float) -> None:
        updates = [self._update(name, lr) for name in self.matrices]
        squares = sum(update.square().sum().item() for update in updates)
        self.rms.append(math.sqrt(squares / sum(update.numel() for update in updates)))
        if len(self.rms) % 10 == 1:
            largest = [
                torch.linalg.matrix_norm(update, 2) / (ASSUMED_RMS * max(update.shape[-2:]) ** 0.5)
                for update in updates
            ]
            self.spectral.append(torch.cat([norms.flatten() for norms in largest]).mean().item())

    def _update(self, name: str, lr: float) -> Tensor:
        update = (self._before[name] * (1 - lr * DECAY) - self.matrices[name].detach()) / lr
        if name.endswith("in_proj_weight"):  # queries, keys and values: three matrices
            return update.view(3, -1, update.shape[1])
        return update.flatten(1) if update.ndim == 4 else update


def optimizer_of(name: str, model: nn.Module, lr: float, task: Task) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=task.betas, weight_decay=DECAY)
    adamw_lr = USUAL_LR if name == "muon_apart" else None
    return Muon(model, lr=lr, adamw_lr=adamw_lr, weight_decay=DECAY, **task.muon)


def trained(task: Task, optimizer_name: str, lr: float, seed: int, rms: Sequence[float] = ()) -> Row:
    """The validation loss after the last step, None if the run diverged, and the sizes of AdamW's updates at the usual
    lr.

    With ``rms``, Muon's matrices move as far in every step as AdamW's did.
    """
    torch.manual_seed(seed)
    model = task.build(task.width)
    optimizer = optimizer_of(optimizer_name, model, lr, task)
    meter = UpdateMeter(model, task) if (optimizer_name, lr) == ("adamw", USUAL_LR) else None
    peaks, warmup = [group["lr"] for group in optimizer.param_groups], max(1, task.steps // 10)
    for step in range(task.steps):
        scale = min((step + 1) / warmup, (task.steps - step) / (task.steps - warmup)) if task.decayed else 1.0
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * scale * (rms[step] / ASSUMED_RMS if rms and group["use_muon"] else 1.0)
        loss = model(*task.batch(step, seed))
        if not loss.isfinite():
            return {"loss": None}
        loss.backward()
        if task.decayed:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if meter:
            meter.before_step()
        optimizer.step()
        if meter:
            meter.after_step(lr * scale)
        optimizer.zero_grad()
    with torch.no_grad():
        loss = model(*task.batch(-1, seed)).item()
    return {"loss": loss if math.isfinite(loss) else None} | (
        {"rms": meter.rms, "spectral": meter.spectral} if meter else {}
    )


def grid(options: argparse.Namespace) -> list[tuple[str, str, float, int]]:
    """The runs; seed by seed, so that a sweep that is stopped has all tasks. What matters less comes last."""
    runs = [
        product(options.seeds, options.tasks, names)
        for names in (("adamw", "muon"), ("muon_matched",), ("muon_apart",))
    ]
    return [(task, name, lr, seed) for values in runs for seed, task, name in values for lr in options.lrs[name]]


def measure(options: argparse.Namespace, report: Report) -> list[Row]:
    tasks = {name: replace(TASKS[name], steps=3, width=8) if options.quick else TASKS[name] for name in options.tasks}
    kept = options.keep.read_text().splitlines() if options.keep and options.keep.exists() else []
    done = {tuple(row[key] for key in KEYS): row for row in map(json.loads, kept)}
    missing = [] if options.kept_only else [run for run in grid(options) if run not in done]
    for run in report.each(missing, "{0[0]}, {0[1]}, lr {0[2]}, seed {0[3]}".format):
        task, name, lr, seed = run
        rms = done[task, "adamw", lr, seed]["rms"] if name == "muon_matched" else ()
        done[run] = dict(zip(KEYS, run, strict=True)) | trained(tasks[task], name, lr, seed, rms)
        if options.keep:
            with options.keep.open("a") as file:
                file.write(json.dumps(done[run]) + "\n")
    return [done[run] for run in grid(options) if run in done]


def curve(rows: Iterable[Row], task: str, optimizer: str) -> dict[float, list[float]]:
    """The losses of all seeds by lr; an lr at which a seed diverged is left out."""
    losses: dict[float, list[float | None]] = {}
    for row in rows:
        if (row["task"], row["optimizer"]) == (task, optimizer):
            losses.setdefault(row["lr"], []).append(row["loss"])
    return {
        lr: [loss for loss in seeds if loss is not None] for lr, seeds in sorted(losses.items()) if None not in seeds
    }


def gain(rows: Sequence[Row], task: str, lr: float, adamw_lr: float | None = USUAL_LR) -> float:
    """AdamW's loss, at its best lr for None, minus Muon's at ``lr``: the mean over the seeds of both; nan if one
    diverged.
    """
    adamw = curve(rows, task, "adamw")
    compared = best(adamw) if adamw_lr is None and adamw else adamw_lr
    losses = {(row["optimizer"], row["lr"], row["seed"]): row["loss"] for row in rows if row["task"] == task}
    pairs = [
        (losses.get(("adamw", compared, seed)), losses.get(("muon", lr, seed)))
        for seed in {row["seed"] for row in rows}
    ]
    gains = [ours[0] - ours[1] for ours in pairs if ours[0] is not None and ours[1] is not None]
    return statistics.mean(gains) if gains and lr in curve(rows, task, "muon") else math.nan


def cell(losses: dict[float, list[float]], lr: float, tried: bool) -> str:
    if lr not in losses:
        return "diverged" if tried else "–"
    fewer = len(losses[lr]) < max(map(len, losses.values()))
    return f"{statistics.mean(losses[lr]):.4f}{f' ({len(losses[lr])})' if fewer else ''}{' *' if lr == best(losses) else ''}"


def show(rows: list[Row], report: Report) -> None:
    tasks, lrs = list(dict.fromkeys(row["task"] for row in rows)), sorted({row["lr"] for row in rows})
    lines = []
    for task, optimizer in product(tasks, TITLES):
        losses = curve(rows, task, optimizer)
        spread = max((max(seeds) - min(seeds) for seeds in losses.values()), default=0.0)
        tried = {row["lr"] for row in rows if (row["task"], row["optimizer"]) == (task, optimizer)}
        cells = [cell(losses, lr, lr in tried) for lr in lrs]
        lines.append((task, TITLES[optimizer], *cells, f"{spread:.4f}"))
    columns = ("task", "optimizer", *(f"lr {lr:g}" for lr in lrs), "seeds differ by ≤")
    report.table(
        "validation loss after the last step, mean over seeds (over how many, if fewer); * the best", columns, lines
    )
    report.table(
        f"AdamW's loss at lr {USUAL_LR:g} minus meshmuon's: above 0 meshmuon is better",
        ("task", *(f"lr {lr:g}" for lr in LRS["muon"])),
        [(task, *(f"{gain(rows, task, lr):+.4f}" for lr in LRS["muon"])) for task in tasks],
    )
    report.table(
        f"AdamW's update at lr {USUAL_LR:g}: rms of the entries ÷ lr, where match_rms_adamw assumes {ASSUMED_RMS}; "
        "largest singular value ÷ that of Muon's update at the same lr",
        ("task", *(f"rms, {span}" for span in SPANS), *(f"singular value, {span}" for span in SPANS)),
        [(task, *(f"{size:.2f}" for size in span_means(rows, task))) for task in tasks],
    )


def span_means(rows: Sequence[Row], task: str) -> list[float]:
    """The mean over the steps of each span, of all seeds: of the rms, then of the largest singular values."""
    means = []
    for key, every in (("rms", 1), ("spectral", 10)):
        steps = over_seeds(rows, task, key)
        for first, last in SPANS.values():
            values = steps[-(-first // every) : -(-last // every)]
            means.append(statistics.mean(values) if values else math.nan)
    return means


def over_seeds(rows: Sequence[Row], task: str, key: str) -> list[float]:
    """The mean over seeds of what was measured, step by step."""
    seeds = [row[key] for row in rows if row["task"] == task and key in row]
    return [statistics.mean(values) for values in zip(*seeds, strict=True)]


def to_json(rows: list[Row]) -> dict[str, Any]:
    """The runs, and the sizes of updates at every tenth step."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    sizes = {task: (over_seeds(rows, task, "rms")[::10], over_seeds(rows, task, "spectral")) for task in tasks}
    return {
        "runs": [{key: row[key] for key in (*KEYS, "loss")} for row in rows],
        "updates": {task: [[round(size, 3) for size in sizes_of] for sizes_of in both] for task, both in sizes.items()},
    }


def goals(rows: list[Row], options: argparse.Namespace) -> list[Goal]:
    gains = [gain(rows, task, README_LR) for task in options.tasks]
    tuned = [gain(rows, task, README_LR, None) for task in options.tasks]
    text = f"meshmuon at lr {README_LR:g} beside AdamW at"
    return [
        Goal(f"{text} {USUAL_LR:g}: the smallest gain of all tasks", min(gains), least=0.0),
        Goal(
            f"{text} {USUAL_LR:g}: tasks on which meshmuon is better",
            sum(value > 0 for value in gains),
            least=len(gains) // 2 + 1,
        ),
        Goal(f"{text} its best lr: the smallest gain of all tasks", min(tuned), least=0.0),
    ]


def plot(results: dict[str, Any], figure: Figure) -> None:
    """A panel for each task; in the last column the sizes of AdamW's updates."""
    rows, panels = results["runs"], figure.subplots(2, 4)
    colours = {**LINES, "muon_apart": "#6a9a4a", "muon_matched": "#8e6bbf"}
    for axes, task in zip(panels[:, :3].flat, results["updates"], strict=False):
        lines = [(TITLES[name], colours[name], curve(rows, task, name)) for name in TITLES]
        draw_lines(axes, [line for line in lines if line[2]])
        axes.set_title(f"{task}: {TASKS[task].about}")
        axes.tick_params(axis="x", labelrotation=90)
    titles = "rms of AdamW's update ÷ lr", "its largest singular value ÷ Muon's"
    for axes, title, assumed, which in zip(panels[:, 3], titles, (ASSUMED_RMS, 1.0), (0, 1), strict=True):
        for task, sizes in results["updates"].items():
            axes.plot([10 * k + 1 for k in range(len(sizes[which]))], sizes[which], label=task)
        axes.axhline(assumed, color=common.COLOURS["line"], ls="--", label="Muon's")
        axes.set(title=title, xlabel="step")
        log_axis(axes, "y", [0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 20, 40])
        axes.legend(fontsize=8)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", choices=TASKS, nargs="+", default=list(TASKS), help="tasks (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (default 0 1 2)")
    parser.add_argument("--kept-only", action="store_true", help="train nothing: show what --keep has")
    parser.add_argument(
        "--keep", type=Path, help="file for the runs that are done: the same command continues after them"
    )


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.lrs = {name: lrs[:2] if options.quick else lrs for name, lrs in LRS.items()}
    if options.quick:
        options.seeds = options.seeds[:1]


BENCHMARK = common.Benchmark(
    "first_experiment",
    __doc__,
    measure,
    show,
    goals,
    plot,
    (16.0, 8.0),
    add_options=add_options,
    settle_options=settle_options,
    to_json=to_json,
)

if __name__ == "__main__":
    BENCHMARK.main()
