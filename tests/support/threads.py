"""Ranks as threads of this process, over torch's threaded process group: a 16-rank mesh in a fraction of a second."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed.multi_threaded_pg import (
    Collective,
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from meshmuon.transport import groups

T = TypeVar("T")
_isolate_threads: Callable[[bool], None] = _distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]


def run_threads(
    world: int, rank_main: Callable[[int], T], *, timeout: float = 150.0, host_memory: bool = True
) -> list[T]:
    """What ``rank_main(rank)`` returns on each rank; the first exception is raised.

    With ``host_memory=False`` the ranks' groups look as if they could not move host memory, as NCCL's; meshmuon then
    makes gloo groups, whose connections between threads of one process fail about once in a thousand times.
    """
    results: dict[int, T] = {}
    failures: dict[int, BaseException] = {}
    _install_threaded_pg()  # type: ignore[no-untyped-call]
    _isolate_threads(True)
    run = _Runs.begin()
    store = HashStore()
    moves = patch.object(groups, "_moves_host_memory", lambda group: host_memory)
    hook = sys.excepthook  # every init_process_group wraps it

    def main(rank: int) -> None:
        _Runs.enter(run)
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            results[rank] = rank_main(rank)
        except BaseException as error:
            failures[rank] = error
            _Runs.wake_ranks(run)
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
        _Runs.wake_ranks(run)
        for rank in hung:
            threads[rank].join(1.0)
    finally:
        moves.stop()
        _isolate_threads(False)
        _uninstall_threaded_pg()  # type: ignore[no-untyped-call]
        sys.excepthook = hook
    # the other ranks were only woken
    causes = [error for error in failures.values() if not isinstance(error, SystemExit)]
    if causes:
        raise causes[0]  # the first in time, which may have caused the others
    assert not hung, f"ranks {hung} hang"
    return [results[rank] for rank in range(world)]


class _Runs:
    """Keeps threads of an earlier run out of the collectives of a later one.

    torch finds the collective that a rank joins in one table of the process, by the name of the group. Names are the
    same in every run. A rank that outlives its run, because it was computing or waiting elsewhere when the run was
    given up, then joins a collective of the next run in the place of its namesake. Once the namesake joins as well, the
    collective has counted all ranks and works while one of them has yet to bring its data: ``TypeError: 'NoneType'
    object is not subscriptable`` in ``work``. Here such a rank ends at its next collective instead.
    """

    _current: object = None
    _start = ProcessLocalGroup.__dict__["_start_coll"].__func__

    @classmethod
    def begin(cls) -> object:
        """A new run; what earlier ones have left in torch's table is forgotten."""
        cls._current = object()
        ProcessLocalGroup.reset()  # type: ignore[no-untyped-call]
        return cls._current

    @staticmethod
    def enter(run: object) -> None:
        """This thread is a rank of ``run``; its groups know by ``_world`` in which thread they were made."""
        dist.distributed_c10d._world._get_world().run = run  # type: ignore[attr-defined]

    @classmethod
    def wake_ranks(cls, run: object) -> None:
        """Ends the ranks of ``run`` that wait in a collective.

        torch's own ``exception_handle`` goes through the table of collectives while other ranks change it.
        """
        if run is not cls._current:
            return
        ProcessLocalGroup._terminate.set()
        with ProcessLocalGroup._coll_lock:
            waiting: list[Collective] = list(ProcessLocalGroup._cur_coll_on_pgs.values())
        for collective in waiting:
            for condition in (collective._start_cond, collective._done_cond):
                with condition:
                    condition.notify_all()

    @staticmethod
    def start_collective(group_type: type[ProcessLocalGroup], kind: Any, group: Any) -> Collective:
        """In the place of ``ProcessLocalGroup._start_coll``."""
        if group._world().run is not _Runs._current:
            sys.exit("The run of this rank is over.")
        collective: Collective = _Runs._start(group_type, kind, group)
        if collective._data[group._rank] is not None:
            raise RuntimeError(
                f"rank {group._rank} of group {group.pg_name} has left a collective that the others are still in"
            )
        return collective


ProcessLocalGroup._start_coll = classmethod(_Runs.start_collective)  # type: ignore[assignment]

# torch looks the name up in its list of groups, in which those of meshmuon are not.
ProcessLocalGroup._set_group_name = lambda group, name: setattr(group, "given_name", name)  # type: ignore[assignment,method-assign]
ProcessLocalGroup.pg_name = property(lambda group: group.given_name)  # type: ignore[assignment]
