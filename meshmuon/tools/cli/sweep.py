"""``meshmuon sweep``: a user's own training at several learning rates, with AdamW and with Muon.

The user's function ``train(make_optimizer, seed)`` builds a model, calls ``make_optimizer(model)`` and trains. It
yields the training loss of every step and may return a validation loss. Every run is saved as soon as it is over.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError, RoutingWarning
from ...optim.muon import Muon
from ...plan import table
from ..simulate.modules import import_function
from .output import printing

_FACTORS = (1, 2, 4, 8)  # Muon's learning rates ÷ AdamW's
_MORE = 4  # learning rates that are tried beyond these while the best one is the smallest or the largest
_DECAY = 0.1  # weight decay of both, unless the user's function passes another
_POINTS = 200  # most points that are kept of a curve
_COLOURS = {"AdamW": "#d98b2b", "Muon": "#3d8fc4"}


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One training.

    Attributes:
        optimizer: ``"AdamW"`` or ``"Muon"``.
        lr: what the optimizer was built with.
        seed: what the function was called with.
        loss: what the function returned, else the mean training loss of the last tenth of the steps; None if it
            diverged.
        steps: number of losses that it yielded.
        curve: the training loss, thinned out.
    """

    optimizer: str
    lr: float
    seed: int
    loss: float | None
    steps: int
    curve: list[float]


def run(arguments: argparse.Namespace) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "meshmuon sweep runs in one process: start it without torchrun, with a model that fits one device."
        )
    sweep = Sweep(arguments.train, arguments.seeds, arguments.out)
    try:
        for lr in arguments.adamw_lrs or [arguments.lr]:
            sweep.try_lr("AdamW", lr)
        for lr in arguments.lrs or [arguments.lr * factor for factor in _FACTORS]:
            sweep.try_lr("Muon", lr)
        for _ in range(0 if arguments.lrs else _MORE):
            beyond = sweep.lr_beyond_the_best()
            if beyond is not None:
                sweep.try_lr("Muon", beyond)
    except KeyboardInterrupt:
        print(f"\nStopped. {sweep.path} keeps the runs that are over; the same command continues.", file=sys.stderr)
        raise
    text = sweep.report()
    sweep.folder.joinpath("sweep.txt").write_text(text + "\n", encoding="utf-8")
    plot = "sweep.png" if sweep.plot() else "no plot, for which matplotlib is missing"
    with printing():
        print(f"{text}\nwrote {sweep.path}, sweep.txt and {plot}")
    return 0


