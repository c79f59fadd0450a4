"""How soon ranks hear of one that is lost in the middle of a step: many tries, each on four new processes.

    python -m tests.support.lost_ranks --tries 2000 --beside 4

Process groups have a timeout of half an hour: who does not hear of the loss otherwise is counted as deaf.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from meshmuon.errors import TransportError
from tests.support.injector import hooked
from tests.support.small_model import give_gradients, initial, muon_of, world_mesh

WORLD = 4  # in a ring of four, rank 3 has no connection of its channel to rank 1
HOWS = ("error", "Ctrl-C", "killed", "killed, a fork lives")
PHASES = ("before the gather", "gather", "orthogonalise", "before the scatter", "scatter")
DEAF = 45.0  # seconds after which a rank that has not heard is given up


@dataclass(frozen=True)
class Try:
    """One loss: which rank, how and in which phase of its second step."""

    number: int
    how: str
    phase: str
    lost: int

    @classmethod
    def at_random(cls, number: int) -> Try:
        rng = random.Random(number)
        how = HOWS[number % len(HOWS)]
        # A scheme's own error does not end a step: the rank goes on without the matrix.
        phases = [phase for phase in PHASES if how != "error" or phase != "orthogonalise"]
        return cls(number, how, rng.choice(phases), rng.randrange(WORLD))


@dataclass(frozen=True)
class Outcome:
    """Seconds until the slowest rank has heard, and until all processes have ended; infinite for deaf ones."""

    of: Try
    heard: float
    ended: float
    texts: tuple[str, ...]


def _rank_main(rank: int, this: Try, folder: Path, reports: Connection, end: Connection) -> None:
    torch.set_num_threads(1)
    files = FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=files, timeout=timedelta(minutes=30))
    params = initial(world_mesh())
    optimizer = muon_of(params, chunk_size=1)
    try:
        for step in range(100):
            give_gradients(params, step)
            with ExitStack() as stack:
                if step == 1 and rank == this.lost:
                    stack.enter_context(hooked(this.phase, lambda: _lose(this, reports)))
                optimizer.step()
        text = "no step has failed"
    except (TransportError, ArithmeticError, KeyboardInterrupt) as error:
        text = f"{type(error).__name__}: {error}"
    reports.send((rank, time.monotonic(), text))
    end.poll(None)  # that one ends must not be how the next one hears of it


def _lose(this: Try, reports: Connection) -> None:
    # as a data loader's worker does, which inherits gloo's connections
    if this.how == "killed, a fork lives" and os.fork() == 0:
        time.sleep(DEAF)
        os._exit(0)
    reports.send((this.lost, time.monotonic(), ""))
    if this.how == "error":
        raise ArithmeticError("out of luck")
    if this.how == "Ctrl-C":
        raise KeyboardInterrupt
    os.kill(os.getpid(), signal.SIGKILL)


class _Running:
    """A try under way."""

    def __init__(self, this: Try) -> None:
        context = multiprocessing.get_context("fork")
        self.this = this
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.reports, sender = context.Pipe(duplex=False)
        ended, self._end = context.Pipe(duplex=False)
        args = (this, Path(self._folder.name), sender, ended)
        self._processes = [context.Process(target=_session, args=(rank, *args)) for rank in range(WORLD)]
        for process in self._processes:
            process.start()
        sender.close()
        self._lost_at = 0.0
        self._heard: dict[int, tuple[float, str]] = {}
        self.deadline = time.monotonic() + 2 * DEAF

    def outcome(self, *, late: bool) -> Outcome | None:
        """Reads what there is; the outcome once all ranks have heard, or if it is too ``late``."""
        while self.reports.poll():
            try:
                rank, moment, text = self.reports.recv()
            except EOFError:  # all have ended without a word
                break
            if text:
                self._heard[rank] = moment, text
            else:
                self._lost_at, self.deadline = moment, moment + DEAF
        others = {rank: heard for rank, heard in self._heard.items() if rank != self.this.lost}
        if len(others) < WORLD - 1 and not late:
            return None
        complete = len(others) == WORLD - 1 and all(text.startswith("TransportError") for _, text in others.values())
        heard = max(moment for moment, _ in others.values()) - self._lost_at if complete else float("inf")
        return Outcome(
            self.this, heard, self._finish(), tuple(f"rank {rank}: {text}" for rank, (_, text) in self._heard.items())
        )

    def _finish(self) -> float:
        begun = time.monotonic()
        self._end.send(None)
        # Not ``join``, which waits for the end of forks as well.
        while (
            hung := any(process.exitcode is None for process in self._processes)
        ) and time.monotonic() < begun + 15.0:
            time.sleep(0.01)
        for process in self._processes:  # each began a session of its own, to which its forks belong
            try:
                os.killpg(process.pid or 0, signal.SIGKILL)
            except ProcessLookupError:
                continue
            finally:
                process.join()
        self._folder.cleanup()
        return float("inf") if hung else time.monotonic() - begun


def _session(rank: int, *args: Any) -> None:
    os.setsid()
    _rank_main(rank, *args)
    dist.destroy_process_group()


def _warm_up() -> None:
    """A step of one rank: forks then need not import what it imports. Of several, torch would remember this one's
    shards.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    params = initial(world_mesh())
    give_gradients(params, 0)
    muon_of(params, chunk_size=1).step()
    dist.destroy_process_group()


def run_tries(numbers: range, beside: int, tell: Callable[[Outcome], None]) -> None:
    """Runs the tries, some beside each other, in forks of this process, which must not have any threads."""
    _warm_up()
    gc.freeze()
    left = list(reversed(numbers))
    running: list[_Running] = []
    while left or running:
        while left and len(running) < beside:
            running.append(_Running(Try.at_random(left.pop())))
        wait([one.reports for one in running], 0.2)
        for one in list(running):
            outcome = one.outcome(late=time.monotonic() > one.deadline)
            if outcome is not None:
                running.remove(one)
                tell(outcome)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=40)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first try; a number always gives the same loss"
    )
    parser.add_argument("--beside", type=int, default=2, help="tries at the same time")
    options = parser.parse_args()
    outcomes: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if outcome.heard > 5.0 or outcome.ended > 5.0:
            print(outcome, flush=True)
        if len(outcomes) % 50 == 0 or len(outcomes) == options.tries:
            for how in HOWS:
                of_kind = [one for one in outcomes if one.of.how == how]
                heard = sorted(one.heard for one in of_kind)
                if heard:
                    in_time, ended = sum(seconds <= 5.0 for seconds in heard), max(one.ended for one in of_kind)
                    middle = heard[len(heard) // 2]
                    print(
                        f"{len(outcomes):5d} tries, {how}: {in_time} of {len(heard)} heard within 5 s, median "
                        f"{middle:.2f} s, slowest {heard[-1]:.2f} s, last process ended {ended:.2f} s later",
                        flush=True,
                    )

    run_tries(range(options.first, options.first + options.tries), options.beside, tell)


if __name__ == "__main__":
    main()
