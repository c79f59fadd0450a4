"""What the ranks' agreement costs at every step, in ms: meshmuon's votes beside an all-reduce of gloo, in turns.

An all-reduce of gloo is a ring of 2(W − 1) hops, one after the other, and a gloo group connects every pair of ranks. A
vote takes ⌈log2 W⌉ hops over as many connections in each direction. All processes share the cores of this machine, so
that the hops of different ranks do not happen at the same time as they would on a cluster: the figures are upper bounds
of both, and their ratio is what counts.

A thread of the same process that computes in Python holds the interpreter lock, which a vote needs at every hop. The
second table has such threads beside the votes, which take place with ``PromptSwitches`` (as in a step) and without it,
in turns.

    python benchmarks/agreement.py
    python benchmarks/agreement.py --processes 2 8 --rounds 50
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import common  # first: it sets what torch reads when it starts
import torch
import torch.distributed as dist
from common import COLOURS, Goal, Quartiles, Report, Step, quartiles, race, ratio
from torch._C._distributed_c10d import FileStore

from meshmuon.transport import Agreement, Vote, host_channel
from meshmuon.transport.collectives import channel_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOTE, RING, PATIENT = "meshmuon's vote", "all-reduce of gloo", "the vote without prompt switches"
WORDS = 7
VOTES_PER_TURN = 10  # timed together, as barriers take as long as a ring
MOST_OF_RING = 0.5  # a vote ÷ an all-reduce, at 8 processes and more
FROM_PROCESSES = 8
HOPS = 12  # of a vote beside busy threads, as among 4,096 ranks: two processes tell each other as often
LATE_SECONDS = 5e-3  # after which the last rank votes: the lock of the others is with their busy threads by then
MOST_MS_PER_HOP = 1.0  # beside busy threads


@dataclass(frozen=True, slots=True)
class Point:
    """One number of processes; seconds are those of one agreement on the last rank, waiting included."""

    processes: int
    vote: Quartiles
    ring: Quartiles
    vote_over_ring: Quartiles
    hops: int
    ring_hops: int
    connections: int  # of a rank, for votes
    ring_connections: int  # of a rank: sockets that a gloo group opens


@dataclass(frozen=True, slots=True)
class BusyPoint:
    """One number of busy threads in each of two processes; seconds are those of one hop on the last rank, waiting
    included.
    """

    threads: int
    hop: Quartiles
    hop_without_switches: Quartiles


@dataclass(frozen=True, slots=True)
class Results:
    """Both tables."""

    points: list[Point]
    beside_threads: list[BusyPoint]


def on_ranks(processes: int, main: Callable[..., Any], *args: Any) -> Any:
    """Calls ``main(group, *args)`` on all ranks, and returns what the last one has measured, with its connections."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "meshmuon"])
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        ranks = [
            context.Process(target=rank_main, args=(rank, processes, store, main, args, sender), daemon=True)
            for rank in range(processes)
        ]
        for process in ranks:
            process.start()
        sender.close()
        sent = receiver.recv()
        for process in ranks:
            process.join()
    return sent


def rank_main(
    rank: int, processes: int, store: Path, main: Callable[..., Any], args: Sequence[Any], results: Any
) -> None:
    torch.set_num_threads(1)
    before = open_sockets()
    files = FileStore(str(store), processes)
    dist.init_process_group("gloo", rank=rank, world_size=processes, store=files, timeout=timedelta(seconds=120))
    group = dist.group.WORLD
    assert group is not None
    gloo_sockets = open_sockets() - before
    found = main(group, *args)
    channel = channel_of(group)
    assert channel is not None
    if rank == processes - 1:
        results.send((found, channel.connections, gloo_sockets))
    dist.barrier()
    dist.destroy_process_group()


