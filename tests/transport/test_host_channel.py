"""Channels: maxima and gathers over real connections, strangers at the door, lost and late ranks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import random
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from meshmuon.transport import connecting, host_channel
from meshmuon.transport.connecting import PROTOCOL, Connecting, Door, Listener, UnreachableError
from meshmuon.transport.host_channel import HostChannel, open_channel
from tests.support.channels import SECONDS, Doors, run_channels
from tests.support.processes import fork_server

LARGEST = 2**63 - 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13])
def test_maxima(size: int) -> None:
    """Random words, several times over the same connections."""
    rng = random.Random(size)
    turns = [[tuple(rng.randint(-LARGEST, LARGEST) for _ in range(7)) for _ in range(size)] for _ in range(4)]

    def main(channel: HostChannel, position: int) -> list[tuple[int, ...]]:
        return [channel.maximum(words[position], SECONDS) for words in turns]

    expected = [tuple(map(max, *words, words[0])) for words in turns]
    assert run_channels(size, main) == [expected] * size


@pytest.mark.parametrize("size", [1, 2, 3, 6, 9])
def test_gathers(size: int) -> None:
    """Objects of very different sizes, larger than what the buffers of connections hold, between maxima."""

    def main(channel: HostChannel, position: int) -> list[Any]:
        value = {"rank": position, "text": "x" * (0 if position % 2 else 3_000_000)}
        results: list[Any] = [channel.maximum((position,), SECONDS), channel.all_gather(value, SECONDS)]
        return [*results, channel.all_gather(position, SECONDS), channel.maximum((-position,), SECONDS)]

    values = {100 + k: {"rank": k, "text": "x" * (0 if k % 2 else 3_000_000)} for k in range(size)}
    assert run_channels(size, main) == [[(size - 1,), values, {100 + k: k for k in range(size)}, (0,)]] * size


def sockets_of_this_process() -> set[str]:
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:  # the listing's own
            continue
    return {link for link in links if link.startswith("socket:")}


@pytest.mark.parametrize("size", [2, 5, 16])
def test_hops_and_connections(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """⌈log2 W⌉ connections in each direction, the listeners gone; as many hops, one message each."""
    before, sends, turns = sockets_of_this_process(), [], threading.Barrier(size)
    send = socket.socket.send
    monkeypatch.setattr(socket.socket, "send", lambda self, message: sends.append(1) or send(self, message))

    def main(channel: HostChannel, position: int) -> tuple[int, int, int]:
        for turn in range(3):
            assert channel.maximum((position, turn), SECONDS) == (size - 1, turn)
        turns.wait(SECONDS)
        counts = len(sockets_of_this_process() - before), channel.connections, len(sends)
        turns.wait(SECONDS)
        return counts

    rounds = (size - 1).bit_length()
    assert run_channels(size, main) == [(2 * rounds * size, 2 * rounds, 3 * rounds * size)] * size
    assert not sockets_of_this_process() - before


# Strangers.


def find_maximum(channel: HostChannel, position: int) -> tuple[int, ...]:
    return channel.maximum((position,), SECONDS)


HELLO = struct.pack("!8sHII16s", b"meshmuon", PROTOCOL, 1, 0, bytes(16))
STRANGE = {
    "nothing": b"",
    "garbage": bytes(range(256)) * 40,
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "half a hello": HELLO[:9],
    "another version": struct.pack("!8sHII16s", b"meshmuon", PROTOCOL + 1, 1, 0, bytes(16)),
    "no proof": HELLO,
    "a wrong proof": HELLO + bytes(32),
    "far too much": HELLO + bytes(1 << 20),
}


def test_strangers_are_turned_away() -> None:
    """They may know who calls whom, but not the key: all are answered with a challenge at most, and none is let in."""
    strangers: list[socket.socket] = []

    def pester(position: int, door: Door) -> Door:
        if position == 0:
            for message in STRANGE.values():
                stranger = socket.create_connection(door.places[0])
                stranger.settimeout(SECONDS)
                with contextlib.suppress(OSError):
                    stranger.sendall(message)
                strangers.append(stranger)
        return door

    assert run_channels(3, find_maximum, Doors(3, pester)) == [(2,)] * 3
    assert len(strangers) == len(STRANGE)
    for stranger in strangers:
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := stranger.recv(1000):
                answer += part
        assert not answer or (answer[:8] == b"meshmuon" and len(answer) == 58)
        stranger.close()


def test_the_key_is_never_sent_and_a_recorded_dialogue_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener in the middle passes everything on and keeps it. Played back to the next rank, it does not help."""
    heard: list[bytes] = []
    relays: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(4096):
                heard.append(part)
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)

    def relay(listening: socket.socket, place: tuple[str, int]) -> None:
        caller, _ = listening.accept()
        called = socket.create_connection(place)
        for pair in ((caller, called), (called, caller)):
            threading.Thread(target=pump, args=pair, daemon=True).start()

    def between(position: int, door: Door) -> Door:
        listening = socket.create_server(("127.0.0.1", 0))
        relays.append(listening)
        threading.Thread(target=relay, args=(listening, door.places[0]), daemon=True).start()
        secrets.append(door.secret)
        return dataclasses.replace(door, places=(("127.0.0.1", listening.getsockname()[1]),))

    secrets: list[str] = []
    assert run_channels(2, find_maximum, Doors(2, between)) == [(1,)] * 2
    said = b"".join(heard)
    key = hashlib.sha256("".join(secrets).encode()).digest()
    assert len(said) > 2 * (34 + 58 + 32)
    for secret in (*secrets, key):
        assert (secret if isinstance(secret, bytes) else secret.encode()) not in said
        assert isinstance(secret, bytes) or bytes.fromhex(secret) not in said
    hellos = [part for part in heard if part.startswith(b"meshmuon") and len(part) == len(HELLO)]
    proofs = [part for part in heard if len(part) == 32]
    for rank, hello in enumerate(hellos):
        for proof in proofs:
            assert not let_in(secrets, rank, hello, proof)
    for listening in relays:
        listening.close()


