"""Checkpoints of the demo: complete or not there at all, the same for every number of processes.

A run that keeps checkpoints has a folder for them, with

  run.json                  the options that a run going on must share
  <contender>/step-000050/  what `torch.distributed.checkpoint` wrote, and result.json: the curve so far

A checkpoint is written under a name that ends in .tmp and gets its own name in one move, by the first process, once
all processes have written their part: what a killed run leaves half-written is never looked at. The step, the weights
and the optimizer's state are all there is to save: the order of the data follows from seed and step, and training draws
no random numbers.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from demo.processes import Runtime, from_first
from demo.train import EvalPoint, ResumePoint, Run, RunResult

FORMAT = 1
KEPT = 2  # of each contender: the newest, and the one to fall back to
OPTIONS_FILE = "run.json"
RESULT_FILE = "result.json"
FOLDER = "checkpoints"  # inside a run's folder, unless --checkpoint-dir says otherwise
UNFINISHED, DAMAGED = ".tmp", ".damaged"

_STEP = re.compile(r"step-(\d+)")

Options = dict[str, dict[str, Any]]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written."""


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A complete checkpoint and the run as it was when it was written."""

    path: Path
    result: RunResult


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where the checkpoints of a run are kept, after how many steps each, and after which one the run stops."""

    root: Path
    every: int
    stop_after: int | None = None

    def newest(self, name: str, runtime: Runtime) -> SavedRun | None:
        """The newest complete checkpoint of a contender, the same on every process; None for a fresh start.

        The first process looks for it, and reports every damaged checkpoint that it skips.
        """
        return from_first(_newest(self.root / name) if runtime.rank == 0 else None, runtime)

    def resume(self, run: Run, saved: SavedRun) -> None:
        """Put weights, optimizer and curve of `saved` into a run that has just been built."""
        state = _state(run.model, run.optimizer)
        with _quietly():
            load(state, checkpoint_id=saved.path, no_dist=run.runtime.world_size == 1)
        set_model_state_dict(run.model, state["model"])
        set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])
        run.result = saved.result
        run.result.resumed.append(ResumePoint(run.result.steps_done, run.runtime.world_size))

    def after_step(self, run: Run) -> None:
        """Write a checkpoint if one is due; at the end of a run and before a stop one always is."""
        done, finished = run.result.steps_done, run.result.status == "finished"
        if finished or done % self.every == 0 or done == self.stop_after:
            self._write(run, done)
        if done == self.stop_after and not finished:
            raise KeyboardInterrupt("--stop-after")

    def _write(self, run: Run, done: int) -> None:
        path = self.root / run.result.name / f"step-{done:06d}"
        unfinished = path.with_name(path.name + UNFINISHED)
        problem: str | None = None
        try:
            with _quietly():
                save(_state(run.model, run.optimizer), checkpoint_id=unfinished, no_dist=run.runtime.world_size == 1)
            if run.runtime.rank == 0:
                _complete(unfinished, path, run.result)
        except (OSError, CheckpointException) as error:
            problem = (
                f"{path}: the checkpoint could not be written ({error}). Make room or name another --checkpoint-dir"
            )
        # Nobody goes on before the checkpoint has its name: else a step could fail between the two and cost a
        # checkpoint.
        problem = from_first(problem, run.runtime)
        if problem is not None:
            raise CheckpointError(problem)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warning that one process saves alone: it is meant to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _complete(unfinished: Path, path: Path, result: RunResult) -> None:
    _write_json(unfinished / RESULT_FILE, asdict(result))
    unfinished.rename(path)
    _sync(path.parent)
    for old in _by_age(path.parent)[:-KEPT]:
        _remove(old)


def _remove(path: Path) -> None:
    """Takes the name away first: what is left when the removal is cut short must not look complete."""
    doomed = path.with_name(path.name + UNFINISHED)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _by_age(folder: Path) -> list[Path]:
    """The checkpoints in a contender's folder, oldest first."""
    matches = ((_STEP.fullmatch(path.name), path) for path in folder.glob("step-*"))
    return [path for _, path in sorted((int(match[1]), path) for match, path in matches if match)]


