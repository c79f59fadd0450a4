"""Faults that are injected into a rank of a doctor, and ranks that run one. Only for ranks that are processes."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from meshmuon.execute.ortho_batch import OrthoBatch
from meshmuon.ortho.kernels.products import BlockedProducts
from meshmuon.tools.doctor import Context, DoctorOptions, measurements, run_doctor, runner
from meshmuon.tools.doctor import exchanges as exchange_checks
from meshmuon.transport import swap_with
from tests.support.injector import await_files
from tests.support.processes import shorten_timeouts

STALL = 600.0  # seconds: for ever, as far as tests are concerned
PATIENCE = 2.0  # seconds that ranks wait for one that has stalled or died, once it has
DELAY, TICK = 0.3, 0.001  # seconds that the slow link takes longer, and that pass between two looks at the clock

Fault = Callable[[Path], AbstractContextManager[Any]]  # of the folder that the ranks share


def _around(owner: Any, name: str, before: Callable[[], None]) -> Any:
    original = getattr(owner, name)

    def hooked(*args: Any, **options: Any) -> Any:
        before()
        return original(*args, **options)

    return patch.object(owner, name, hooked)


def broken_kernel(folder: Path) -> Any:
    """Symmetric products are 1 % too large."""
    original = BlockedProducts.symmetric

    def symmetric(self: BlockedProducts, *args: Any, **options: Any) -> torch.Tensor:
        return original(self, *args, **options).mul_(1.01)

    return patch.object(BlockedProducts, "symmetric", symmetric)


def dies_in_an_exchange(folder: Path) -> Any:
    def die() -> None:
        (folder / "lost").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    return _around(exchange_checks, "_part", die)


def misses_rank_0(folder: Path) -> Any:
    """Waits for rank 0's verdict only briefly after an error: there is none before rank 0 is dead."""
    return patch.object(runner, "_LATE_VERDICT", PATIENCE)


def _stall(folder: Path) -> None:
    (folder / "lost").touch()
    time.sleep(STALL)


def _miss(folder: Path) -> None:
    """Waits until the other rank has stalled, so that nothing else can be what this rank then waits for in vain."""
    await_files(folder, "lost", 1)
    shorten_timeouts(PATIENCE)


def stalls_in_a_step(folder: Path) -> Any:
    return _around(OrthoBatch, "orthogonalise", lambda: _stall(folder))


def misses_a_rank_in_a_step(folder: Path) -> Any:
    return _around(OrthoBatch, "orthogonalise", lambda: _miss(folder))


def raises_in_a_step(folder: Path) -> Any:
    def fail() -> None:
        raise ZeroDivisionError("out of luck")

    return _around(exchange_checks, "_part", fail)


def wrong_exchange(folder: Path) -> Any:
    """The last element that arrives is off by one."""
    original = dist.all_to_all_single

    class Spoilt:
        def __init__(self, work: Any, received: torch.Tensor) -> None:
            self.work, self.received = work, received

        def wait(self, *timeout: timedelta) -> None:
            self.work.wait(*timeout)
            self.received[-1:].add_(1)

        def is_completed(self) -> bool:
            return bool(self.work.is_completed())

    def spoilt(received: torch.Tensor, *args: Any, **options: Any) -> Any:
        return Spoilt(original(received, *args, **options), received)

    return patch.object(dist, "all_to_all_single", spoilt)


class Clock:
    """Stands in for ``time`` where links are measured: a link takes as long as the test says, whatever the machine
    does.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += TICK
        return self.now

    process_time = perf_counter


def slow_link(peers: frozenset[int] = frozenset()) -> Any:
    """Messages to ``peers`` take longer."""
    clock = Clock()

    def swap(peer: int, *args: Any) -> None:
        clock.now += DELAY if peer in peers else 0.0
        swap_with(peer, *args)

    return patch.multiple(measurements, swap_with=swap, time=clock)


FAULTS: dict[str, Fault] = {
    "": lambda folder: nullcontext(),
    **{
        made.__name__: made
        for made in (broken_kernel, wrong_exchange, raises_in_a_step, dies_in_an_exchange, misses_rank_0)
    },
    **{made.__name__: made for made in (stalls_in_a_step, misses_a_rank_in_a_step)},
    "quick links": lambda folder: slow_link(),
    "slow link to 1": lambda folder: slow_link(frozenset({1})),
    "slow link to 2": lambda folder: slow_link(frozenset({2})),
}


@dataclass(frozen=True)
class Ended:
    """How a doctor ended on a rank, and what it wrote; the report is rank 0's."""

    code: int
    text: str
    errors: str
    report: dict[str, Any]

    def status(self, name: str) -> str:
        return self.check(name)["status"]

    def detail(self, name: str) -> str:
        return self.check(name)["detail"]

    def check(self, name: str) -> dict[str, Any]:
        return next(check for check in self.report["checks"] if check["name"] == name)


def doctor_rank(
    rank: int, folder: Path, faults: dict[int, str], options: DoctorOptions, nodes: tuple[str, ...] = ()
) -> Ended:
    """One rank of a doctor in a process group that exists already."""
    world, written = dist.get_world_size(), folder / "report.json"
    store = FileStore(str(folder / "control"), world)
    stream, errors = io.StringIO(), io.StringIO()
    options = replace(options, json_file=written, folder=folder / "checkpoints")
    context = Context(options, rank, world, store, torch.device("cpu"), nodes[rank] if nodes else "node")
    # Ranks that wait for others look more often, and links are measured less often, so that tests are short. A rank
    # that is only slow must not be taken for dead.
    farewell = 1.0 if "dies_in_an_exchange" in faults.values() else 100.0
    hasty = patch.multiple(
        runner, _LOOK_EVERY=0.05, _AFTER_AN_ERROR=1.5, _FAREWELL=farewell, _LATE_VERDICT=100.0, _LETTING_GO=5.0
    )
    with (
        hasty,
        patch.object(measurements, "_REPEATS", 2),
        FAULTS[faults.get(rank, "")](folder),
        redirect_stderr(errors),
    ):
        code = run_doctor(context, stream)
    report = json.loads(written.read_text()) if rank == 0 else {}
    return Ended(code, stream.getvalue(), errors.getvalue(), report)
