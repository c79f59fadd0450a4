"""Small messages between the ranks of a process group, through host memory, over O(log W) connections per rank.

gloo's all-reduce is a ring, 2·(W − 1) hops one after the other, and a gloo group connects every pair of ranks. Here a maximum
takes ⌈log2 W⌉ hops (``dissemination.py``), and a rank has as many connections in each direction.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from .dissemination import distances, told_in_round
from .sockets import Connecting, Door, Listener

_T = TypeVar("_T")
_HEADER = struct.Struct("!BBxxIQ")  # what it is, the round, how many there were before it, bytes that follow
_MAXIMUM, _OBJECTS = 1, 2
_LARGEST_PART = 1 << 20  # bytes that one system call is given

_living: weakref.WeakSet[HostChannel] = weakref.WeakSet()


class HostChannel:
    """Connections between the ranks of one process group, shared by all that communicate over the group.

    All ranks call ``start_maximum`` and ``all_gather`` in the same order. The connections are made by the first of these calls.
    A rank that fails in one of them must ``close`` the channel: those that wait for it then fail at once, and so on until all
    have heard. A closed channel stays closed.

    Args:
        position: this rank, counted within the group.
        ranks: the ranks of the group.
        publish: makes the door of this rank known, and returns the function that finds the door of a position. Every rank calls
            it once, when it first communicates; it may wait for the others, for as many seconds as it is given.
    """

    def __init__(self, position: int, ranks: Sequence[int], publish: Callable[[Door, float], Callable[[int], Door]]) -> None:
        self._position = position
        self._ranks = tuple(ranks)
        self._publish = publish
        self._distances = distances(len(ranks))
        self._outgoing: list[socket.socket] = []  # one per round
        self._incoming: list[socket.socket] = []
        self._started = 0  # maxima and gathers
        self._connected = self._closed = False
        _living.add(self)

    def __del__(self) -> None:
        self._release()

    @property
    def connections(self) -> int:
        """How many connections this rank has to others."""
        return len(self._outgoing) + len(self._incoming)

    def start_maximum(self, words: Sequence[int], seconds: float) -> PendingMaximum:
        """Starts to find the largest of each of ``words``, integers of 64 bits, over all ranks."""
        self._begin(seconds)
        return PendingMaximum(self, words, seconds, self._started)

    def all_gather(self, value: _T, seconds: float) -> dict[int, _T]:
        """Rank → its ``value``."""
        self._begin(seconds)
        deadline = Deadline(seconds)
        messages = {self._position: pickle.dumps(value)}
        size = len(self._ranks)
        for number, distance in enumerate(self._distances):
            told = {position: messages[position] for position in told_in_round(self._position, size, distance)}
            body = pickle.dumps(told)
            header = _HEADER.pack(_OBJECTS, number, self._started, len(body))
            messages |= pickle.loads(self._swap(number, header + body, deadline))
        values: dict[int, Any] = {self._ranks[position]: pickle.loads(messages[position]) for position in range(size)}
        return values

    def close(self) -> None:
        """Ends all connections, also for the ranks at their other ends. A fork of the process has none to end."""
        for connection in (*self._outgoing, *self._incoming):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other end was faster
                continue
        self._release()
        self._closed = True

    def _release(self) -> None:
        for connection in (*self._outgoing, *self._incoming):
            connection.close()
        self._outgoing, self._incoming = [], []

    def _begin(self, seconds: float) -> None:
        if self._closed:
            raise RuntimeError("an error in an earlier phase has closed the connections between the ranks")
        if not self._connected:
            self._connect(seconds)
        self._started += 1

    def _connect(self, seconds: float) -> None:
        size, position = len(self._ranks), self._position
        if size > 1:
            listener = Listener()
            try:
                door_of = self._publish(listener.door, seconds)
            except BaseException:
                listener.close()
                raise
            targets = [(position + distance) % size for distance in self._distances]
            sources = [(position - distance) % size for distance in self._distances]
            connecting = Connecting(position, targets, sources, listener, door_of, lambda peer: f"rank {self._ranks[peer]}")
            connecting.run(seconds)
            self._outgoing = [connecting.outgoing[target] for target in targets]
            self._incoming = [connecting.incoming[source] for source in sources]
        self._connected = True

    def _swap(self, number: int, message: bytes, deadline: Deadline) -> bytes:
        """Sends a message of any length in a round while receiving that of the other rank, and returns its body."""
        sending, receiving = self._outgoing[number], Receiving(self, number, _OBJECTS, self._started, _HEADER.size)
        rest = memoryview(message)
        while True:
            rest = rest[self.send(number, rest) :]
            done = receiving.read()
            if done and not rest:
                return bytes(receiving.body)
            waits = select.poll()
            if rest:
                waits.register(sending, select.POLLOUT)
            if not done:
                waits.register(self._incoming[number], select.POLLIN)
            deadline.wait(waits, self._target(number) if done else self._source(number))

    def send(self, number: int, message: bytes | memoryview) -> int:
        """Sends as much of ``message`` as fits into the connection's buffer; returns how much that was."""
        if not message:
            return 0
        try:
            return self._outgoing[number].send(message[:_LARGEST_PART])
        except BlockingIOError:
            return 0
        except (OSError, IndexError) as error:
            raise RuntimeError(f"rank {self._target(number)} has closed its connection ({error})") from error

    def receive(self, number: int, into: memoryview) -> int:
        """Receives what is there, at most as much as fits; returns how much that was."""
        try:
            count = self._incoming[number].recv_into(into)
        except BlockingIOError:
            return 0
        except (OSError, IndexError) as error:
            raise RuntimeError(f"rank {self._source(number)} has closed its connection ({error})") from error
        if count == 0:
            raise RuntimeError(f"rank {self._source(number)} has closed its connection")
        return count

    def wait_for_message(self, number: int, deadline: Deadline) -> None:
        """Returns once something of the message of a round is there."""
        waits = select.poll()
        waits.register(self._incoming[number], select.POLLIN)
        deadline.wait(waits, self._source(number))

    @property
    def rounds(self) -> int:
        """How many rounds it takes until every rank has heard of every other."""
        return len(self._distances)

    def _source(self, number: int) -> int:
        return self._ranks[(self._position - self._distances[number]) % len(self._ranks)]

    def _target(self, number: int) -> int:
        return self._ranks[(self._position + self._distances[number]) % len(self._ranks)]

    def check_header(self, header: bytes | bytearray, expected: tuple[int, int, int], number: int) -> int:
        """The length of the body; raises if the message is another than the expected one."""
        kind, sent_in, count, length = _HEADER.unpack_from(header)
        if (kind, sent_in, count) != expected:
            raise RuntimeError(
                f"rank {self._source(number)} sends (kind, round, count) {(kind, sent_in, count)}, this rank expects {expected}: "
                "they have not communicated equally often, or not in the same order"
            )
        return int(length)