def _newest(folder: Path) -> SavedRun | None:
    for path in reversed(_by_age(folder)):
        try:
            return SavedRun(path, _read_result(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            _pass_over(path, error)
    return None


def _pass_over(path: Path, error: Exception) -> None:
    # Moved out of the way, not deleted: its name is needed when the run gets there again, its content is the user's.
    aside = path.with_name(path.name + DAMAGED)
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    print(
        f"{path}: this checkpoint is damaged and is passed over; it is kept as {aside.name}. {error}",
        file=sys.stderr,
        flush=True,
    )


def _read_result(path: Path) -> RunResult:
    fields = json.loads((path / RESULT_FILE).read_text(encoding="utf-8"))
    fields["evals"] = [EvalPoint(**point) for point in fields["evals"]]
    fields["resumed"] = [ResumePoint(**point) for point in fields["resumed"]]
    return RunResult(**fields)


def _write_json(path: Path, content: object) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Makes names in a folder survive a loss of power, as `fsync` does for a file's content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The folder of a run


@contextmanager
def opened(root: Path, every: int, options: Options) -> Iterator[Checkpoints]:
    """The checkpoints in `root`, for this process alone until it ends; a fresh folder is made.

    Raises:
        ValueError: they are of a run with other options, in use, or `root` is something else.
    """
    _check(root, options)
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root):
        if not (root / OPTIONS_FILE).exists():
            unfinished = root / (OPTIONS_FILE + UNFINISHED)
            _write_json(unfinished, {"format": FORMAT, "options": options})
            unfinished.rename(root / OPTIONS_FILE)
        for left in root.glob(f"*/step-*{UNFINISHED}"):
            shutil.rmtree(left)
        yield Checkpoints(root, every)


def unfinished_run(out: Path, names: Sequence[str], options: Options) -> Path | None:
    """The newest run folder below `out` that keeps checkpoints of these options and has not come to its end."""
    for file in sorted(out.glob(f"*/{FOLDER}/{OPTIONS_FILE}"), reverse=True):
        folder = file.parent.parent
        if folder.is_symlink() or _is_finished(folder, names):
            continue
        try:
            _check(file.parent, options)
            with _locked(file.parent):
                return folder
        except (ValueError, OSError):
            continue
    return None


def _is_finished(folder: Path, names: Sequence[str]) -> bool:
    """Whether its report, written last, covers the end of all the runs asked for."""
    try:
        runs = json.loads((folder / "log.json").read_text(encoding="utf-8"))["runs"]
    except (OSError, ValueError, KeyError):
        return False
    return all(name in runs and runs[name]["status"] == "finished" for name in names)


def _check(root: Path, options: Options) -> None:
    file = root / OPTIONS_FILE
    if not file.exists():
        if root.exists() and any(path.name != _LOCK for path in root.iterdir()):
            raise ValueError(
                f"--checkpoint-dir {root}: there are other things in this folder; name an empty or a new one"
            )
        return
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
        form, before = written["format"], written["options"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: damaged ({error}); name another --checkpoint-dir") from error
    if form != FORMAT:
        raise ValueError(f"{file}: format {form}, expected {FORMAT}; name another --checkpoint-dir")
    differences = _differences(before, json.loads(json.dumps(options)))
    if differences:
        raise ValueError(
            f"--checkpoint-dir {root}: its checkpoints were made with other options: {'; '.join(differences)}. "
            "Use those options, or name another --checkpoint-dir"
        )


def _differences(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    flat = [
        {f"{part} {key}": value for part in options for key, value in options[part].items()}
        for options in (before, now)
    ]
    return [
        f"{key} was {flat[0].get(key)}, is now {flat[1].get(key)}"
        for key in dict.fromkeys((*flat[0], *flat[1]))
        if flat[0].get(key) != flat[1].get(key)
    ]


_LOCK = ".lock"


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Keeps other runs out of a folder of checkpoints. The system lets go of the lock when the process ends,
    however it ends.
    """
    with (root / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--checkpoint-dir {root}: another run is using it; wait for its end or name another one"
            ) from None
        yield
