"""What the ranks' agreement costs at every step, in ms: meshmuon's votes beside an all-reduce of gloo, in turns.

An all-reduce of gloo is a ring of 2(W − 1) hops, one after the other, and a gloo group connects every pair of ranks. A vote takes
⌈log2 W⌉ hops over as many connections in each direction. All processes share the cores of this machine, so that the hops of
different ranks do not happen at the same time as they would on a cluster: the figures are upper bounds of both, and their ratio
is what counts.

    python benchmarks/agreement.py
    python benchmarks/agreement.py --processes 2 8 --rounds 50
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common  # first: it sets what torch reads when it starts
import torch
import torch.distributed as dist
from common import COLOURS, Goal, Quartiles, Report, Step, quartiles, race, ratio
from torch._C._distributed_c10d import FileStore

from meshmuon.transport import Agreement, Vote
from meshmuon.transport.collectives import channel_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOTE, RING = "meshmuon's vote", "all-reduce of gloo"
WORDS = 7
VOTES_PER_TURN = 10  # timed together, as barriers take as long as a ring
MOST_OF_RING = 0.5  # a vote ÷ an all-reduce, at 8 processes and more
FROM_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class Point:
    """One number of processes; seconds are those of one agreement on rank 0, waiting included."""

    processes: int
    vote: Quartiles
    ring: Quartiles
    vote_over_ring: Quartiles
    hops: int
    ring_hops: int
    connections: int  # of a rank, for votes
    ring_connections: int  # of a rank: sockets that a gloo group opens


def measured(processes: int, rounds: int) -> Point:
    """Starts the processes, and returns what rank 0 has measured."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "meshmuon"])
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        args = (processes, rounds, Path(folder) / "store", sender)
        ranks = [context.Process(target=rank_main, args=(rank, *args), daemon=True) for rank in range(processes)]
        for process in ranks:
            process.start()
        sender.close()
        votes, rings, hops, connections, gloo_sockets = receiver.recv()
        for process in ranks:
            process.join()
    seconds = quartiles(votes), quartiles(rings), ratio(votes, rings)
    return Point(processes, *seconds, hops, 2 * (processes - 1), connections, gloo_sockets)


def rank_main(rank: int, processes: int, rounds: int, store: Path, results: Any) -> None:
    """One rank: both kinds of agreement in turns, with a barrier before each."""
    torch.set_num_threads(1)
    before = open_sockets()
    files = FileStore(str(store), processes)
    dist.init_process_group("gloo", rank=rank, world_size=processes, store=files, timeout=timedelta(seconds=120))
    group = dist.group.WORLD
    assert group is not None
    gloo_sockets = open_sockets() - before
    agreement, words = Agreement(group), torch.zeros(WORDS, dtype=torch.int64)

    def vote() -> None:
        for _ in range(VOTES_PER_TURN):
            agreement.decide(Vote(5))

    def ring() -> None:
        for _ in range(VOTES_PER_TURN):
            dist.all_reduce(words, dist.ReduceOp.MAX)

    samples = race({VOTE: Step(vote, dist.barrier), RING: Step(ring, dist.barrier)}, rounds, warmups=2)
    channel = channel_of(group)
    assert channel is not None
    if rank == 0:
        votes, rings = ([seconds / VOTES_PER_TURN for seconds in samples[name].wall] for name in (VOTE, RING))
        results.send((votes, rings, channel.connections // 2, channel.connections, gloo_sockets))
    dist.barrier()
    dist.destroy_process_group()


def open_sockets() -> int:
    """How many sockets this process has open."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")
        except OSError:  # the listing's own
            continue
    return count


def show(points: Sequence[Point], report: Report) -> None:
    """The table."""
    columns = ["processes", "hops: vote", "ring", "connections of a rank: vote", "gloo", "vote, ms", "ring, ms", "vote ÷ ring"]
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
        for point in points
    ]
    report.table("Agreement of all ranks, median (quartiles) of rounds", columns, rows)


def plot(points: Sequence[dict[str, Any]], figure: Figure) -> None:
    """Both over the number of processes, from the results as JSON has them."""
    axes = figure.add_subplot()
    processes = [point["processes"] for point in points]
    axes.loglog(processes, [1e3 * point["ring"]["median"] for point in points], "o-", color=COLOURS["others"], label=RING)
    axes.loglog(processes, [1e3 * point["vote"]["median"] for point in points], "o-", color=COLOURS["ours"], label=VOTE)
    axes.set_xticks(processes, [str(count) for count in processes])
    axes.minorticks_off()
    axes.set_xlabel("processes on this machine")
    axes.set_ylabel("ms")
    axes.legend()


def measure(options: argparse.Namespace, report: Report) -> list[Point]:
    rounds = options.rounds or (3 if options.quick else 30)
    return [measured(count, rounds) for count in report.each(options.processes, lambda count: f"{count} processes")]


def goals_of(points: Sequence[Point], options: argparse.Namespace) -> list[Goal]:
    compared = [point.vote_over_ring.median for point in points if point.processes >= FROM_PROCESSES]
    text = f"vote ÷ all-reduce, {FROM_PROCESSES} processes and more"
    return [Goal(text, max(compared, default=None), most=MOST_OF_RING)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, nargs="+", default=None, help="numbers of processes (default 2 4 8 16 32)")


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.processes = options.processes or ([2, 3] if options.quick else [2, 4, 8, 16, 32])


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
    lambda points: [asdict(point) for point in points],
)

if __name__ == "__main__":
    BENCHMARK.main()