class Deadline:
    """When a wait is over."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def wait(self, waits: select.poll, rank: int) -> None:
        """Waits until something happens; raises ``RuntimeError`` that names ``rank`` after the time."""
        left = self._end - time.monotonic()
        if left <= 0 or not waits.poll(1000 * left):
            raise RuntimeError(f"Timed out waiting {round(1000 * self._seconds)}ms for rank {rank}")


class Receiving:
    """A message that is being received.

    Args:
        channel: what it comes over.
        number: of its round.
        kind: what it must be.
        count: the how-manieth it must be.
        size: bytes that any such message has at least, header included.
    """

    def __init__(self, channel: HostChannel, number: int, kind: int, count: int, size: int) -> None:
        self._channel = channel
        self._expected = kind, number, count
        self._number = number
        self._buffer = bytearray(size)
        self._filled = 0
        self._length: int | None = None

    @property
    def body(self) -> memoryview:
        """What follows the header."""
        return memoryview(self._buffer)[_HEADER.size :]

    def read(self) -> bool:
        """Reads what is there; returns whether the message is complete."""
        while self._filled < len(self._buffer) or self._length is None:
            count = self._channel.receive(self._number, memoryview(self._buffer)[self._filled :])
            if count == 0:
                return False
            self._filled += count
            if self._length is None and self._filled >= _HEADER.size:
                self._length = self._channel.check_header(self._buffer, self._expected, self._number)
                missing = _HEADER.size + self._length - len(self._buffer)
                self._buffer += bytes(missing)
        return True


class PendingMaximum:
    """The largest of each word over all ranks, on its way.

    ``advance`` does what can be done without waiting, ``wait`` all that is left; the first round is sent from the beginning.
    """

    def __init__(self, channel: HostChannel, words: Sequence[int], seconds: float, count: int) -> None:
        self._channel = channel
        self._deadline = Deadline(seconds)
        self._words = tuple(words)
        self._format = struct.Struct(f"!{len(words)}q")
        self._rounds: Iterator[int] = self._run(count)
        self._awaited: int | None = None  # the round whose message is missing; None when all are here
        self.advance()

    def advance(self) -> bool:
        """Goes on as far as it can without waiting; returns whether the result is known."""
        self._awaited = next(self._rounds, None)
        return self._awaited is None

    def wait(self) -> tuple[int, ...]:
        """The largest of each word over all ranks."""
        while self._awaited is not None:
            self._channel.wait_for_message(self._awaited, self._deadline)
            self.advance()
        return self._words

    def _run(self, count: int) -> Iterator[int]:
        """Runs all rounds; yields the number of a round whose message is not here yet."""
        body = self._format
        for number in range(self._channel.rounds):
            message = _HEADER.pack(_MAXIMUM, number, count, body.size) + body.pack(*self._words)
            if self._channel.send(number, message) < len(message):  # the rank has not read what it was sent long before
                raise RuntimeError("a message of a few bytes does not fit into the buffer of a connection")
            receiving = Receiving(self._channel, number, _MAXIMUM, count, _HEADER.size + body.size)
            while not receiving.read():
                yield number
            self._words = tuple(map(max, self._words, body.unpack(receiving.body)))


def _forget_in_fork() -> None:
    """A fork must not hold connections open that end with this process: the other ranks could not tell that it is dead."""
    for channel in list(_living):
        channel._release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_fork)
