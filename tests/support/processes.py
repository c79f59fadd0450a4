"""Ranks as real processes, over gloo or another back end, forked from a server that has imported torch and has done
nothing else.

``run_ranks`` runs one function on all ranks. ``JobRanks`` keeps the same processes for a list of jobs, each in a
process group of its own. Seconds only bound how long a rank may hang: a quiet machine needs a small part of them.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from . import nccl_like
from .units import without_bfloat16_units

_PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "pytest",
    "hypothesis",
    __name__,
]

RankMain = Callable[..., Any]
GROUP_TIMEOUT = 150.0  # seconds; no test that passes waits for it


def fork_server() -> ForkServerContext:
    """Processes of this context are forked from a server that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def join_group(rank: int, world: int, store: Path, backend: str = "gloo") -> None:
    """Returns once all ranks have joined: one that left before would close connections that another is still making."""
    files, timeout = FileStore(str(store), world), timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group(backend, rank=rank, world_size=world, store=files, timeout=timeout)
    if backend == nccl_like.NAME:
        nccl_like.bind_device()
    files.set(f"joined {rank}", "")
    files.wait([f"joined {other}" for other in range(world)], timeout)


def shorten_timeouts(seconds: float) -> None:
    """All process groups of this rank wait so long from now on.

    Tests whose ranks must time out start with ``GROUP_TIMEOUT`` and call this once nothing but the fault can make them
    wait: how fast a machine is then decides nothing.
    """
    known: dict[Any, Any] = dist.distributed_c10d._world.pg_group_ranks
    # torch also notes groups without this rank
    for group in (key for key in known if isinstance(key, dist.ProcessGroup)):
        group._get_backend(group._device_types[0])._set_default_timeout(timedelta(seconds=seconds))


# One function on all ranks.


@dataclass(frozen=True)
class RankOutcome:
    """How a rank ended: with what its function returned, or in trouble: a traceback, "killed" or "hangs"."""

    result: Any = None
    trouble: str = ""


def run_ranks(
    world: int, main: RankMain, folder: Path, *args: Any, backend: str = "gloo", seconds: float = 240.0
) -> list[RankOutcome]:
    """Runs ``main(rank, folder, *args)`` on ``world`` ranks of one process group.

    Args:
        world: number of ranks.
        main: a function of a module; ``torch.save`` must be able to store its result.
        folder: an empty folder that the ranks share.
        args: further arguments of ``main``.
        backend: of the process group.
        seconds: a rank that is still running after this time hangs.
    """
    context = fork_server()
    processes = [
        context.Process(target=_rank_main, args=(rank, world, main, folder, backend, args), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hung = [process.is_alive() for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return [RankOutcome(trouble="hangs") if hung[rank] else _read(folder / f"rank{rank}.pt") for rank in range(world)]


def _rank_main(rank: int, world: int, main: RankMain, folder: Path, backend: str, args: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    without_bfloat16_units()
    try:
        join_group(rank, world, folder / "store", backend)
        outcome = RankOutcome(result=main(rank, folder, *args))
    except BaseException:
        outcome = RankOutcome(trouble=traceback.format_exc())
    torch.save(outcome, folder / f"rank{rank}.new")
    (folder / f"rank{rank}.new").rename(folder / f"rank{rank}.pt")


def _read(path: Path) -> RankOutcome:
    outcome: RankOutcome = torch.load(path, weights_only=False) if path.exists() else RankOutcome(trouble="killed")
    return outcome


def results_of(outcomes: Sequence[RankOutcome]) -> list[Any]:
    """What all ranks returned; none may be in trouble."""
    trouble = {rank: outcome.trouble for rank, outcome in enumerate(outcomes) if outcome.trouble}
    assert not trouble, "\n".join(f"rank {rank}: {text}" for rank, text in trouble.items())
    return [outcome.result for outcome in outcomes]


# A list of jobs on the same processes.


@dataclass(frozen=True)
class Job:
    """``run(folder)`` on the first ``world`` ranks, in a process group of their own; all jobs share the folder."""

    world: int
    run: Callable[[Path], object]
    backend: str = "gloo"


class JobRanks:
    """Processes that work through jobs in order, while tests already ask for the first results.

    Args:
        jobs: a function of a module that lists the jobs; every process calls it.
        names: which of the jobs to run.
        folder: an empty folder that the ranks share.
    """

    def __init__(self, jobs: Callable[[], Mapping[str, Job]], names: Sequence[str], folder: Path) -> None:
        self._jobs = jobs()
        world = max(self._jobs[name].world for name in names)
        context = fork_server()
        self._together = context.Barrier(world)  # lives as long as this object
        self._texts: list[dict[str, str]] = [{} for _ in range(world)]
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            args = (rank, jobs, tuple(names), folder, self._together, sender)
            process = context.Process(target=_job_rank_main, args=args, daemon=True)
            process.start()
            sender.close()  # the process's own is left, and ends with it
            self._pipes.append(receiver)
            self._processes.append(process)

    def texts(self, name: str, *, seconds: float = 240.0) -> list[str]:
        """What each rank says of a job: nothing when it passed, else what went wrong."""
        return [self._text(rank, name, seconds) for rank in range(self._jobs[name].world)]

    def _text(self, rank: int, name: str, seconds: float) -> str:
        texts, pipe = self._texts[rank], self._pipes[rank]
        while name not in texts:
            if not pipe.poll(seconds):
                return "hangs"
            try:
                finished, text = pipe.recv()
            except EOFError:
                return "the process has died"
            texts[finished] = text
        return texts[name]

    def check(self, name: str) -> None:
        """Demands that all ranks passed a job."""
        texts = {rank: text for rank, text in enumerate(self.texts(name)) if text}
        assert not texts, "\n".join(f"rank {rank}: {text}" for rank, text in texts.items())

    def stop(self) -> None:
        """Ends all processes."""
        for process in self._processes:
            process.kill()
            process.join()


def job_ranks(jobs: Callable[[], Mapping[str, Job]], names: Sequence[str]) -> Any:
    """A fixture of a module: processes that work through these jobs, which end with the module's last test."""

    @pytest.fixture(scope="module")
    def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobRanks]:
        started = JobRanks(jobs, names, tmp_path_factory.mktemp("ranks"))
        yield started
        started.stop()

    return ranks


def _job_rank_main(
    rank: int,
    jobs: Callable[[], Mapping[str, Job]],
    names: Sequence[str],
    folder: Path,
    together: Any,
    answers: Connection,
) -> None:
    torch.set_num_threads(1)
    without_bfloat16_units()
    listed = jobs()
    for number, name in enumerate(names):
        together.wait()
        if rank < listed[name].world:
            answers.send((name, _trouble_of(listed[name], rank, folder, folder / f"store{number}")))


def _trouble_of(job: Job, rank: int, folder: Path, store: Path) -> str:
    """What went wrong in a job on this rank, or nothing."""
    try:
        join_group(rank, job.world, store, job.backend)
        job.run(folder)
        if job.backend == nccl_like.NAME:
            nccl_like.compare_histories()
    except BaseException:
        return traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return ""
