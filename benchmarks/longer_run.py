"""A longer run: the demo's GPT with 25 million parameters, meshmuon and AdamW, resumed on another number of ranks in
the middle.

Both contenders train at the same time, each on two FSDP2 processes of one thread. For each: a short sweep of its lr;
the run without a stop until a little past its middle; the same stretch again from a checkpoint, on one process, then on
two; weights and optimizer state of both compared bit by bit; then the second one continues to the end. Seconds per step
are measured apart, on a machine that does nothing else.

All pieces are kept in a folder. The same command, given again after an interruption, repeats none that is finished.

    python benchmarks/longer_run.py --work /tmp/longer --untimed
    python benchmarks/longer_run.py --work /tmp/longer             # afterwards, on an idle machine: the seconds per step
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common  # first: it sets what torch reads when it starts
import torch
from common import COLOURS, ROOT, Goal, Report
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

sys.path.insert(0, str(ROOT / "examples"))
from train_gpt import INTERRUPTED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL = "--d-model 512 --layers 8 --heads 8 --batch-size 8 --eval-windows 32"
TINY = "--d-model 16 --layers 1 --heads 2 --d-ff 32 --seq-len 32 --batch-size 4 --eval-windows 4"
ALWAYS = "--threads 1 --device cpu --grad-clip 0 --no-plot"  # a norm over ranks is rounded by their number
LRS = {"muon": (8e-3, 4e-3, 1.6e-2), "adamw": (1e-3, 5e-4, 2e-3)}
LR_FLAG = {"muon": "--lr", "adamw": "--adamw-lr"}
TITLES = {"muon": "meshmuon", "adamw": "AdamW"}
Record = dict[str, Any]


class Contender:
    """The pieces of one contender's run, kept below ``work``."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options, self.work = name, options, options.work / name
        self.log = self.work / "pieces.jsonl"

    def run(self) -> Record:
        """Does what is left to do."""
        lrs = self.options.lrs[self.name]
        sweep = {f"{lr:g}": self.swept(lr) for lr in lrs if len(lrs) > 1}
        lr = min(sweep, key=lambda key: sweep[key], default=f"{lrs[0]:g}")
        first, middle, last = self.options.steps // 2, self.options.stretch // 2, self.options.stretch
        self.piece("straight", lr, 2, first + last)
        kept = self.work / "straight" / self.name
        if not (self.work / "stopped").exists():
            copy, checkpoint = self.work / "copy", f"step-{first:06d}"
            shutil.copytree(kept / checkpoint, copy / self.name / checkpoint, dirs_exist_ok=True)
            shutil.copy(kept.parent / "run.json", copy)
            copy.rename(self.work / "stopped")
        self.piece("stopped", lr, 1, first + middle)
        self.piece("stopped", lr, 2, first + last)
        bits = {which: self.bits(which, first + last) for which in ("straight", "stopped")}
        self.piece("stopped", lr, 2, self.options.steps)
        result = json.loads(
            (self.work / "stopped" / self.name / f"step-{self.options.steps:06d}" / "result.json").read_text()
        )
        pieces = [json.loads(line) for line in self.log.read_text().splitlines()]
        return {"sweep": sweep, "lr": float(lr), "bits": bits, "pieces": pieces, **result}

    def swept(self, lr: float) -> float:
        """The final validation loss of a short run with this lr on one process."""
        folder = self.options.work / "sweep" / f"{self.name}-{lr:g}"
        if not list(folder.glob("*/log.json")):
            steps = self.options.sweep_steps
            self.demo(lr, 1, ["--steps", str(steps), "--warmup-steps", str(steps // 10)], folder)
        (log,) = folder.glob("2*/log.json")
        return float(json.loads(log.read_text())["runs"][self.name]["evals"][-1]["loss"])

    def piece(self, which: str, lr: str, processes: int, until: int) -> None:
        """Continues one of the two runs, if it is not that far yet, up to a checkpoint after ``until`` steps."""
        folder = self.work / which
        done = [path for path in (folder / self.name).glob("step-??????") if int(path.name[5:]) >= until]
        if done:
            return
        every = (
            self.options.stretch if until == self.options.steps or which == "straight" else self.options.stretch // 2
        )
        flags = ["--steps", str(self.options.steps), "--microbatches", "2", "--checkpoint-dir", str(folder)]
        flags += ["--checkpoint-every", str(every), "--stop-after", str(until)]
        begin = datetime.now(UTC)
        self.demo(lr, processes, flags, self.work / "runs")
        times = {"begin": f"{begin:%H:%M:%S}", "end": f"{datetime.now(UTC):%H:%M:%S}"}
        with self.log.open("a") as file:
            file.write(json.dumps({"run": which, "processes": processes, "until": until, **times}) + "\n")

    def demo(self, lr: float | str, processes: int, flags: Sequence[str], out: Path) -> None:
        """Runs the demo with this contender alone; its words are added to ``log.txt``."""
        sizes = (TINY if self.options.quick else FULL).split()
        evals = ["--eval-every", str(max(1, self.options.steps // 12))]
        command = [
            *sizes,
            *ALWAYS.split(),
            *evals,
            "--only",
            self.name,
            LR_FLAG[self.name],
            str(lr),
            "--nproc",
            str(processes),
        ]
        with (self.options.work / f"{self.name}.log").open("a") as words:
            words.write(f"{datetime.now(UTC):%F %T} {' '.join((*command, *flags))}\n")
            words.flush()
            whole = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), *command, *flags, "--out", str(out)]
            code = subprocess.run(whole, stdout=words, stderr=words, check=False).returncode
        if code not in (0, INTERRUPTED):
            raise SystemExit(f"train_gpt.py ended with {code}; its words are in {words.name}")

    def bits(self, which: str, step: int) -> dict[str, str]:
        """A digest of the weights and one of the optimizer's state in a checkpoint, kept as the checkpoint may be
        removed.
        """
        file = self.work / f"{which}-{step}.json"
        if not file.exists():
            file.write_text(json.dumps(digests(self.work / which / self.name / f"step-{step:06d}")))
        return dict(json.loads(file.read_text()))


def digests(checkpoint: Path) -> dict[str, str]:
    """A digest of all bits of the weights, and one of the optimizer's state, whatever number of processes wrote
    them.
    """
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint, Path(folder) / "whole.pt")
        state = torch.load(Path(folder) / "whole.pt", weights_only=False)
    return {part: _digest(state[part]).hexdigest() for part in ("model", "optimizer")}


def _digest(value: object) -> hashlib.blake2b:
    result = hashlib.blake2b(digest_size=12)
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            result.update(str(key).encode() + _digest(value[key]).digest())
    elif isinstance(value, torch.Tensor):
        result.update(f"{value.dtype} {tuple(value.shape)}".encode())
        result.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    else:
        result.update(repr(value).encode())
    return result


def seconds_per_step(options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step on two processes with nothing beside; kept like the rest."""
    file = options.work / "seconds.json"
    if not file.exists():
        seconds = {}
        for name in options.lrs:
            out = options.work / "timing" / name
            Contender(name, options).demo(options.lrs[name][0], 2, ["--steps", "10", "--eval-windows", "2"], out)
            log = json.loads(max(out.glob("2*/log.json")).read_text())["runs"][name]
            seconds[name] = statistics.median(log["step_seconds"][2:])
        file.write_text(json.dumps(seconds))
    return dict(json.loads(file.read_text()))


def measure(options: argparse.Namespace, report: Report) -> Record:
    options.work.mkdir(parents=True, exist_ok=True)
    del report.facts["options"]["work"]  # a path of this machine
    contenders = [Contender(name, options) for name in options.lrs]
    with ThreadPoolExecutor(len(contenders)) as pool:  # at the same time: a busy machine slows both
        runs = dict(zip(options.lrs, pool.map(Contender.run, contenders), strict=True))
    seconds = {} if options.untimed else seconds_per_step(options)
    setting = json.loads((contenders[0].work / "stopped" / "run.json").read_text())["options"]
    left_out = ("routing", "plan", "optimizer_seconds", "step_seconds", "hyperparameters", "largest_logit", "name")
    kept = {name: {key: value for key, value in run.items() if key not in left_out} for name, run in runs.items()}
    return {"setting": setting, "seconds_per_step": seconds, "runs": kept}


def reached(run: Record, loss: float) -> float:
    """The step, between two validations, at which a run comes down to a loss; infinite if it never does."""
    points = [(point["step"], point["loss"]) for point in run["evals"]]
    for (before, high), (after, low) in pairwise(points):
        if low <= loss:
            return float(before + (after - before) * (high - loss) / (high - low))
    return float("inf")


def show(results: Record, report: Report) -> None:
    runs = results["runs"]
    rows = [(TITLES[name], lr, f"{loss:.4f}") for name, run in runs.items() for lr, loss in run["sweep"].items()]
    report.table("sweep: validation loss after a short run", ("contender", "lr", "loss"), rows)
    steps = [point["step"] for point in next(iter(runs.values()))["evals"]]
    losses = [(TITLES[name], *(f"{point['loss']:.3f}" for point in run["evals"])) for name, run in runs.items()]
    report.table("validation loss after so many steps", ("", *map(str, steps)), losses)
    pieces = [
        (TITLES[name], piece["run"], str(piece["processes"]), str(piece["until"]), piece["begin"], piece["end"])
        for name, run in runs.items()
        for piece in run["pieces"]
    ]
    report.table("pieces", ("contender", "run", "processes", "until step", "from (UTC)", "to"), pieces)
    digest = [
        (TITLES[name], which, *bits.values()) for name, run in runs.items() for which, bits in run["bits"].items()
    ]
    report.table("digests after the stretch on other ranks", ("contender", "run", "weights", "optimizer"), digest)
    for name, seconds in results["seconds_per_step"].items():
        report.note(f"{TITLES[name]}: {seconds:.2f} s per step on an idle machine, lr {runs[name]['lr']:g}")


def goals_of(results: Record, options: argparse.Namespace) -> list[Goal]:
    runs, seconds = results["runs"], results["seconds_per_step"]
    unequal = sum(run["bits"]["straight"] != run["bits"]["stopped"] for run in runs.values())
    goals = [Goal("runs whose bits differ from the run that was not stopped", float(unequal), most=0.0)]
    if len(runs) == len(LRS):
        final = {name: run["evals"][-1]["loss"] for name, run in runs.items()}
        share = reached(runs["muon"], final["adamw"]) / options.steps
        goals.append(Goal("meshmuon's final validation loss minus AdamW's", final["muon"] - final["adamw"], most=0.0))
        goals.append(Goal("share of the steps in which meshmuon has AdamW's final loss", share, most=1.0))
        time_share = share * seconds["muon"] / seconds["adamw"] if seconds else None
        goals.append(Goal("the same as a share of the time", time_share, most=1.0))
    return goals


def plot(results: Record, figure: Figure) -> None:
    seconds = results["seconds_per_step"]
    axes = figure.subplots(1, 2 if seconds else 1, sharey=True, squeeze=False)[0]
    for name, run in results["runs"].items():
        colour = COLOURS["ours" if name == "muon" else "AdamW"]
        steps, losses = ([point[key] for point in run["evals"]] for key in ("step", "loss"))
        axes[0].plot(range(1, len(run["train_loss"]) + 1), run["train_loss"], color=colour, alpha=0.25, lw=0.8)
        axes[0].plot(steps, losses, color=colour, marker="o", ms=3, label=f"{TITLES[name]}, lr {run['lr']:g}")
        if seconds:
            axes[1].plot([step * seconds[name] / 60 for step in steps], losses, color=colour, marker="o", ms=3)
    stops = [point["step"] for point in next(iter(results["runs"].values()))["resumed"]]
    axes[0].axvspan(stops[0], stops[1], color=COLOURS["floor"], lw=0, label="on one process, else on two")
    axes[0].set(xlabel="step", ylabel="loss, nats per byte (faint: training)", title="by steps")
    axes[0].legend()
    if seconds:
        axes[1].set(xlabel="minutes of training, at the seconds per step of an idle machine", title="by time")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", type=Path, help="folder of the pieces (default runs/longer_run)")
    parser.add_argument("--steps", type=int, default=None, help="steps of each run (default 240)")
    parser.add_argument("--only", choices=tuple(LRS), default=None, help="one contender alone")
    parser.add_argument("--untimed", action="store_true", help="leave out the seconds per step: the machine is busy")


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.work = (options.work or (options.out or ROOT / "runs") / "longer_run").resolve()
    options.lrs = {name: lrs[:1] if options.quick else lrs for name, lrs in LRS.items() if options.only in (None, name)}
    options.steps, options.stretch = options.steps or (8 if options.quick else 240), 4 if options.quick else 20
    options.sweep_steps = 2 if options.quick else 40
    if options.steps % (2 * options.stretch):
        parser.error(
            f"--steps {options.steps} must be a multiple of {2 * options.stretch}: the middle is at a checkpoint"
        )


BENCHMARK = common.Benchmark(
    "longer_run",
    __doc__,
    measure,
    show,
    goals_of,
    plot,
    (11, 4.2),
    add_options=add_options,
    settle_options=settle_options,
)

if __name__ == "__main__":
    BENCHMARK.main()
