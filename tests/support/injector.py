"""Injects a fault into one rank, in one step, in one phase of it. Only for ranks that are processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from meshmuon.agree.local_planner import LocalPlanner
from meshmuon.agree.planner import Planner
from meshmuon.execute.ortho_batch import OrthoBatch
from meshmuon.execute.shards import UpdateViews
from meshmuon.optim import muon_step
from meshmuon.transport import Agreement, Exchange
from tests.support.processes import GROUP_TIMEOUT, shorten_timeouts

Action = Callable[[], None]

PHASES = (
    "planning",
    "before the agreement",
    "making ready",
    "warm-up exchange",
    "before the gather",
    "gather",
    "orthogonalise",
    "before the scatter",
    "scatter",
    "adamw",
    "update",
)
_STARTED = {"before the gather": "gather", "gather": "gather", "before the scatter": "scatter", "scatter": "scatter"}

# How far the other ranks must have come when the rank of the fault dies, so that none of them is still in an earlier
# phase.
_AWAITED = {
    **dict.fromkeys(("planning", "before the agreement", "making ready"), "before the agreement"),
    "warm-up exchange": "warm-up exchange",
    **dict.fromkeys(("before the gather", "gather", "orthogonalise"), "before the gather"),
    **dict.fromkeys(("before the scatter", "scatter", "adamw", "update"), "before the scatter"),
}
# after which a file that does not come is an error; a timeout may be what lets it come
_MOST_SECONDS = GROUP_TIMEOUT + 50.0


@dataclass(frozen=True)
class Fault:
    """``action`` happens on ``rank`` in ``step``, the first time that ``phase`` is reached.

    The other ranks touch ``arrived<rank>`` in ``folder`` once they have come as far as ``_AWAITED`` says. They then do
    what ``others_do`` says.
    """

    rank: int
    step: int
    phase: str
    action: Action
    folder: Path
    others_do: Action = lambda: None

    @contextmanager
    def armed(self, rank: int, step: int) -> Iterator[None]:
        """Around the step of every rank; does nothing but in the step that the fault is for."""
        if step != self.step:
            yield
            return
        if rank == self.rank:
            hooks = hooked(self.phase, _once(self.action))
        else:
            hooks = hooked(_AWAITED[self.phase], _once(lambda: self._arrive(rank)))
        with hooks:
            yield

    def _arrive(self, rank: int) -> None:
        (self.folder / f"arrived{rank}").touch()
        self.others_do()


def fail_at(rank: int, step: int, phase: str, action: Action, folder: Path) -> Fault:
    assert phase in PHASES, phase
    return Fault(rank, step, phase, action, folder)


def stall_at(rank: int, step: int, phase: str, folder: Path, ranks: int, seconds: float) -> Fault:
    """``rank`` stalls until all others of ``ranks`` have reported.

    These wait for it for so many ``seconds``, once all of them have come to where they wait.
    """

    def stall() -> None:
        await_files(folder, "reported*", ranks - 1)

    def wait_less() -> None:
        await_files(folder, "arrived*", ranks - 1)
        shorten_timeouts(seconds)

    return replace(fail_at(rank, step, phase, stall, folder), others_do=wait_less)


class Kill:
    """The process dies as it does when memory runs out, once ``others`` ranks have arrived where they will wait for it.

    An object that knows the folder of the test, since it is sent to the ranks.
    """

    def __init__(self, folder: Path, others: int = 3) -> None:
        self.folder, self.others = folder, others

    def __call__(self) -> None:
        await_files(self.folder, "arrived*", self.others)
        os.kill(os.getpid(), signal.SIGKILL)


def await_files(folder: Path, pattern: str, count: int) -> None:
    """Waits until ``folder`` has ``count`` files that match ``pattern``."""
    end = time.monotonic() + _MOST_SECONDS
    while len(files := list(folder.glob(pattern))) < count:
        assert time.monotonic() < end, f"of {count} {pattern} there are {[file.name for file in files]}"
        time.sleep(0.01)


def _once(action: Action) -> Action:
    left = [action]
    return lambda: left.pop()() if left else None


def hooked(phase: str, action: Action) -> Any:
    """Patches the one place where ``phase`` happens."""
    if phase in _STARTED:
        return _around_start(phase, action)
    if phase == "making ready":
        return _before(Planner, "confirm", action)
    owner, name = {
        "planning": (LocalPlanner, "plan"),
        "before the agreement": (Agreement, "decide"),
        "warm-up exchange": (dist, "all_to_all_single"),  # of ``prepare()``, in which there is no other
        "orthogonalise": (OrthoBatch, "orthogonalise"),
        "adamw": (muon_step, "adamw_step"),
        "update": (UpdateViews, "apply"),
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
    original, direction, first = Exchange.start, _STARTED[phase], phase.startswith("before")

    def start(self: Exchange, *args: Any, phase: str) -> Any:
        if phase == direction and first:
            action()
        pending = original(self, *args, phase=phase)
        if phase == direction and not first:
            action()
        return pending

    return patch.object(Exchange, "start", start)
