"""Ranks as processes that stay between cases: each is sent to as many as it needs, in a process group of its own."""

from __future__ import annotations

import io
import itertools
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import nccl_like
from tests.support.processes import fork_server, join_group

_SECONDS = 200.0  # for a case; what passes needs less than one
_AFTER_AN_ERROR = 20.0  # in which the other ranks may tell theirs, too


class Ranks:
    """Processes that are started when they are first needed."""

    def __init__(self) -> None:
        self._processes: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = itertools.count()

    def run(self, world: int, main: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
        """What ``main(*args)`` returns on each of ``world`` ranks."""
        while len(self._processes) < world:
            self._start()
        store = Path(self._folder.name) / f"store{next(self._numbers)}"
        for rank in range(world):
            self._processes[rank][1].send((rank, world, store, backend, main, args))
        answers: dict[int, tuple[str, Any]] = {}
        end = time.monotonic() + _SECONDS
        while len(answers) < world and time.monotonic() < end:
            for rank in set(range(world)) - set(answers):
                if self._processes[rank][1].poll(0.001):
                    answers[rank] = self._answer(rank)
                    if answers[rank][0]:
                        end = min(end, time.monotonic() + _AFTER_AN_ERROR)
        if len(answers) < world or any(trouble for trouble, _ in answers.values()):
            self.stop()  # some may wait in a collective for ever
        texts = [f"rank {rank}: {answers[rank][0] if rank in answers else 'waits'}" for rank in range(world)]
        assert all(rank in answers and not answers[rank][0] for rank in range(world)), "\n".join(texts)
        return [answers[rank][1] for rank in range(world)]

    def _answer(self, rank: int) -> tuple[str, Any]:
        try:
            trouble, content = self._processes[rank][1].recv()
        except EOFError:
            return "the process has died", None
        return trouble, None if trouble else torch.load(io.BytesIO(content), weights_only=False)

    def _start(self) -> None:
        context = fork_server()
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._processes.append((process, ours))

    def stop(self) -> None:
        for process, _ in self._processes:
            process.kill()
            process.join()
        self._processes.clear()


def _main(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            rank, world, store, backend, main, args = pipe.recv()
        except EOFError:
            return
        pipe.send(_result(rank, world, store, backend, main, args))


def _result(rank: int, world: int, store: Path, backend: str, main: Callable[..., Any], args: Any) -> tuple[str, bytes]:
    try:
        join_group(rank, world, store, backend)
        content = io.BytesIO()
        torch.save(main(*args), content)
        if backend == nccl_like.NAME:
            nccl_like.compare_histories()
        dist.barrier()  # who leaves earlier closes connections that others still use
    except BaseException:
        return traceback.format_exc(), b""
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "", content.getvalue()