def let_in(secrets: list[str], rank: int, *messages: bytes) -> bool:
    """Whether one of two ranks with these secrets lets in a caller that sends ``messages``, each when something was
    answered.
    """
    listener = Listener("")
    doors = {peer: Door("", (), secret) for peer, secret in enumerate(secrets)}
    accepting = Connecting(rank, doors, [], [1 - rank])
    place = listener.door.places[0]

    def call() -> None:
        with socket.create_connection(place) as connection, contextlib.suppress(OSError):
            connection.settimeout(SECONDS)
            for message in messages:
                connection.sendall(message)
                if not connection.recv(1000):
                    break

    thread = threading.Thread(target=call)
    thread.start()
    try:
        accepting.run(listener, 0.5)
    except UnreachableError:
        return False
    finally:
        thread.join()
    return True


@pytest.mark.parametrize(("caller", "target"), [(2, 0), (1, 2)], ids=["another caller", "meant for another"])
def test_a_rank_that_is_not_expected_is_turned_away(caller: int, target: int) -> None:
    """It has the key, and calls a rank that it has no business with, or under an address that leads to another one."""
    listener = Listener("")
    doors = dict.fromkeys(range(3), listener.door)
    accepting, calling = Connecting(0, doors, [], [1]), Connecting(caller, doors, [target], [])

    def accept() -> None:
        with pytest.raises(UnreachableError, match=r"no connection with rank 1 after 1 s \(no answer\)"):
            accepting.run(listener, 1.0)

    thread = threading.Thread(target=accept)
    thread.start()
    calling.run(Listener(""), SECONDS)
    thread.join()
    assert not accepting.incoming
    calling.outgoing[target].settimeout(SECONDS)
    with contextlib.suppress(ConnectionError):
        assert calling.outgoing[target].recv(1) == b""
    calling.outgoing[target].close()


