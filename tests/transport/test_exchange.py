"""Exchanges, agreements and groups between ranks that are threads of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from meshmuon.transport import Agreement, Exchange, Vote, broadcast, exchange_group, failures, groups
from meshmuon.transport.collectives import channel_of
from tests.support.threads import run_threads


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def test_splits_are_in_the_order_of_the_group() -> None:
    """Ranks are global numbers; a group of some of them counts from zero."""

    def main(rank: int) -> None:
        group = dist.new_group([1, 3])
        if rank in (1, 3):
            exchange = Exchange(group)
            assert exchange.splits({3: 5, 1: 2}) == [2, 5]
            other = 4 - rank
            received = torch.zeros(other)
            splits = [exchange.splits({other: count}) for count in (other, rank)]
            exchange.start(received, splits[0], torch.full((rank,), float(rank)), splits[1], phase="gather").wait()
            assert received.tolist() == [float(other)] * other

    run_threads(4, main)


LARGEST = 2**60 - 1


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((5, 5, 5), True),
        ((0, 0, 0), True),
        ((LARGEST, LARGEST, LARGEST), True),
        ((-1, -1, -1), True),
        ((5, 5, 6), False),
        ((6, 5, 5), False),
        ((5, 6, 5), False),
        ((0, LARGEST, 0), False),
        ((LARGEST - 1, LARGEST, LARGEST), False),
        ((7, -1, 7), False),
        ((-1, 0, 0), False),
    ],
)
def test_agreement(numbers: tuple[int, ...], expected: bool) -> None:
    def main(rank: int) -> bool:
        return Agreement(world()).decide(Vote(numbers[rank])).unanimous

    assert run_threads(3, main) == [expected] * 3


@pytest.mark.parametrize("flag", ["prepares", "nonfinite", "has_work"])
@pytest.mark.parametrize(
    "said", [(False, False, False), (False, True, False), (True, True, True), (False, False, True)]
)
def test_what_any_rank_says_all_hear(flag: str, said: tuple[bool, ...]) -> None:
    others = {"prepares": False, "nonfinite": False, "has_work": False}

    def main(rank: int) -> Vote:
        agreement = Agreement(world())
        agreement.decide(Vote(3, True, True, True))  # nothing of it is left afterwards
        return agreement.decide(Vote(5, **{**others, flag: said[rank]}))

    assert run_threads(3, main) == [Vote(5, **{**others, flag: any(said)})] * 3


def test_everyone_of_a_group() -> None:
    def main(rank: int) -> dict[int, int] | None:
        group = dist.new_group([0, 2])
        return Agreement(group).all_gather_objects(10 * rank) if rank != 1 else None

    assert run_threads(3, main) == [{0: 0, 2: 20}, None, {0: 0, 2: 20}]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """New groups as they are asked for, by any rank."""
    asked: list[list[int]] = []
    original = groups._new_group

    def record(ranks: Any) -> dist.ProcessGroup:
        asked.append(list(ranks))
        return original(ranks)

    monkeypatch.setattr(groups, "_new_group", record)
    return asked


def test_a_group_that_exists_is_used(made: list[Any]) -> None:
    """The first of several that fit, or else the default group."""

    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        mine, other, again = mesh["shard"].get_group(), mesh["replica"].get_group(), dist.new_group([0, 1])
        assert exchange_group(dist.get_process_group_ranks(mine), [other, mine]) is mine
        assert exchange_group(dist.get_process_group_ranks(other), [other, mine]) is other
        if rank < 2:
            assert exchange_group([0, 1], [again, mine]) is again
        assert exchange_group(range(4), [mine]) is world()

    run_threads(4, main)
    assert made == []


def test_a_group_of_fewer_or_more_ranks_is_none(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by its members alone: the third rank, such as another pipeline stage, does not call."""
    asked: list[tuple[Any, ...]] = []

    def new_group(name: str, *options: Any) -> dist.ProcessGroup:
        asked.append(options)
        return world()

    monkeypatch.setattr(groups, "new_named_group", new_group)
    monkeypatch.setattr(groups, "_made", {})  # it would keep the world, which is not its group

    def main(rank: int) -> None:
        if rank < 2:
            exchange_group((0, 1), [world()])

    run_threads(3, main)
    assert made == [[0, 1]] * 2
    assert asked == [((0, 1), None)] * 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_groups_that_do_not_take_host_memory_need_no_other_group(ranks: int, made: list[Any]) -> None:
    """As NCCL's: the ranks find each other once for all who use the group, and share the connections."""

    def main(rank: int) -> list[Any]:
        first, second = Agreement(world()), Agreement(world())
        verdicts = [
            agreement.decide(Vote(7, activity=rank, nonfinite=rank == 0)) for agreement in (first, second, first)
        ]
        channel = channel_of(world())
        assert channel is channel_of(world())
        assert channel is not None
        assert channel.connections == 2 * (ranks - 1).bit_length()
        return [verdicts, second.all_gather_objects(10 * rank), first.decide(Vote(rank)).unanimous]

    verdict = Vote(7, False, True, True, ranks - 1)
    expected = [[verdict] * 3, {rank: 10 * rank for rank in range(ranks)}, ranks == 1]
    assert run_threads(ranks, main, host_memory=False) == [expected] * ranks
    assert made == []


