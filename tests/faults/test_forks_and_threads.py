"""Steps in a fork of the process, and in other threads than the one that built the optimizer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshmuon import DistMuon, MaxLogits, clip_grad_norm_
from meshmuon.errors import TransportError
from tests.support.processes import results_of, run_ranks
from tests.support.small_model import after, assert_equal, give_gradients, initial, muon_of, run_steps, world_mesh
from tests.support.tensors import local, seeded


def in_fork(folder: Path, work: Callable[[], str]) -> str:
    """What ``work`` returns in a forked child, which ends after that."""
    child = os.fork()
    if child == 0:
        try:
            text = work()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        (folder / f"fork{os.getpid()}").write_text(text)
        os._exit(0)
    end = time.monotonic() + 100
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return "hangs"
        time.sleep(0.01)
    return (folder / f"fork{child}").read_text()


def forked_alone(rank: int, folder: Path) -> str:
    """One process: the child goes on with its copy, the parent with its own."""
    params = initial(None)
    optimizer = muon_of(params)
    run_steps(params, optimizer, range(2))

    def child() -> str:
        run_steps(params, optimizer, range(2, 4))
        assert_equal(params, after(4))
        return "right"

    text = in_fork(folder, child)
    assert_equal(params, after(2))
    run_steps(params, optimizer, range(2, 5))
    assert_equal(params, after(5))
    return text


def test_fork_of_a_single_process(tmp_path: Path) -> None:
    assert results_of(run_ranks(1, forked_alone, tmp_path)) == ["right"]


def forked_rank(rank: int, folder: Path, started: int, divided: bool) -> str:
    """One of two ranks: the child has no connections, and says so at once; the parents go on."""
    params = [nn.Parameter(seeded((6, 4), k)) for k in range(3)] if divided else initial(world_mesh())
    optimizer = DistMuon(params) if divided else muon_of(params)
    run_steps(params, optimizer, range(started))

    def child() -> str:
        before = [local(param) for param in params]
        give_gradients(params, started)
        with pytest.raises(TransportError) as caught:
            optimizer.step()
        assert all(torch.equal(local(param), old) for param, old in zip(params, before, strict=True))
        return str(caught.value)

    text = in_fork(folder, child)
    run_steps(params, optimizer, range(started, 4))
    if not divided:
        assert_equal(params, after(4))
    return text


@pytest.mark.parametrize("divided", [False, True], ids=["Muon", "DistMuon"])
@pytest.mark.parametrize("started", [0, 2], ids=["before the first step", "later"])
def test_fork_of_a_rank(started: int, divided: bool, tmp_path: Path) -> None:
    for text in results_of(run_ranks(2, forked_rank, tmp_path, started, divided)):
        assert "is a fork of process" in text
        assert "in the agreement of a step" in text


def threaded_rank(rank: int, folder: Path, fresh: bool) -> None:
    """Built here, stepped elsewhere: in one other thread, or in a new one for every step."""
    mesh = world_mesh()
    params = initial(mesh)
    optimizer = muon_of(params)
    failures: list[BaseException] = []

    def run(first: int, last: int) -> None:
        try:
            run_steps(params, optimizer, range(first, last))
        except BaseException as error:
            failures.append(error)

    for first, last in ((step, step + 1) for step in range(4)) if fresh else [(0, 4)]:
        thread = threading.Thread(target=run, args=(first, last))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    assert not failures, failures
    assert_equal(params, after(4))


@pytest.mark.parametrize("fresh", [False, True], ids=["one thread", "a thread per step"])
@pytest.mark.parametrize("world", [1, 2])
def test_steps_in_another_thread(world: int, fresh: bool, tmp_path: Path) -> None:
    results_of(run_ranks(world, threaded_rank, tmp_path, fresh))


def clips(rank: int) -> Callable[[], float]:
    params = initial(world_mesh())
    give_gradients(params, 0)
    return lambda: clip_grad_norm_(params, 1.0).item()


def collects(rank: int) -> Callable[[], float]:
    logits = MaxLogits(group=dist.group.WORLD)

    def collect() -> float:
        with logits.collecting():
            logits.observe_scores(0, torch.full((1, 1, 2), float(rank)))
        return logits.collect()[0].item()

    return collect


def consolidates(rank: int) -> Callable[[], float]:
    params = [nn.Parameter(seeded((6, 4), k)) for k in range(3)]
    optimizer = DistMuon(params)
    run_steps(params, optimizer, range(1))

    def consolidate() -> float:
        optimizer.consolidate()
        entries = optimizer.state_dict()["state"].values()
        return sum(entry["momentum_buffer"].norm().item() for entry in entries)

    return consolidate


def rank_of_two_threads(rank: int, folder: Path, prepare: Callable[[int], Callable[[], float]]) -> list[float]:
    """In the middle of a step, a second thread calls something over the same group."""
    call = prepare(rank)
    found = [call()]  # in the thread of the steps: all connections are there
    second = threading.Thread(target=lambda: found.append(call()))

    def scheme(matrices: torch.Tensor) -> torch.Tensor:
        if second.ident is None:
            second.start()
            second.join(1)
            assert second.is_alive(), "it has not waited for the end of the step"
        return matrices

    params = initial(world_mesh())
    optimizer = muon_of(params, scheme=scheme)
    run_steps(params, optimizer, range(1))
    second.join(100)
    run_steps(params, optimizer, range(1, 2))
    return found


@pytest.mark.parametrize("prepare", [clips, collects, consolidates])
def test_what_communicates_takes_turns_with_steps(
    prepare: Callable[[int], Callable[[], float]], tmp_path: Path
) -> None:
    (first, second), other = results_of(run_ranks(2, rank_of_two_threads, tmp_path, prepare))
    assert other == [first, second]