class Sweep:
    """The runs of one function with the given seeds, and the file that keeps them."""

    def __init__(self, target: str, seeds: Sequence[int], folder: Path) -> None:
        self.target, self.train, self.seeds = target, import_function("train", target), tuple(dict.fromkeys(seeds))
        self.folder, self.path = folder, folder / "sweep.json"
        source = inspect.getsourcefile(self.train) if inspect.isfunction(self.train) else None
        self._digest = hashlib.blake2b(Path(source).read_bytes(), digest_size=8).hexdigest() if source else ""
        self._saved = self._read()  # with other seeds as well

    @property
    def runs(self) -> list[SweepRun]:
        return [run for run in self._saved if run.seed in self.seeds]

    def try_lr(self, optimizer: str, lr: float) -> None:
        """Trains with every seed that is not saved."""
        for seed in self.seeds:
            if all((run.optimizer, run.lr, run.seed) != (optimizer, lr, seed) for run in self._saved):
                steps = max((run.steps for run in self._saved), default=0)
                with _progress(f"{optimizer}, lr {lr:g}, seed {seed}", steps) as shown:
                    self._saved.append(self._trained(optimizer, lr, seed, shown))
                self._write()

    def losses(self, optimizer: str) -> dict[float, float]:
        """The mean loss over the seeds by lr, of those that have all seeds; infinite where a run diverged."""
        by_lr: dict[float, list[float]] = {}
        for run in self.runs:
            if run.optimizer == optimizer:
                by_lr.setdefault(run.lr, []).append(math.inf if run.loss is None else run.loss)
        return {lr: sum(losses) / len(losses) for lr, losses in sorted(by_lr.items()) if len(losses) == len(self.seeds)}

    def lr_beyond_the_best(self) -> float | None:
        """Twice Muon's largest lr or half its smallest if that is the best one; else None."""
        losses = self.losses("Muon")
        best = min(losses, key=losses.__getitem__)
        return None if math.isinf(losses[best]) else {min(losses): best / 2, max(losses): best * 2}.get(best)

    def report(self) -> str:
        """The table, and what to write."""
        rows, best = [], []
        for optimizer in _COLOURS:
            losses = self.losses(optimizer)
            lowest = min(losses, key=losses.__getitem__)
            found = f"{optimizer}(model, lr={lowest:g}) with {losses[lowest]:.4f}"
            best.append(found if math.isfinite(losses[lowest]) else f"{optimizer}, which diverged with every lr")
            for lr, loss in losses.items():
                mark = "best" if lr == lowest and math.isfinite(loss) else ""
                rows.append((optimizer, f"{lr:g}", "diverged" if math.isinf(loss) else f"{loss:.4f}", mark))
        head = ("optimizer", "lr", "loss" if len(self.seeds) == 1 else f"loss, mean of {len(self.seeds)} seeds", "")
        if math.isinf(min(self.losses("Muon").values())):
            return f"{table(head, rows)}\nEvery lr of Muon diverged: try smaller ones with --lrs."
        text = f"{table(head, rows)}\nBest: {best[1]}, beside {best[0]}."
        if self.lr_beyond_the_best() is not None:
            text += " It is the first or last lr that was tried: try more with --lrs."
        return text + (
            " Repeat it with --seeds 0 1 2 before you trust a small difference." if len(self.seeds) == 1 else ""
        )

    def plot(self) -> bool:
        """Writes sweep.png; returns False if matplotlib is not installed."""
        if find_spec("matplotlib") is None:
            return False
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10.0, 4.0), layout="constrained", facecolor="white")
        by_lr, by_step = figure.subplots(1, 2)
        for optimizer, colour in _COLOURS.items():
            losses = {lr: loss for lr, loss in self.losses(optimizer).items() if math.isfinite(loss)}
            by_lr.plot(list(losses), list(losses.values()), "o-", color=colour, label=optimizer)
            best = min(losses, key=losses.__getitem__, default=None)
            for run in self.runs:
                if (run.optimizer, run.lr) == (optimizer, best) and run.curve:
                    steps = [run.steps * (k + 1) / len(run.curve) for k in range(len(run.curve))]
                    by_step.plot(
                        steps, run.curve, color=colour, lw=1, label=f"{optimizer}, lr {best:g}, seed {run.seed}"
                    )
        by_lr.set(
            xscale="log", xlabel="learning rate", ylabel="loss at the end", title="Muon and AdamW by learning rate"
        )
        by_step.set(xlabel="step", ylabel="training loss", title="The best run of each")
        for axes in (by_lr, by_step):
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend(frameon=False)
        figure.savefig(self.folder / "sweep.png", dpi=130)
        return True

    def _trained(self, optimizer: str, lr: float, seed: int, shown: Callable[[float], None]) -> SweepRun:
        built: list[torch.optim.Optimizer] = []

        def make_optimizer(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
            built.append(_build_optimizer(optimizer, model, lr, options))
            return built[-1]

        training, losses, last = self.train(make_optimizer, seed), [], None
        if not isinstance(training, Iterator):
            raise ConfigError(
                f"{self.target} returned {type(training).__name__}. It must yield the loss of every step: "
                "def train(make_optimizer, seed): ...; yield loss.item()."
            )
        while True:
            try:
                losses.append(self._number(next(training), "yielded"))
            except StopIteration as end:
                last = None if end.value is None else self._number(end.value, "returned")
                break
            if not math.isfinite(losses[-1]):
                break
            shown(losses[-1])
        if not built or not losses:
            missing = "called make_optimizer(model), so that every run is the same" if losses else "yielded a loss"
            raise ConfigError(f"{self.target} never {missing}.")
        if last is None:
            tail = losses[-max(1, len(losses) // 10) :]
            last = sum(tail) / len(tail)
        stride = -(-len(losses) // _POINTS)
        chunks = [losses[first : first + stride] for first in range(0, len(losses), stride)]
        curve = [sum(chunk) / len(chunk) for chunk in chunks if all(map(math.isfinite, chunk))]
        diverged = not math.isfinite(last) or not math.isfinite(losses[-1])
        return SweepRun(optimizer, lr, seed, None if diverged else last, len(losses), curve)

    def _number(self, value: object, verb: str) -> float:
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"{self.target} {verb} {type(value).__name__}, not a number: write loss.item()."
            ) from None

    def _read(self) -> list[SweepRun]:
        if not self.path.exists():
            return []
        try:
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            same = (saved["train"], saved["digest"]) == (self.target, self._digest)
            runs = [SweepRun(**run) for run in saved["runs"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.path} cannot be read ({error}): delete it, or name another --out.") from None
        if not same:
            raise ConfigError(
                f"{self.path} holds runs of other code than {self.target} now has: delete it, or name another --out."
            )
        return runs

    def _write(self) -> None:
        saved = {"train": self.target, "digest": self._digest, "runs": [asdict(run) for run in self._saved]}
        part = self.path.with_suffix(".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(saved) + "\n", encoding="utf-8")
            part.replace(self.path)  # whole or not at all
        except OSError as error:
            raise ConfigError(f"--out {self.folder} cannot be written: {error.strerror or error}.") from None


def _build_optimizer(name: str, model: nn.Module, lr: float, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Options that AdamW does not have, such as ``conv``, are for Muon only."""
    if "lr" in options:
        raise ConfigError("make_optimizer sets the lr itself: leave lr= out, and build schedulers on the optimizer.")
    options = {"weight_decay": _DECAY, **options}
    if name == "Muon":
        with warnings.catch_warnings():  # a large lr is tried on purpose
            warnings.filterwarnings("ignore", message=".*moves entries by", category=RoutingWarning)
            return Muon(model, lr=lr, **options)
    known = inspect.signature(torch.optim.AdamW).parameters
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, **{key: value for key, value in options.items() if key in known})


@contextmanager
def _progress(title: str, steps: int) -> Iterator[Callable[[float], None]]:
    """Shows the loss of every step in a bar, on a terminal with ``rich``; else one line when the run is over."""
    count, last = 0, math.nan
    if sys.stderr.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
        )
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=steps or None, loss="")
            yield lambda loss: bar.update(task, advance=1, loss=f"{loss:.4f}")
        return

    def shown(loss: float) -> None:
        nonlocal count, last
        count, last = count + 1, loss

    yield shown
    print(f"{title}: {count} steps, training loss {last:.4f}", file=sys.stderr, flush=True)