def test_a_store_that_is_used_again() -> None:
    """A second life of the process groups, with the store and under the names of a first, whose first step some did
    not reach.
    """
    store = dist.HashStore()

    def part_of_them(rank: int) -> None:
        if rank == 2:
            raise ConnectionAbortedError("out of luck")
        Agreement(world()).decide(Vote(7))

    def all_of_them(rank: int) -> bool:
        return Agreement(world()).decide(Vote(7)).unanimous

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tests.support.threads.HashStore", lambda: store)
        with pytest.raises(ConnectionAbortedError):
            run_threads(3, part_of_them, host_memory=False, timeout=2.0)
        for _ in range(2):
            assert run_threads(3, all_of_them, host_memory=False) == [True] * 3


def test_ranks_that_cannot_be_reached_vote_through_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, although two of the three can be reached; one says so, once."""

    def own_addresses() -> tuple[str, ...]:
        if dist.get_rank() == 1:
            raise RuntimeError("GLOO_SOCKET_IFNAME=none0: no such interface has an address on this host")
        return ("127.0.0.1",)

    monkeypatch.setattr("meshmuon.transport.connecting.own_addresses", own_addresses)

    def main(rank: int) -> Any:
        agreement = Agreement(world())
        verdicts = [agreement.decide(Vote(5, activity=rank)), agreement.decide(Vote(rank))]
        assert channel_of(world()) is None
        return verdicts, agreement.all_gather_objects(("fact", rank, None))

    with pytest.warns(
        UserWarning, match="cannot be connected for the agreement: rank 1: GLOO_SOCKET_IFNAME=none0"
    ) as told:
        found = run_threads(3, main, host_memory=False)
    verdicts = [Vote(5, False, False, True, 2), Vote(None, False, False, True)]
    assert found == [(verdicts, {rank: ("fact", rank, None) for rank in range(3)})] * 3
    assert len(told) == 1


def test_a_lost_rank_ends_what_the_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that can be aborted are, by a thread: the host may wait for a device, where nothing else wakes it."""
    aborted, ended, worlds = threading.Event(), threading.Event(), dict[dist.ProcessGroup, int]()
    monkeypatch.setattr(failures, "abort", lambda group: worlds[group] == 0 and aborted.set())

    def main(rank: int) -> str:
        worlds[world()] = rank
        channel = channel_of(world())
        assert channel is not None
        if rank == 1:
            for connection in channel._connections():
                connection.shutdown(socket.SHUT_RDWR)  # as the system does for a process that is killed
            ended.wait(60.0)
            return ""
        assert aborted.wait(60.0)
        ended.set()
        return channel.lost

    assert run_threads(2, main, host_memory=False)[0] == "rank 1 has closed its connection"


class SlowWork:
    """A collective of gloo that is not woken; it ends after so many slices, or never."""

    def __init__(self, channel: Any, slices: int, error: str = "") -> None:
        self.channel, self.slices, self.error = channel, slices, error

    def is_completed(self) -> bool:
        return self.slices == 0

    def wait(self, time_slice: Any = None) -> None:
        assert time_slice is not None or self.slices == 0
        if time_slice is None:
            if self.error:
                raise RuntimeError(self.error)
            return
        self.slices -= 1
        if self.slices == -3:
            self.channel.lost = "rank 3 has closed its connection"
        raise RuntimeError("Operation timed out!")  # also in the last slice: it may end just then


@pytest.mark.parametrize(("slices", "error"), [(2, ""), (1, "gloo's own"), (-1, "rank 3 has closed its connection")])
def test_waits_for_gloo_look_for_lost_ranks(slices: int, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        lost, connections = "", 0

    group: Any = Thing()
    channel: Any = Thing()
    monkeypatch.setattr(failures, "gloo_of", lambda group: object())
    failures.set_channel(group, channel)
    work = SlowWork(channel, slices, error)
    with pytest.raises(RuntimeError, match=error) if error else contextlib.nullcontext():
        failures.wait_for(work, torch.zeros(1), group)


def test_a_part_that_is_not_contiguous_is_broadcast_in_place() -> None:
    """Some columns of a weight, as the parts of a fused one: torch broadcasts a copy, which must go back."""

    def main(rank: int) -> Tensor:
        weight = torch.full((3, 6), float(rank))
        broadcast(weight[:, 1:4], 1, world())
        return weight

    for rank, found in enumerate(run_threads(3, main)):
        assert torch.equal(found, torch.tensor([rank, 1.0, 1.0, 1.0, rank, rank]).expand(3, 6))
