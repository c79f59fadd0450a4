"""Channels: maxima and gathers over real connections, strangers at the door, lost and late ranks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from meshmuon.transport.dissemination import distances
from meshmuon.transport.host_channel import HostChannel
from meshmuon.transport.sockets import Connecting, Door, Listener
from tests.support.channels import SECONDS, Doors, run_channels
from tests.support.processes import fork_server

LARGEST = 2**63 - 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13])
def test_maxima(size: int) -> None:
    """Random words, several times over the same connections."""
    rng = random.Random(size)
    turns = [[tuple(rng.randint(-LARGEST, LARGEST) for _ in range(7)) for _ in range(size)] for _ in range(4)]

    def main(channel: HostChannel, position: int) -> list[tuple[int, ...]]:
        return [channel.start_maximum(words[position], SECONDS).wait() for words in turns]

    expected = [tuple(map(max, *words, words[0])) for words in turns]
    assert run_channels(size, main) == [expected] * size


@pytest.mark.parametrize("size", [1, 2, 3, 6, 9])
def test_gathers(size: int) -> None:
    """Objects of very different sizes, larger than what the buffers of connections hold, between maxima."""

    def main(channel: HostChannel, position: int) -> list[Any]:
        value = {"rank": position, "text": "x" * (0 if position % 2 else 3_000_000)}
        results: list[Any] = [channel.start_maximum((position,), SECONDS).wait(), channel.all_gather(value, SECONDS)]
        return [*results, channel.all_gather(position, SECONDS), channel.start_maximum((-position,), SECONDS).wait()]

    values = {100 + k: {"rank": k, "text": "x" * (0 if k % 2 else 3_000_000)} for k in range(size)}
    assert run_channels(size, main) == [[(size - 1,), values, {100 + k: k for k in range(size)}, (0,)]] * size


def test_advancing_needs_no_wait() -> None:
    """While nobody waits, ranks that advance get to the result all the same."""

    def main(channel: HostChannel, position: int) -> tuple[int, ...]:
        pending = channel.start_maximum((position,), SECONDS)
        end = time.monotonic() + SECONDS
        while not pending.advance():
            assert time.monotonic() < end
            time.sleep(0.001)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(HostChannel, "wait_for_message", None)
            return pending.wait()

    assert run_channels(5, main) == [(4,)] * 5


def test_the_first_round_is_sent_before_anyone_waits() -> None:
    """Rank 1 of two gets the result although rank 0 does not even look for it."""
    done = threading.Event()

    def main(channel: HostChannel, position: int) -> tuple[int, ...]:
        pending = channel.start_maximum((position,), SECONDS)
        if position == 0:
            assert done.wait(SECONDS)
        words = pending.wait()
        done.set()
        return words

    assert run_channels(2, main) == [(1,), (1,)]


# Hops and connections of real processes.


def sockets_of_this_process() -> set[str]:
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:  # the listing's own
            continue
    return {link for link in links if link.startswith("socket:")}


def counted_rank(position: int, size: int, folder: Path) -> None:
    """A process of its own, with a folder as the store; writes what it has counted."""

    def publish(door: Door, seconds: float) -> Any:
        (folder / f"new{position}").write_bytes(door.to_bytes())
        (folder / f"new{position}").rename(folder / f"door{position}")

        def door_of(peer: int) -> Door:
            end = time.monotonic() + seconds
            while not (folder / f"door{peer}").exists():
                assert time.monotonic() < end
                time.sleep(0.005)
            return Door.from_bytes((folder / f"door{peer}").read_bytes())

        return door_of

    sends = 0

    class Counting(HostChannel):
        def send(self, number: int, message: bytes | memoryview) -> int:
            nonlocal sends
            sends += 1
            return super().send(number, message)

    before = sockets_of_this_process()
    channel = Counting(position, range(size), publish)
    unused = len(sockets_of_this_process() - before)
    words = [channel.start_maximum((position, turn), SECONDS).wait() for turn in range(3)]
    used = len(sockets_of_this_process() - before)
    text = f"{words == [(size - 1, turn) for turn in range(3)]} {unused} {used} {channel.connections} {sends}"
    channel.close()
    (folder / f"counted{position}").write_text(f"{text} {len(sockets_of_this_process() - before)}")


@pytest.mark.parametrize("size", [2, 5, 16, 64])
def test_hops_and_connections_of_processes(size: int, tmp_path: Path) -> None:
    """Connections when first used, ⌈log2 W⌉ in each direction, the listener gone; as many hops, one message each."""
    context = multiprocessing.get_context("fork")  # with nothing but sockets in it: importing torch 64 times takes minutes
    processes = [context.Process(target=counted_rank, args=(k, size, tmp_path), daemon=True) for k in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
    rounds = (size - 1).bit_length()
    texts = {(tmp_path / f"counted{k}").read_text() for k in range(size)}
    assert texts == {f"True 0 {2 * rounds} {2 * rounds} {3 * rounds} 0"}


# Strangers.


def test_strangers_are_turned_away() -> None:
    """They say nothing, too little, something else, or know everything but the token."""
    strangers: list[socket.socket] = []

    def pester(position: int, door: Door) -> Door:
        if position == 0:
            without_token = b"meshmuon" + bytes(16) + bytes(3) + b"\1" + bytes(4)
            for message in (b"", b"GET / HTTP/1.1\r\n\r\n" * 4, b"meshmuon", without_token):
                stranger = socket.create_connection(("127.0.0.1", door.port))
                stranger.settimeout(SECONDS)
                stranger.sendall(message)
                strangers.append(stranger)
        return door

    found = run_channels(3, lambda channel, position: channel.start_maximum((position,), SECONDS).wait(), Doors(pester))
    assert found == [(2,)] * 3
    assert len(strangers) == 4
    for stranger in strangers:  # nobody was told anything
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()


def test_a_rank_that_is_not_expected_is_turned_away() -> None:
    """It has the token, and calls a rank that it has no business with."""
    listener = Listener()
    door = listener.door
    accepting = Connecting(0, [], [1], listener, lambda peer: door, str)
    calling = Connecting(2, [0], [], Listener(), lambda peer: door, str)

    def accept() -> None:
        with pytest.raises(RuntimeError, match="Timed out waiting 1000ms to be connected with 1"):
            accepting.run(1.0)

    thread = threading.Thread(target=accept)
    thread.start()
    with pytest.raises(RuntimeError, match=r"0 cannot be reached at port \d+ .*it hung up"):
        calling.run(SECONDS)
    thread.join()
    assert not accepting.incoming


def test_addresses_that_lead_nowhere() -> None:
    """Nothing is there, or nothing answers, or this host has no route: the other addresses are tried at the same time."""

    def astray(position: int, door: Door) -> Door:
        return Door(("240.0.0.1", "fe80::1", *door.addresses), door.port, door.token)

    found = run_channels(3, lambda channel, position: channel.start_maximum((position,), SECONDS).wait(), Doors(astray))
    assert found == [(2,)] * 3


def test_a_program_that_echoes_is_not_taken_for_a_rank() -> None:
    echo = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = echo.accept()
        connection.sendall(connection.recv(1000))
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    door = Door(("127.0.0.1",), echo.getsockname()[1], bytes(16))
    connecting = Connecting(0, [1], [], Listener(), lambda peer: door, lambda peer: f"rank {peer}")
    with pytest.raises(RuntimeError, match=r"rank 1 cannot be reached .*another program answers.*GLOO_SOCKET_IFNAME"):
        connecting.run(SECONDS)
    thread.join()
    echo.close()


def test_doors_travel_as_bytes() -> None:
    door = Door(("10.0.0.1", "fd00::2"), 65535, bytes(range(16)))
    assert Door.from_bytes(door.to_bytes()) == door


# Lost, late and confused ranks.


@pytest.mark.parametrize("lost", [0, 2, 5])
def test_a_rank_that_leaves(lost: int) -> None:
    """All others hear at once, also those without a connection to it, and none continues."""

    def main(channel: HostChannel, position: int) -> None:
        channel.start_maximum((1,), SECONDS).wait()
        if position != lost:
            channel.start_maximum((2,), SECONDS).wait()

    found = run_channels(6, main)
    assert found[lost] is None
    for position, error in enumerate(found):
        assert position == lost or "has closed its connection" in str(error), found


def test_a_rank_that_leaves_before_it_has_connected() -> None:
    def main(channel: HostChannel, position: int) -> Any:
        if position == 3:
            doors.publisher(3)(Door(("127.0.0.1",), 1, bytes(16)), SECONDS)  # nobody listens there
            return None
        return channel.start_maximum((position,), SECONDS).wait()

    doors = Doors()
    found = run_channels(5, main, doors)
    assert [isinstance(error, RuntimeError) for error in found] == [True, True, True, False, True]
    assert any("rank 103 cannot be reached" in str(error) for error in found)
    assert not any("Timed out" in str(error) for error in found)


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "not yet"])
def test_a_rank_that_is_late(connected: bool) -> None:
    """The error names the time and a rank; the late one hears of it when it comes."""
    given_up = threading.Barrier(3)

    def main(channel: HostChannel, position: int) -> None:
        if connected:
            channel.start_maximum((1,), SECONDS).wait()
        if position == 1:
            given_up.wait(SECONDS)
        try:
            channel.start_maximum((2,), 0.3 if position != 1 else SECONDS).wait()
        except RuntimeError:
            channel.close()
            if position != 1:
                given_up.wait(SECONDS)
            raise

    found = run_channels(3, main)
    assert all(isinstance(error, RuntimeError) for error in found), found
    assert any("Timed out waiting 300ms" in str(error) for error in found), found


def test_ranks_that_do_not_do_the_same() -> None:
    """One gathers while the other finds a maximum: both are told, instead of taking one for the other."""

    def main(channel: HostChannel, position: int) -> Any:
        if position == 0:
            return channel.start_maximum((1,) * 7, SECONDS).wait()
        return channel.all_gather("a text that is longer than the words of a maximum, " * 3, SECONDS)

    found = run_channels(2, main)
    assert any("they have not communicated equally often" in str(error) for error in found), found
    assert all(isinstance(error, RuntimeError) for error in found), found


def test_a_closed_channel_stays_closed() -> None:
    def main(channel: HostChannel, position: int) -> str:
        channel.start_maximum((1,), SECONDS).wait()
        channel.close()
        channel.close()
        with pytest.raises(RuntimeError, match="an error in an earlier phase has closed the connections"):
            channel.start_maximum((1,), SECONDS)
        with pytest.raises(RuntimeError, match="an error in an earlier phase has closed the connections"):
            channel.all_gather(1, SECONDS)
        return "refused"

    assert run_channels(2, main) == ["refused"] * 2


def test_a_fork_holds_no_connection() -> None:
    """Else the others could not tell that a rank has died while its data loader's processes live on.

    In a process of its own, which has no threads but the two: forking one with the threads of other tests may crash.
    """
    process = fork_server().Process(target=_fork_holds_no_connection)
    process.start()
    process.join(4 * SECONDS)
    assert process.exitcode == 0


def _fork_holds_no_connection() -> None:
    def main(channel: HostChannel, position: int) -> tuple[int, tuple[int, ...]]:
        channel.start_maximum((position,), SECONDS).wait()
        turns.wait(SECONDS)
        status = -1
        if position == 0:
            child = os.fork()
            if child == 0:
                channel.close()  # must not end the connections of the parent either
                os._exit(len(sockets_of_this_process() & own))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        turns.wait(SECONDS)
        return status, channel.start_maximum((position,), SECONDS).wait()

    before = sockets_of_this_process()
    turns = threading.Barrier(2, action=lambda: own.update(sockets_of_this_process() - before))
    own: set[str] = set()
    assert run_channels(2, main) == [(0, (1,)), (-1, (1,))]
    assert len(own) == 4


def test_a_channel_that_nobody_uses_any_more_closes_its_connections() -> None:
    before = sockets_of_this_process()
    doors = Doors()
    channels = [HostChannel(position, range(2), doors.publisher(position)) for position in range(2)]
    thread = threading.Thread(target=lambda: channels[1].start_maximum((1,), SECONDS).wait())
    thread.start()
    assert channels[0].start_maximum((0,), SECONDS).wait() == (1,)
    thread.join()
    assert len(sockets_of_this_process() - before) == 4
    del thread
    channels.clear()
    assert not sockets_of_this_process() - before


def test_rounds_are_those_of_the_schedule() -> None:
    channel = HostChannel(0, range(9), Doors().publisher(0))
    assert channel.rounds == len(distances(9)) == 4
    assert channel.connections == 0
