"""Small messages between the ranks of a process group, through host memory, over O(log W) connections per rank.

gloo's all-reduce is a ring, 2·(W − 1) hops one after the other, and a gloo group connects every pair of ranks. Here a
maximum takes ⌈log2 W⌉ hops, and a rank has as many connections in each direction. In a round of distance d, rank i
sends all that it knows to rank i + d and hears from rank i − d, modulo W. The distances are 1, 2, 4, …: with 6 ranks,
rank 5 knows of 5 at first, then of 4–5, of 2–5, and of all after 3 rounds. In the last round it may hear of a rank that
it knows of.

Every message has a header: its kind, the round, its sequence number, and the length of its body, which is limited. A
rank that leaves says why: it has done its part of all steps, or it has failed. One that is killed says nothing.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, TypeVar

from .connecting import Connecting, Door, Listener, UnreachableError, open_sockets
from .plain_data import from_bytes, to_bytes

_T = TypeVar("_T")
_HEADER = struct.Struct("!BBxxIQ")
# Kinds of messages. That of a maximum is its number of words, all of 64 bits.
_OBJECTS, _GOODBYE, _FAILURE = 0, 254, 255
_LAST_MESSAGES = {_HEADER.pack(kind, 255, 0, 0): kind for kind in (_GOODBYE, _FAILURE)}
_LONGEST_BODY = 1 << 29  # bytes
_LARGEST_PART = 1 << 20  # bytes that one system call is given
_LONGEST_POLL = 3600.0  # seconds; the system counts milliseconds in 32 bits, and groups may have timeouts of years
_SWITCH_SECONDS = 1e-5
_CONNECTING_SECONDS = 20.0  # all ranks begin to connect at the same time
# For how long after a rank was lost without notice its last messages may still arrive.
_GRACE_SECONDS = 1.0
# Options of TCP where the system has them: (name, value) such that a host that has vanished is noticed after a minute.
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 9), ("TCP_USER_TIMEOUT", 60_000))

_living: weakref.WeakSet[HostChannel] = weakref.WeakSet()

Share = Callable[[bytes], list[bytes]]  # every rank's message, in the order of ranks, from that of this rank


def open_channel(rank: int, ranks: Sequence[int], share: Share) -> HostChannel | str:
    """Connects the ranks of a process group; all of them call it. Returns on all ranks a channel, or on all why there
    is none.

    ``share`` gathers a message of every rank, in the order of ``ranks``; it is called twice.
    """
    import meshmuon  # whose version is not known yet when this file is imported

    position, size, trouble = ranks.index(rank), len(ranks), ""
    distances = [1 << number for number in range((size - 1).bit_length())]  # of each round
    targets = [ranks[(position + distance) % size] for distance in distances]
    sources = [ranks[(position - distance) % size] for distance in distances]
    if size == 1:
        return HostChannel(rank, ranks, [])
    with closing(Listener(meshmuon.__version__)) as listener:
        messages = share(to_bytes([listener.door]))
        doors = {
            peer: _door_of(peer, message, meshmuon.__version__) for peer, message in zip(ranks, messages, strict=True)
        }
        for peer, door in doors.items():
            if door.trouble:
                return f"rank {peer}: {door.trouble}"
        connecting = Connecting(rank, doors, targets, sources)
        try:
            connecting.run(listener, _CONNECTING_SECONDS)
        except UnreachableError as error:
            trouble = f"rank {rank}: {error}"
    if troubles := [text.decode(errors="replace") for text in share(trouble.encode()) if text]:
        connecting.close()
        # If several ranks report trouble, the error tells the likely cause, not what followed from it.
        return min(troubles, key=lambda text: ("has given up" in text, "(no answer)" in text, text))
    rounds = [
        (_Peer(target, connecting.outgoing[target]), _Peer(source, connecting.incoming[source]))
        for target, source in zip(targets, sources, strict=True)
    ]
    return HostChannel(rank, ranks, rounds)


def _door_of(rank: int, message: bytes, own_version: str) -> Door:
    try:
        (door,) = from_bytes(message)
        if door.version == own_version:
            return door  # type: ignore[no-any-return]
        version = f"version {door.version}"
    except (ValueError, AttributeError):
        version = "another version"
    raise RuntimeError(
        f"rank {rank} runs {version} of meshmuon, this rank {own_version}: install the same on all ranks"
    )


class _Peer(NamedTuple):
    rank: int
    connection: socket.socket


class _Deadline(NamedTuple):
    at: float
    seconds: float  # from the beginning to it

    def wait_for(self, awaited: Sequence[tuple[_Peer, int]]) -> None:
        """Returns once one of the connections is ready for its event."""
        events = select.poll()
        for peer, event in awaited:
            events.register(peer.connection, event)
        ready = False
        while not ready:
            left = self.at - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"Timed out waiting {round(1000 * self.seconds)}ms for rank {awaited[-1][0].rank}")
            ready = bool(events.poll(1000 * min(left, _LONGEST_POLL)))


class HostChannel:
    """Connections between the ranks of one process group, shared by all that communicate over the group.

    All ranks call ``maximum`` and ``all_gather`` in the same order. A rank that fails must ``end`` the channel: those
    that wait for it then fail at once, and so on until all have heard. A channel that has ended stays so.

    Args:
        rank: this rank.
        ranks: the ranks of the group.
        rounds: the target and the source of each round, and the connections with them.
    """

    def __init__(self, rank: int, ranks: Sequence[int], rounds: list[tuple[_Peer, _Peer]]) -> None:
        self._rank, self._ranks, self._rounds = rank, ranks, rounds
        self._started = 0  # maxima and gathers
        self.lost = ""  # why the channel can no longer be used
        self.beside_gloo = False  # its process group is gloo's
        self._lock = threading.RLock()  # of closing, against the thread that looks for lost ranks
        self._hang_ups = select.poll()
        self._silent_since: dict[int, float] = {}  # by file descriptor
        for connection in self._connections():
            _set_options(connection)
            self._hang_ups.register(connection, getattr(select, "POLLRDHUP", 0))
        if not _living:
            # as atexit, also at the end of processes of ``multiprocessing``
            Finalize(None, _leave_all, exitpriority=10)
        _living.add(self)

    def __del__(self) -> None:
        self.leave()

    def _connections(self) -> list[socket.socket]:
        return [peer.connection for peers in self._rounds for peer in peers]

    @property
    def connections(self) -> int:
        """How many connections this rank has to others."""
        return 2 * len(self._rounds)

    def maximum(self, words: Sequence[int], seconds: float) -> tuple[int, ...]:
        """The largest of each of ``words``, integers of 64 bits, over all ranks, which are waited for at most
        ``seconds``.
        """
        words, body = tuple(words), struct.Struct(f"!{len(words)}q")
        count, end = self._begin(seconds)
        with prompt_switches:
            for number, peers in enumerate(self._rounds):
                heard = self._swap((len(words), number, count), body.pack(*words), *peers, end)
                words = tuple(map(max, words, body.unpack(heard)))
        return words

    def all_gather(self, value: _T, seconds: float) -> dict[int, _T]:
        """Rank → its ``value``, which must be plain data (``plain_data.py``)."""
        messages = {self._rank: to_bytes([value]).decode()}
        count, end = self._begin(seconds)
        with prompt_switches:
            for number, (target, source) in enumerate(self._rounds):
                heard = self._swap((_OBJECTS, number, count), to_bytes([messages]), target, source, end)
                messages.update(_plain(heard, source.rank))
        return {rank: _plain(messages[rank].encode(), rank) for rank in self._ranks}

    def _begin(self, seconds: float) -> tuple[int, _Deadline]:
        if self.lost:
            raise RuntimeError(self.lost)
        self._started += 1
        return self._started, _Deadline(time.monotonic() + seconds, seconds)

    def _swap(self, expected: tuple[int, int, int], body: bytes, target: _Peer, source: _Peer, end: _Deadline) -> bytes:
        """Sends a body to the target of a round while receiving that of its source."""
        if len(body) > _LONGEST_BODY:
            raise RuntimeError(
                f"a message of {len(body)} bytes, more than the {_LONGEST_BODY} that ranks send each other"
            )
        rest = memoryview(_HEADER.pack(*expected, len(body)) + body)
        received, size = bytearray(), _HEADER.size + 8 * expected[0]  # that of objects is not known yet
        while True:
            rest = self._send(target, rest) if rest else rest
            with self._naming(source):
                if len(received) < size:
                    part = source.connection.recv(min(size - len(received), _LARGEST_PART))
                    if not part:
                        raise ConnectionError
                    received += part
                if len(received) >= _HEADER.size:
                    size = _HEADER.size + _length_of(received, expected, source.rank)
            awaited = [(target, select.POLLOUT)] if rest else []
            if len(received) < size:
                awaited.append((source, select.POLLIN))
            if not awaited:
                return bytes(received[_HEADER.size :])
            end.wait_for(awaited)

    def _send(self, target: _Peer, message: memoryview) -> memoryview:
        """Sends what there is room for, and returns the rest."""
        sent = 0
        with self._naming(target):
            sent = target.connection.send(message[:_LARGEST_PART])
        return message[sent:]

    @contextmanager
    def _naming(self, peer: _Peer) -> Iterator[None]:
        """Names the rank whose connection has ended; passes over one that is not ready."""
        try:
            yield
        except BlockingIOError:
            pass
        except OSError as error:
            raise RuntimeError(self.lost or f"rank {peer.rank} has closed its connection") from error

    def end(self, why: str) -> None:
        """Ends all connections, also for the ranks at their other ends, and tells them that this rank has failed.

        Any thread may call. A fork of the process has no connections to end.
        """
        with self._lock:
            if not self.lost:
                self.lost = why
                self._say_last(_FAILURE)

    def leave(self) -> None:
        """Ends all connections, and tells the others that this rank has done its part of all steps so far."""
        with self._lock:
            if not self.lost:
                self.lost = "this rank has left"
                self._say_last(_GOODBYE)
            for connection in self._connections():
                connection.close()
            self._rounds = []

    def _say_last(self, kind: int) -> None:
        for connection in self._connections():
            # the other end was faster, or there is no room behind a long message that it does not read
            with suppress(OSError):
                connection.send(_HEADER.pack(kind, 255, 0, 0))
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def look_for_lost(self, now: float) -> str:
        """Why the channel must end, if a rank is lost; does not wait. Ranks that have said goodbye are not."""
        with self._lock:
            peers = {peer.connection.fileno(): peer for peers in self._rounds for peer in peers}
            for descriptor, _ in [] if self.lost else self._hang_ups.poll(0):
                try:
                    waiting = peers[descriptor].connection.recv(1 << 16, socket.MSG_PEEK)
                except OSError:
                    waiting = b""
                last = _LAST_MESSAGES.get(waiting[-_HEADER.size :])
                if last == _GOODBYE:
                    self._hang_ups.unregister(descriptor)
                elif last == _FAILURE or now - self._silent_since.setdefault(descriptor, now) >= _GRACE_SECONDS:
                    return f"rank {peers[descriptor].rank} has closed its connection"
        return ""


class PromptSwitches:
    """While any thread is inside, Python's threads take turns every 10 µs instead of every 5 ms.

    A thread that computes in Python would otherwise keep the one that waits for messages from its next round for 5 ms,
    at every hop.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._usual = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(_SWITCH_SECONDS)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._usual)

    def forget(self) -> None:
        """In a fork: the threads that are inside stay behind, and one of them may hold the lock."""
        if self._inside:
            sys.setswitchinterval(self._usual)
        self._lock, self._inside = threading.Lock(), 0


