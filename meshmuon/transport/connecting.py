"""Authenticated connections to a few ranks, made once.

A rank listens, and tells the others its ``Door``: addresses, ports and a random secret. From the doors of all ranks follows a key
that only they know. A rank then calls each of its targets under all addresses of its door at the same time, and keeps the
connection on which the target first proves that it has the key; its sources call it. Both sides prove it by an HMAC over
numbers that the other has just drawn: the key is never sent, and a recorded handshake cannot be replayed. Messages of the
handshake have a fixed length, and begin with a magic word and the version of the protocol.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import math
import os
import random
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from .addresses import own_addresses
from .plain_data import sendable

PROTOCOL = 1
PORTS = "MESHMUON_PORTS"
_MAGIC = b"meshmuon"
_HELLO = struct.Struct("!8sHII16s")  # magic, version, position of the caller and of the called, a random number
_CHALLENGE = struct.Struct("!8sH16s32s")  # magic, version, another random number, proof of the called; the caller's proof follows
_PROOF = hashlib.sha256().digest_size
_BACKLOG = 128
_MOST_STRANGERS = 64  # callers that have not proved anything yet; the oldest makes room
_HELLO_SECONDS = 10.0  # for a caller to prove that it is a rank
_RETRY_SECONDS = 0.5  # after which an address that led nowhere is tried again

open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # which a fork must not keep
_T = TypeVar("_T")
# A conversation yields the socket that it waits for, for which event, and when it goes on without one.
_Wait = tuple[socket.socket | None, int, float]
_Conversation = Generator[_Wait, None, _T]


@sendable
@dataclass(frozen=True, slots=True)
class Door:
    """Where a rank listens, as the other ranks get to know it."""

    version: str  # of meshmuon
    places: tuple[tuple[str, int], ...]  # addresses and ports
    secret: str  # random
    trouble: str = ""  # why the rank cannot be reached, if it cannot


class UnreachableError(Exception):
    """The connections cannot be made."""


class Listener:
    """Listens at every address of this host that other ranks are told, and at no other, from its creation to ``close``."""

    def __init__(self, version: str) -> None:
        self.sockets: list[socket.socket] = []
        places, trouble = [], ""
        try:
            for address in own_addresses():
                try:
                    listening = _listening(address)
                except OSError as error:  # the host's name stands for an address of another host, or there is no IPv6
                    trouble = f"{address}: {error}"
                    continue
                self.sockets.append(listening)
                places.append((address, int(listening.getsockname()[1])))
        except (RuntimeError, OSError) as error:
            self.close()
            places, trouble = [], str(error)
        self.door = Door(version, tuple(places), secrets.token_hex(16), "" if places else trouble)

    def close(self) -> None:
        for listening in self.sockets:
            listening.close()
        self.sockets = []


def _listening(address: str) -> socket.socket:
    """A socket that listens at ``address``, on a port of ``MESHMUON_PORTS`` if that is set, else on any."""
    setting = os.environ.get(PORTS) or "0-0"
    first, _, last = setting.partition("-")
    try:
        allowed = range(int(first), int(last or first) + 1)
    except ValueError:
        allowed = range(0)
    if not allowed or not 0 <= allowed[0] <= allowed[-1] < 1 << 16:
        raise RuntimeError(
            f"{PORTS}={setting!r}: write the first and the last port that ranks may listen on, such as 29600-29699"
        )
    # In random order: ranks of one host would all begin with the same.
    for port in random.Random(os.getpid()).sample(allowed, len(allowed)):
        try:
            listening = socket.create_server((address, port), family=_family(address), backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        listening.setblocking(False)
        open_sockets.add(listening)
        return listening
    raise RuntimeError(f"{PORTS}={setting}: all of these ports are in use at {address}. Name more of them")


class Connecting:
    """Makes the connections of one rank. ``run`` is called once; afterwards ``outgoing`` and ``incoming`` have all of them.

    Args:
        position: this rank, counted within its process group.
        doors: of all ranks of the group, as all of them know them.
        targets: to which positions it connects.
        sources: which positions connect to it.
        listener: its own; it is closed in the end.
        name_of: what errors call a position.
    """

    def __init__(
        self,
        position: int,
        doors: Sequence[Door],
        targets: Sequence[int],
        sources: Sequence[int],
        listener: Listener,
        name_of: Callable[[int], str],
    ) -> None:
        self._position, self._doors, self._listener, self._name_of = position, doors, listener, name_of
        self._targets, self._sources = frozenset(targets), frozenset(sources)
        self._key = hashlib.sha256("".join(door.secret for door in doors).encode()).digest()
        self._waits: dict[_Conversation[None], _Wait] = {}  # of the conversations under way
        self._strangers: dict[socket.socket, _Conversation[None]] = {}  # those whose caller has not proved anything yet
        self._troubles: dict[int, dict[str, str]] = {target: {} for target in targets}  # by address
        self._seconds = 0.0
        self.outgoing: dict[int, socket.socket] = {}
        self.incoming: dict[int, socket.socket] = {}

    def run(self, seconds: float) -> None:
        """Makes all connections, or raises ``UnreachableError`` and has made none."""
        self._seconds, end = seconds, time.monotonic() + seconds
        try:
            for listening in self._listener.sockets:
                self._go_on(self._accept(listening))
            for target in self._targets:
                for place in self._doors[target].places:
                    self._go_on(self._call(target, *place))
            while missing := self._targets - self.outgoing.keys() | self._sources - self.incoming.keys():
                if time.monotonic() > end:
                    raise UnreachableError(self._summary(missing))
                self._wait()
        except BaseException:
            for connection in (*self.outgoing.values(), *self.incoming.values()):
                connection.close()
            raise
        finally:
            for conversation in self._waits:
                conversation.close()
            self._listener.close()

    def _wait(self) -> None:
        """Waits until a conversation can go on, but not for long."""
        events = select.poll()
        for connection, event, _ in self._waits.values():
            if connection is not None:
                events.register(connection, event)
        happened = {descriptor for descriptor, _ in events.poll(100)}
        now = time.monotonic()
        for conversation, (connection, _, until) in list(self._waits.items()):
            due = until <= now or (connection is not None and connection.fileno() in happened)
            if due and conversation in self._waits:  # an earlier one may have ended it
                self._go_on(conversation)

    def _go_on(self, conversation: _Conversation[None]) -> None:
        try:
            self._waits[conversation] = next(conversation)
        except StopIteration:
            self._waits.pop(conversation, None)

    def _call(self, target: int, address: str, port: int) -> _Conversation[None]:
        """Calls a target at one of its places until one of them has answered."""
        while target not in self.outgoing:
            try:
                with self._closed_unless_kept(socket.socket(_family(address), socket.SOCK_STREAM)) as connection:
                    code = connection.connect_ex((address, port))
                    if code in (errno.EINPROGRESS, errno.EWOULDBLOCK):
                        yield connection, select.POLLOUT, math.inf
                        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if code:
                        raise OSError(code, os.strerror(code))
                    yield from self._introduce(target, connection)
            except OSError as error:  # also if there is no IPv6 here, or no route
                self._troubles[target][f"{address} port {port}"] = str(error)
                yield None, 0, time.monotonic() + _RETRY_SECONDS

    def _introduce(self, target: int, connection: socket.socket) -> _Conversation[None]:
        hello = _HELLO.pack(_MAGIC, PROTOCOL, self._position, target, secrets.token_bytes(16))
        connection.sendall(hello)
        magic, version, number, proof = _CHALLENGE.unpack((yield from _received(connection, _CHALLENGE.size, math.inf)))
        _check_version(magic, version)
        if not hmac.compare_digest(proof, self._proof(b"called", hello, number)):
            raise ConnectionError("another program answers")
        if target in self.outgoing:
            raise ConnectionError("another address was faster")
        connection.sendall(self._proof(b"caller", hello, number))
        yield from self._keep(target, connection, self.outgoing)

    def _accept(self, listening: socket.socket) -> _Conversation[None]:
        while True:
            yield listening, select.POLLIN, math.inf
            try:
                connection, _ = listening.accept()
            except OSError:  # the caller has left again
                continue
            if len(self._strangers) >= _MOST_STRANGERS:
                oldest = next(iter(self._strangers.values()))
                oldest.close()
                del self._waits[oldest]
            self._strangers[connection] = self._answer(connection)
            self._go_on(self._strangers[connection])

    def _answer(self, connection: socket.socket) -> _Conversation[None]:
        until = time.monotonic() + _HELLO_SECONDS
        with suppress(OSError), self._closed_unless_kept(connection):
            hello = yield from _received(connection, _HELLO.size, until)
            magic, version, source, target, _ = _HELLO.unpack(hello)
            if magic != _MAGIC:
                return
            number = secrets.token_bytes(16)
            connection.sendall(_CHALLENGE.pack(_MAGIC, PROTOCOL, number, self._proof(b"called", hello, number)))
            _check_version(magic, version)
            proof = yield from _received(connection, _PROOF, until)
            has_key = hmac.compare_digest(proof, self._proof(b"caller", hello, number))
            if has_key and target == self._position and source in self._sources - self.incoming.keys():
                yield from self._keep(source, connection, self.incoming)

    def _keep(self, peer: int, connection: socket.socket, connections: dict[int, socket.socket]) -> _Conversation[None]:
        """Watches a connection that was made: a rank that gives up closes its own, before it has made all of them."""
        connections[peer] = connection
        self._strangers.pop(connection, None)
        yield connection, select.POLLIN, math.inf
        try:
            left = not connection.recv(1, socket.MSG_PEEK)  # else its first message is here already, and will be read later
        except OSError:
            left = True
        if left:  # perhaps since this rank could not reach another, and knows why
            untold = {target for target, troubles in self._troubles.items() if troubles} - self.outgoing.keys()
            raise UnreachableError(self._summary(untold) if untold else f"{self._name_of(peer)} has given up")

    @contextmanager
    def _closed_unless_kept(self, connection: socket.socket) -> Iterator[socket.socket]:
        open_sockets.add(connection)
        connection.setblocking(False)
        try:
            yield connection
        finally:
            self._strangers.pop(connection, None)
            if connection not in (*self.outgoing.values(), *self.incoming.values()):
                connection.close()

    def _proof(self, role: bytes, hello: bytes, number: bytes) -> bytes:
        return hmac.digest(self._key, role + hello + number, "sha256")

    def _summary(self, missing: Set[int]) -> str:
        peer = min(missing, key=lambda peer: (peer not in self._targets or peer in self.outgoing, peer))
        troubles = "; ".join(f"{where}: {why}" for where, why in self._troubles.get(peer, {}).items())
        return f"no connection with {self._name_of(peer)} after {self._seconds:g} s ({troubles or 'no answer'})"


def _received(connection: socket.socket, size: int, until: float) -> _Conversation[bytes]:
    received = b""
    while len(received) < size:
        yield connection, select.POLLIN, until
        if time.monotonic() >= until:
            raise ConnectionError("it took too long")
        try:
            part = connection.recv(size - len(received))
        except BlockingIOError:
            continue
        if not part:
            raise ConnectionError("it hung up")
        received += part
    return received


def _check_version(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise ConnectionError("another program answers")
    if version != PROTOCOL:
        raise ConnectionError(
            f"it speaks version {version} of the protocol, this rank {PROTOCOL}: use one version of meshmuon on all ranks"
        )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
