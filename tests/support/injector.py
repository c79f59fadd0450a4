"""Faults on order: something happens on one rank, in one step, in one phase of it. Only for ranks that are processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from meshmuon.execute.ortho_batch import OrthoBatch
from meshmuon.execute.shard_views import ShardViews
from meshmuon.optim import muon
from meshmuon.transport import Agreement, Exchange

Action = Callable[[], None]

PHASES = (
    "before the agreement",
    "in the agreement",
    "making ready",
    "before the gather",
    "gather",
    "orthogonalise",
    "scatter",
    "adamw",
    "update",
)
_STARTED = {"before the gather": "gather", "gather": "gather", "scatter": "scatter"}


@dataclass(frozen=True)
class Fault:
    """``action`` happens on ``rank`` in ``step``, the first time that ``phase`` is reached."""

    rank: int
    step: int
    phase: str
    action: Action

    @contextmanager
    def armed(self, rank: int, step: int) -> Iterator[None]:
        """Around the step of every rank; does nothing but on the rank and in the step that the fault is for."""
        if (rank, step) != (self.rank, self.step):
            yield
            return
        with _hooked(self.phase, _once(self.action)):
            yield


def fail_at(rank: int, step: int, phase: str, action: Action) -> Fault:
    assert phase in PHASES, phase
    return Fault(rank, step, phase, action)


def killed(folder: Path) -> Action:
    """The process dies as it does when memory runs out; the moment is written down first."""

    def die() -> None:
        time.sleep(0.3)  # the others get to where they will wait for this rank
        note(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    return die


def stalled(folder: Path, seconds: float) -> Action:
    def sleep() -> None:
        note(folder)
        time.sleep(seconds)

    return sleep


def raising(error: BaseException, folder: Path) -> Action:
    def fail() -> None:
        note(folder)
        raise error

    return fail


def note(folder: Path) -> None:
    """Writes down when it happened; the clock is the same for all processes of a machine."""
    (folder / "moment").write_text(repr(time.monotonic()))


def seconds_since(folder: Path) -> float:
    return time.monotonic() - float((folder / "moment").read_text())


def _once(action: Action) -> Action:
    left = [action]
    return lambda: left.pop()() if left else None


def _hooked(phase: str, action: Action) -> Any:
    """Patches the one place where ``phase`` happens."""
    if phase in _STARTED:
        return _around_start(phase, action)
    if phase == "in the agreement":
        return _half_sent(action)
    if phase == "making ready":
        return _before(muon.Planner, "confirm", action)
    owner, name = {
        "before the agreement": (Agreement, "decide"),
        "orthogonalise": (OrthoBatch, "orthogonalise"),
        "adamw": (muon, "adamw_step"),
        "update": (ShardViews, "apply"),
    }[phase]
    return _before(owner, name, action)


def _before(owner: Any, name: str, action: Action) -> Any:
    original = getattr(owner, name)

    def hooked(*args: Any, **options: Any) -> Any:
        action()
        return original(*args, **options)

    return patch.object(owner, name, hooked)


def _around_start(phase: str, action: Action) -> Any:
    """Before or after an exchange was started."""
    original = Exchange.start

    def start(self: Exchange, *args: Any, phase: str) -> Any:
        if phase == wanted and first:
            action()
        pending = original(self, *args, phase=phase)
        if phase == wanted and not first:
            action()
        return pending

    wanted, first = _STARTED[phase], phase.startswith("before")
    return patch.object(Exchange, "start", start)


def _half_sent(action: Action) -> Any:
    """After a reduction was started and before it is over."""
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        pending = original(tensor, *args, **{**options, "async_op": True})
        action()
        return pending.wait()

    return patch.object(dist, "all_reduce", all_reduce)