@pytest.mark.parametrize(("most", "seconds"), [(4, 1e9), (1000, 0.2)], ids=["too many", "too long"])
def test_strangers_do_not_exhaust_descriptors(most: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred that say nothing: all but the last few are turned away, and all after their time; a rank that calls
    is let in.
    """
    monkeypatch.setattr(connecting, "_MOST_STRANGERS", most)
    monkeypatch.setattr(connecting, "_HELLO_SECONDS", seconds)
    listener = Listener("")
    doors = {0: listener.door, 1: dataclasses.replace(listener.door, secret="ab")}
    accepting, calling = Connecting(0, doors, [], [1]), Connecting(1, doors, [0], [])
    thread = threading.Thread(target=lambda: accepting.run(listener, SECONDS))
    thread.start()
    strangers = [socket.create_connection(doors[0].places[0]) for _ in range(100)]
    for stranger in strangers[:96]:
        stranger.settimeout(SECONDS / 3)
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
    calling.run(Listener(""), SECONDS)
    thread.join()
    for opened in (*strangers, *calling.outgoing.values(), *accepting.incoming.values()):
        opened.close()


def test_addresses_that_lead_nowhere() -> None:
    """Nothing is there, or nothing answers, or this host has no route: the others, one of them twice, are tried
    meanwhile.
    """

    def astray(position: int, door: Door) -> Door:
        return dataclasses.replace(
            door, places=(("240.0.0.1", 9), ("fe80::1", 9), ("127.0.0.1", 1), *door.places, *door.places)
        )

    assert run_channels(3, find_maximum, Doors(3, astray)) == [(2,)] * 3


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (lambda hello: hello + hello, "another program answers"),
        (lambda hello: b"SSH-2.0-" + bytes(60), "another program answers"),
        (
            lambda hello: b"meshmuon" + struct.pack("!H", PROTOCOL + 1) + bytes(48),
            f"it speaks version {PROTOCOL + 1} of the",
        ),
        (lambda hello: b"", "it hung up"),
    ],
    ids=["echo", "another program", "another version", "nothing"],
)
def test_another_program_is_not_taken_for_a_rank(says: Any, why: str) -> None:
    other = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = other.accept()
                connection.sendall(says(connection.recv(1000)))
                connection.close()

    threading.Thread(target=serve, daemon=True).start()
    doors = dict.fromkeys(range(2), Door("", (other.getsockname()[:2],), ""))
    with pytest.raises(UnreachableError, match=rf"no connection with rank 1 after 1 s .*{why}"):
        Connecting(0, doors, [1], []).run(Listener(""), 1.0)
    other.close()


def test_listens_only_where_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with contextlib.closing(Listener("")) as listener:
        assert {address for address, _ in listener.door.places} <= {"127.0.0.1", "::1"}
        assert {listening.getsockname()[:2] for listening in listener.sockets} == set(listener.door.places)


def test_ports_that_ranks_may_listen_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MESHMUON_PORTS", f"{port}-{port}")
        assert "all of these ports are in use at 127.0.0.1" in Listener("").door.trouble
    monkeypatch.setenv("MESHMUON_PORTS", f"{port}")
    with contextlib.closing(Listener("")) as listener:
        assert {place[1] for place in listener.door.places} == {port}
    monkeypatch.setenv("MESHMUON_PORTS", "")
    with contextlib.closing(Listener("")) as listener:
        assert listener.door.places
    for wrong in ("many", "9-8", "5-70000", "-", "0-99999999999999"):
        monkeypatch.setenv("MESHMUON_PORTS", wrong)
        door = Listener("").door
        assert door.places == ()
        assert "write the first and the last port" in door.trouble


def nowhere(position: int, door: Door) -> Door:
    return dataclasses.replace(door, places=(("127.0.0.1", 1),)) if position == 1 else door


def test_a_rank_that_nobody_can_call_is_known_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks go without a channel together: if one cannot listen, at once, and if one cannot be reached, after
    the time.
    """

    def mute(position: int, door: Door) -> Door:
        return dataclasses.replace(door, places=(), trouble="no network") if position == 1 else door

    assert [str(error) for error in run_channels(3, find_maximum, Doors(3, mute))] == ["rank 101: no network"] * 3

    monkeypatch.setattr(host_channel, "_CONNECTING_SECONDS", 1.0)
    found = {str(error) for error in run_channels(3, find_maximum, Doors(3, nowhere))}
    assert len(found) == 1
    assert re.search(r"rank 10\d: no connection with rank 10\d after 1 s \(127.0.0.1 port 1: .*refused\)", found.pop())


def test_the_reason_is_told_also_if_another_rank_gives_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 101, which nobody can reach, only knows that the others do not call. Rank 100 hears when it gives up."""
    patient = Connecting.run
    monkeypatch.setattr(
        Connecting, "run", lambda self, door, _: patient(self, door, 1.0 if self._rank == 101 else SECONDS)
    )
    begin = time.monotonic()
    found = {str(error) for error in run_channels(2, find_maximum, Doors(2, nowhere))}
    assert len(found) == 1
    assert re.search(r"rank 100: no connection with rank 101 after .*\(127.0.0.1 port 1: .*refused\)", found.pop())
    assert time.monotonic() - begin < SECONDS / 2


def test_ctrl_c_while_ranks_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ThreadPoolExecutor):
        def submit(self, *work: Any) -> Any:
            super().submit(*work)
            raise KeyboardInterrupt

    monkeypatch.setattr(connecting, "ThreadPoolExecutor", Interrupted)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Connecting(0, dict.fromkeys(range(2), Door("", (), "")), [], [1]).run(Listener(""), SECONDS)
    assert time.monotonic() - begin < SECONDS / 2


@pytest.mark.parametrize(
    ("message", "version"), [(b"\x80\x04K\x01.", "another version"), (b'[["Door","0.0",["tuple"],""]]', "version 0.0")]
)
def test_another_version_of_the_library(message: bytes, version: str) -> None:
    with pytest.raises(
        RuntimeError, match=f"rank 7 runs {version} of meshmuon, this rank .*: install the same on all ranks"
    ):
        open_channel(3, [3, 7], lambda own: [own, message])


# Lost, late and confused ranks.


@pytest.mark.parametrize(("lost", "killed"), [(0, False), (2, True), (5, False)])
def test_a_rank_that_leaves(lost: int, killed: bool) -> None:
    """All others hear at once, with or without a last word, also those without a connection to it, and none
    continues.
    """

    def main(channel: HostChannel, position: int) -> None:
        channel.maximum((1,), SECONDS)
        if position != lost:
            channel.maximum((2,), SECONDS)
        elif killed:
            for connection in channel._connections():
                connection.close()

    found = run_channels(6, main)
    assert found[lost] is None
    for position, error in enumerate(found):
        assert position == lost or "has closed its connection" in str(error), found


def test_a_rank_that_is_late() -> None:
    """The error names the time and a rank; the late one hears of it when it comes."""
    given_up = threading.Barrier(3)

    def main(channel: HostChannel, position: int) -> None:
        channel.maximum((1,), SECONDS)
        if position == 1:
            given_up.wait(SECONDS)
        try:
            channel.maximum((2,), 0.3 if position != 1 else SECONDS)
        except RuntimeError:
            channel.end("failed")
            if position != 1:
                given_up.wait(SECONDS)
            raise

    found = run_channels(3, main)
    assert all(isinstance(error, RuntimeError) for error in found), found
    assert any("Timed out waiting 300ms" in str(error) for error in found), found


def test_timeouts_of_years() -> None:
    """Trainers set 180,000,000 s; poll counts milliseconds in 32 bits."""

    def main(channel: HostChannel, position: int) -> Any:
        if position == 1:
            time.sleep(0.05)
        return channel.maximum((position,), 180_000_000.0), channel.all_gather(position, 180_000_000.0)

    assert run_channels(2, main) == [((1,), {100: 0, 101: 1})] * 2


@pytest.mark.parametrize("how", ["killed", "failed", "left"])
def test_who_is_lost_and_who_has_left(how: str) -> None:
    """Without waiting for anything: at once if a rank failed, after a while if it went without a word, never after
    goodbye.
    """
    before, gone, looked = (threading.Barrier(2) for _ in range(3))

    def main(channel: HostChannel, position: int) -> Any:
        channel.maximum((1,), SECONDS)
        if position == 1:
            before.wait(SECONDS)
            if how == "left":  # what was not read yet hides nothing
                channel._send(channel._rounds[0][0], memoryview(host_channel._HEADER.pack(1, 0, 2, 8) + bytes(8)))
            if how == "killed":
                for connection in channel._connections():
                    connection.close()
            else:
                channel.end("") if how == "failed" else channel.leave()
            gone.wait(SECONDS)
            looked.wait(SECONDS)
            return None
        assert channel.look_for_lost(0.0) == ""
        before.wait(SECONDS)
        gone.wait(SECONDS)
        seen = [channel.look_for_lost(now) for now in (0.0, 0.9, 1.1, 100.0)]
        looked.wait(SECONDS)
        return seen

    lost = "rank 101 has closed its connection"
    expected = {"killed": ["", "", lost, lost], "failed": [lost] * 4, "left": [""] * 4}
    assert run_channels(2, main)[0] == expected[how]


def test_a_host_that_vanishes_is_noticed_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has these options: what is not acknowledged, and a silence, end a connection after 60 s."""
    names = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    set_options, found = host_channel._set_options, []

    def set_and_read(connection: socket.socket) -> None:
        set_options(connection)
        numbers = [getattr(socket, name, None) for name in names]
        values = [-1 if number is None else connection.getsockopt(socket.IPPROTO_TCP, number) for number in numbers]
        found.append((connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *values))

    monkeypatch.setattr(host_channel, "_set_options", set_and_read)
    run_channels(3, lambda channel, position: None)
    assert len(found) == 3 * 4  # each has two connections in either direction
    for alive, unacknowledged, idle, interval, count in found:
        assert alive
        assert unacknowledged in (-1, 60_000)
        assert -1 in (idle, interval, count) or idle + interval * count == 60


def test_a_rank_that_fails_behind_a_message_that_nobody_reads() -> None:
    """There is no room for a last word, but the connection ends all the same."""
    failed, read = threading.Event(), threading.Event()

    def main(channel: HostChannel, position: int) -> bytes:
        if position == 0:
            rest = memoryview(bytes(50_000_000))
            for _ in range(50):  # until the buffers are full
                rest = channel._send(channel._rounds[0][0], rest)
            assert rest
            channel.end("failed")
            failed.set()
            read.wait(SECONDS)
            return b"failed"
        failed.wait(SECONDS)
        incoming = channel._rounds[0][1].connection
        incoming.settimeout(SECONDS / 3)
        try:
            while part := incoming.recv(1 << 20):
                pass
        finally:
            read.set()
        return part

    assert run_channels(2, main) == [b"failed", b""]


def test_ranks_that_do_not_do_the_same() -> None:
    """One gathers while the other finds a maximum: both are told, instead of taking one for the other."""

    def main(channel: HostChannel, position: int) -> Any:
        if position == 0:
            return channel.maximum((1,) * 7, SECONDS)
        return channel.all_gather("a text that is longer than the words of a maximum, " * 3, SECONDS)

    found = run_channels(2, main)
    assert any("they have not communicated equally often" in str(error) for error in found), found
    assert all(isinstance(error, RuntimeError) for error in found), found


def test_sizes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank neither sends nor believes a length beyond the limit."""
    monkeypatch.setattr(host_channel, "_LONGEST_BODY", 1000)
    huge = host_channel._HEADER.pack(0, 0, 1, 1 << 60)

    def main(channel: HostChannel, position: int) -> Any:
        if position == 0:
            channel._rounds[0][0].connection.sendall(huge)
            time.sleep(0.01)
        return channel.all_gather("x" * 2000 if position == 0 else "", SECONDS)

    found = [str(error) for error in run_channels(2, main)]
    assert "a message of 2025 bytes, more than the 1000 that ranks send" in found[0]
    assert f"of {1 << 60} bytes, this rank expects" in found[1]


def test_what_cannot_be_read_is_not_executed() -> None:
    for message in (b"\x80\x04K\x01.", b"[[", b'[["os.system", "true"]]', b"7", b'[["Door"]]', b"[" * 5000):
        with pytest.raises(RuntimeError, match="rank 5 sends something that cannot be read"):
            host_channel._plain(message, 5)
    channel = HostChannel(5, [5], [])
    with pytest.raises(TypeError, match="ranks do not send each other objects of"):
        channel.all_gather(object(), SECONDS)


@pytest.mark.parametrize(
    "value", [None, (), [], {}, (1, (2.5, None), [True, "ü"]), {("a", 1): {2: ()}}, -(2**70), float("inf")]
)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    assert repr(run_channels(2, lambda channel, position: channel.all_gather(value, SECONDS))) == repr(
        [{100: value, 101: value}] * 2
    )


def test_a_channel_that_has_ended_stays_so() -> None:
    def main(channel: HostChannel, position: int) -> str:
        channel.maximum((1,), SECONDS)
        channel.end("it failed")
        channel.end("again")
        for call in (lambda: channel.maximum((1,), SECONDS), lambda: channel.all_gather(1, SECONDS)):
            with pytest.raises(RuntimeError, match="it failed"):
                call()
        return "refused"

    assert run_channels(2, main) == ["refused"] * 2


def test_a_fork_holds_no_connection() -> None:
    """Else the others could not tell that a rank has died while its data loader's processes live on.

    In a process of its own, which has no threads but the two: forking one with the threads of other tests may crash.
    """
    run_in_a_process(_fork_holds_no_connection)


def run_in_a_process(work: Callable[[], None]) -> None:
    process = fork_server().Process(target=work)
    process.start()
    process.join(4 * SECONDS)
    assert process.exitcode == 0


def _fork_holds_no_connection() -> None:
    def main(channel: HostChannel, position: int) -> tuple[int, tuple[int, ...]]:
        channel.maximum((position,), SECONDS)
        turns.wait(SECONDS)
        status = -1
        if position == 0:
            child = os.fork()
            if child == 0:
                unseen = not any(channel.look_for_lost(now) for now in (0.0, 100.0))
                channel.leave()  # must not end the connections of the parent either
                os._exit(len(sockets_of_this_process() & own) if unseen and "fork" in channel.lost else 99)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        turns.wait(SECONDS)
        return status, channel.maximum((position,), SECONDS)

    before = sockets_of_this_process()
    turns = threading.Barrier(2, action=lambda: own.update(sockets_of_this_process() - before))
    own: set[str] = set()
    assert run_channels(2, main) == [(0, (1,)), (-1, (1,))]
    assert len(own) == 4


def test_threads_take_short_turns_while_a_vote_sends_and_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets give up the interpreter lock: a thread that computes would keep it for the usual interval."""
    seen, usual, send = list[float](), sys.getswitchinterval(), HostChannel._send

    def seeing(channel: HostChannel, *args: Any) -> Any:
        seen.append(sys.getswitchinterval())
        return send(channel, *args)

    monkeypatch.setattr(HostChannel, "_send", seeing)
    assert run_channels(3, find_maximum) == [(2,)] * 3
    assert seen == [pytest.approx(host_channel._SWITCH_SECONDS)] * 6  # two rounds
    assert sys.getswitchinterval() == usual


def test_a_fork_during_a_wait_has_the_usual_switch_interval() -> None:
    run_in_a_process(_fork_during_a_wait)


def _fork_during_a_wait() -> None:
    usual = sys.getswitchinterval()
    with host_channel.prompt_switches:
        assert sys.getswitchinterval() < usual
        child = os.fork()
        if child == 0:
            after_fork = sys.getswitchinterval()
            with host_channel.prompt_switches:
                pass
            os._exit(0 if (after_fork, sys.getswitchinterval()) == (usual, usual) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sys.getswitchinterval() == usual


def test_a_channel_that_nobody_uses_any_more_closes_its_connections() -> None:
    """Opened inside a running event loop, as in a notebook."""
    before, doors = sockets_of_this_process(), Doors(2)

    async def opened(rank: int) -> HostChannel | str:
        return open_channel(rank, range(2), doors.sharer(rank))

    with ThreadPoolExecutor() as threads:
        channels = list(threads.map(lambda rank: asyncio.run(opened(rank)), range(2)))
    assert len(sockets_of_this_process() - before) == 4
    channels.clear()
    assert not sockets_of_this_process() - before