def measured(processes: int, rounds: int) -> Point:
    (votes, rings), connections, gloo_sockets = on_ranks(processes, vote_and_ring, rounds)
    seconds = quartiles(votes), quartiles(rings), ratio(votes, rings)
    return Point(processes, *seconds, connections // 2, 2 * (processes - 1), connections, gloo_sockets)


def measured_beside(threads: int, rounds: int) -> BusyPoint:
    (prompt, patient), _, _ = on_ranks(2, votes_beside_threads, threads, rounds)
    return BusyPoint(threads, quartiles(prompt), quartiles(patient))


def vote_and_ring(group: dist.ProcessGroup, rounds: int) -> list[list[float]]:
    """Seconds of both kinds of agreement, in turns, with a barrier before each."""
    agreement, words = Agreement(group), torch.zeros(WORDS, dtype=torch.int64)
    contenders = {VOTE: lambda: agreement.decide(Vote(5)), RING: lambda: dist.all_reduce(words, dist.ReduceOp.MAX)}

    def repeated(agree: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(VOTES_PER_TURN):
                agree()

        return run

    samples = race({name: Step(repeated(agree), dist.barrier) for name, agree in contenders.items()}, rounds, warmups=2)
    return [[seconds / VOTES_PER_TURN for seconds in samples[name].wall] for name in contenders]


def votes_beside_threads(group: dist.ProcessGroup, threads: int, rounds: int) -> list[list[float]]:
    """Seconds of votes with and without prompt switches, in turns, while threads of every process compute."""
    agreement, channel = Agreement(group), channel_of(group)
    assert channel is not None
    channel._rounds = HOPS * channel._rounds

    def vote() -> object:
        return agreement.decide(Vote(5))

    def vote_without_switches() -> None:
        with patch.object(host_channel, "prompt_switches", nullcontext()):
            vote()

    def arrive() -> None:
        vote()  # a barrier
        if dist.get_rank(group) == 1:
            time.sleep(LATE_SECONDS)

    with busy(threads):
        samples = race({VOTE: Step(vote, arrive), PATIENT: Step(vote_without_switches, arrive)}, rounds, warmups=2)
    return [[seconds / HOPS for seconds in samples[name].wall] for name in (VOTE, PATIENT)]


@contextmanager
def busy(threads: int) -> Iterator[None]:
    """Threads that do nothing but compute in Python, as a data loader or a logger may."""
    done = threading.Event()

    def compute() -> None:
        count = 0
        while not done.is_set():
            count += sum(range(100))

    started = [threading.Thread(target=compute) for _ in range(threads)]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in started:
            thread.join()


def open_sockets() -> int:
    """How many sockets this process has open."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")
        except OSError:  # the listing's own
            continue
    return count


def show(results: Results, report: Report) -> None:
    columns = [
        "processes",
        "hops: vote",
        "ring",
        "connections of a rank: vote",
        "gloo",
        "vote, ms",
        "ring, ms",
        "vote ÷ ring",
    ]
    rows = [
        (
            str(point.processes),
            str(point.hops),
            str(point.ring_hops),
            str(point.connections),
            str(point.ring_connections),
            point.vote.text(1e3, 2),
            point.ring.text(1e3, 2),
            point.vote_over_ring.text(1.0, 3),
        )
        for point in results.points
    ]
    report.table("Agreement of all ranks, median (quartiles) of rounds", columns, rows)
    columns = ["busy threads per process", "a hop, ms", "without prompt switches, ms"]
    busy_rows = [
        (str(point.threads), point.hop.text(1e3, 3), point.hop_without_switches.text(1e3, 3))
        for point in results.beside_threads
    ]
    report.table("A hop of the vote beside threads that compute in Python, two processes", columns, busy_rows)


def plot(results: dict[str, Any], figure: Figure) -> None:
    """Votes and rings over the number of processes, from the results as JSON has them."""
    axes, points = figure.add_subplot(), results["points"]
    processes = [point["processes"] for point in points]
    axes.loglog(
        processes, [1e3 * point["ring"]["median"] for point in points], "o-", color=COLOURS["others"], label=RING
    )
    axes.loglog(processes, [1e3 * point["vote"]["median"] for point in points], "o-", color=COLOURS["ours"], label=VOTE)
    axes.set_xticks(processes, [str(count) for count in processes])
    axes.minorticks_off()
    axes.set_xlabel("processes on this machine")
    axes.set_ylabel("ms")
    axes.legend()


def measure(options: argparse.Namespace, report: Report) -> Results:
    rounds = options.rounds or (3 if options.quick else 30)
    points = [measured(count, rounds) for count in report.each(options.processes, lambda count: f"{count} processes")]
    beside = [
        measured_beside(count, rounds)
        for count in report.each(options.busy_threads, lambda count: f"{count} busy threads")
    ]
    return Results(points, beside)


def goals_of(results: Results, options: argparse.Namespace) -> list[Goal]:
    compared = [point.vote_over_ring.median for point in results.points if point.processes >= FROM_PROCESSES]
    return [
        Goal(f"vote ÷ all-reduce, {FROM_PROCESSES} processes and more", max(compared, default=None), most=MOST_OF_RING),
        *(
            Goal(
                f"ms of a hop, busy threads per process: {point.threads}", 1e3 * point.hop.median, most=MOST_MS_PER_HOP
            )
            for point in results.beside_threads
        ),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes", type=int, nargs="+", default=None, help="numbers of processes (default 2 4 8 16 32)"
    )
    parser.add_argument(
        "--busy-threads", type=int, nargs="+", default=None, help="numbers of busy threads (default 0 1 4)"
    )


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.processes = options.processes or ([2, 3] if options.quick else [2, 4, 8, 16, 32])
    options.busy_threads = options.busy_threads or ([1] if options.quick else [0, 1, 4])


BENCHMARK = common.Benchmark(
    "agreement",
    __doc__,
    measure,
    show,
    goals_of,
    plot,
    (7.0, 4.0),
    add_options,
    settle_options,
    asdict,
)

if __name__ == "__main__":
    BENCHMARK.main()
