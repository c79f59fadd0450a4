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
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from meshmuon.doctor import DoctorOptions, Session, measurements, run_doctor, runner
from meshmuon.doctor import exchanges as exchange_checks
from meshmuon.execute.ortho_batch import OrthoBatch
from meshmuon.ortho.kernels import BlockedProducts
from meshmuon.transport import swap_with

STALL = 600.0  # seconds: for ever, as far as tests are concerned
DELAY = 0.3  # seconds that the slow link takes longer


def _around(owner: Any, name: str, before: Callable[[], None]) -> Any:
    original = getattr(owner, name)

    def hooked(*args: Any, **options: Any) -> Any:
        before()
        return original(*args, **options)

    return patch.object(owner, name, hooked)


def broken_kernel() -> Any:
    """Symmetric products are 1 % too large."""
    original = BlockedProducts.symmetric

    def symmetric(self: BlockedProducts, *args: Any, **options: Any) -> torch.Tensor:
        return original(self, *args, **options).mul_(1.01)

    return patch.object(BlockedProducts, "symmetric", symmetric)


def dies_in_an_exchange() -> Any:
    return _around(exchange_checks, "_part", lambda: os.kill(os.getpid(), signal.SIGKILL))


def stalls_in_an_exchange() -> Any:
    return _around(exchange_checks, "_part", lambda: time.sleep(STALL))


def stalls_in_a_step() -> Any:
    return _around(OrthoBatch, "orthogonalise", lambda: time.sleep(STALL))


def raises_in_a_step() -> Any:
    def fail() -> None:
        raise ZeroDivisionError("out of luck")

    return _around(exchange_checks, "_part", fail)


def wrong_exchange() -> Any:
    """The last element that arrives is off by one."""
    original = dist.all_to_all_single

    class Spoilt:
        def __init__(self, work: Any, received: torch.Tensor) -> None:
            self.work, self.received = work, received

        def wait(self) -> None:
            self.work.wait()
            self.received[-1:].add_(1)

    def spoilt(received: torch.Tensor, *args: Any, **options: Any) -> Any:
        return Spoilt(original(received, *args, **options), received)

    return patch.object(dist, "all_to_all_single", spoilt)


def slow_link_to(slow_peer: int) -> Any:
    """Messages to ``slow_peer`` take longer."""

    def swap(peer: int, *args: Any) -> None:
        if peer == slow_peer:
            time.sleep(DELAY)
        swap_with(peer, *args)

    return patch.object(measurements, "swap_with", swap)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    **{made.__name__: made for made in (broken_kernel, dies_in_an_exchange, stalls_in_an_exchange, stalls_in_a_step)},
    **{made.__name__: made for made in (raises_in_a_step, wrong_exchange)},
    "slow link to 1": lambda: slow_link_to(1),
    "slow link to 2": lambda: slow_link_to(2),
}


@dataclass(frozen=True)
class Ended:
    """How a doctor ended on a rank, and what it wrote; the report is rank 0's."""

    code: int
    stuck: bool
    text: str
    errors: str
    report: dict[str, Any]

    def status(self, name: str) -> str:
        return self.check(name)["status"]

    def detail(self, name: str) -> str:
        return self.check(name)["detail"]

    def check(self, name: str) -> dict[str, Any]:
        return next(check for check in self.report["checks"] if check["name"] == name)


def doctor_rank(rank: int, folder: Path, faults: dict[int, str], options: DoctorOptions, nodes: tuple[str, ...] = ()) -> Ended:
    """One rank of a doctor in a process group that exists already."""
    world, written = dist.get_world_size(), folder / "report.json"
    store = FileStore(str(folder / "control"), world)
    session = Session(rank, world, store, torch.device("cpu"), nodes[rank] if nodes else "node")
    stream, errors = io.StringIO(), io.StringIO()
    options = replace(options, json_file=written, folder=folder / "checkpoints")
    # Ranks that wait for others look more often, and links are measured less often, so that tests are short.
    hasty = patch.multiple(runner, _SIGN_EVERY=0.15, _FAREWELL=1.0), patch.object(measurements, "_REPEATS", 2)
    with hasty[0], hasty[1], FAULTS[faults.get(rank, "")](), redirect_stderr(errors):
        ending = run_doctor(options, session, stream)
    report = json.loads(written.read_text()) if rank == 0 else {}
    return Ended(ending.code, ending.stuck, stream.getvalue(), errors.getvalue(), report)
