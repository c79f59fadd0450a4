"""Ranks as threads of this process, over torch's threaded process group: a 16-rank mesh in a fraction of a second."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    ThreadLocalWorld,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from meshmuon.transport import groups

T = TypeVar("T")

if not hasattr(ThreadLocalWorld, "comms"):  # torch 2.11 forgot it, and cannot destroy its threaded groups without
    ThreadLocalWorld.comms = property(lambda world: [])  # type: ignore[attr-defined]
if not torch.cuda.is_available():
    # CUDA builds of torch 2.11 keep something of the thread that first does this, and crash once that thread is gone.
    with FakeTensorMode():
        pass


def run_threads(world: int, rank_main: Callable[[int], T], *, timeout: float = 150.0, host_memory: bool = True) -> list[T]:
    """What ``rank_main(rank)`` returns on each rank; the first exception is raised.

    With ``host_memory=False`` the ranks' groups look as if they could not move host memory, as NCCL's; meshmuon then makes gloo
    groups, whose connections between threads of one process fail about once in a thousand times.
    """
    try:
        return _run_once(world, rank_main, timeout, host_memory)
    except TypeError as error:
        if not _is_torchs_own(error):
            raise
        return _run_once(world, rank_main, timeout, host_memory)


def _is_torchs_own(error: TypeError) -> bool:
    """Once in some ten thousand collectives torch's threaded group works before all ranks have put their data down."""
    frames = traceback.extract_tb(error.__traceback__)
    return "NoneType" in str(error) and frames[-1].filename.endswith("multi_threaded_pg.py") and frames[-1].name == "work"


def _run_once(world: int, rank_main: Callable[[int], T], timeout: float, host_memory: bool) -> list[T]:
    results: dict[int, T] = {}
    failures: dict[int, BaseException] = {}
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    ProcessLocalGroup.reset()
    store = dist.HashStore()
    moves = patch.object(groups, "_moves_host_memory", lambda group: host_memory)
    hook = sys.excepthook  # every init_process_group wraps it

    def main(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            results[rank] = rank_main(rank)
        except BaseException as error:
            failures[rank] = error
            ProcessLocalGroup.exception_handle(error)  # wakes the ranks that wait for this one
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(world)]
    moves.start()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        ProcessLocalGroup.exception_handle(RuntimeError("the test is over"))  # ends the ranks that hang
        for rank in hung:
            threads[rank].join(1.0)
    finally:
        moves.stop()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _uninstall_threaded_pg()
        sys.excepthook = hook
    shown = [error for error in failures.values() if not isinstance(error, SystemExit)]  # the others were only woken
    if shown:
        raise shown[0]  # the first in time, which may have caused the others
    assert not hung, f"ranks {hung} hang"
    return [results[rank] for rank in range(world)]