prompt_switches = PromptSwitches()


def _length_of(message: bytearray, expected: tuple[int, int, int], rank: int) -> int:
    """The length of the body; raises if the message is another than the expected one."""
    kind, number, count, length = _HEADER.unpack_from(message)
    if kind in (_GOODBYE, _FAILURE):
        raise ConnectionError
    if (kind, number, count) != expected or length > _LONGEST_BODY:
        raise RuntimeError(
            f"rank {rank} sends (kind, round, count) {(kind, number, count)} of {length} bytes, this rank expects "
            f"{expected}: they have not communicated equally often, or not in the same order"
        )
    return int(length)


def _plain(message: bytes, rank: int) -> Any:
    try:
        (value,) = from_bytes(message)
    except ValueError as error:
        raise RuntimeError(f"rank {rank} sends something that cannot be read: {error}") from error
    return value


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _leave_all() -> None:
    for channel in list(_living):
        channel.leave()


def _forget_in_fork() -> None:
    """A fork must not hold connections open that end with this process: the other ranks could not tell that it is
    dead.
    """
    for channel in list(_living):
        channel._lock = threading.RLock()  # another thread may have held it
        channel._rounds = []
        channel.lost = channel.lost or "this process is a fork of a rank, and has none of its connections"
    _living.clear()
    prompt_switches.forget()
    for connection in list(open_sockets):
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_fork)
