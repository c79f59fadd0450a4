"""Connections to a few ranks, made once, and who is let in.

A rank listens, and tells the others its ``Door``: addresses, ports and a random secret. From the doors of all ranks follows a key
that only they know. A rank then calls each of its targets under all addresses of its door at the same time, and keeps the
connection on which the target first proves that it has the key; its sources call it. Both sides prove it by an HMAC over
numbers that the other has just drawn: the key is never sent, and what was heard once is of no use again. Messages of this
handshake have a fixed length, and begin with a magic word and the version of the protocol.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import random
import secrets
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

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
_Steps = Generator[int, None, None]  # yields what it waits for on its connection: EVENT_READ or EVENT_WRITE


@sendable
@dataclass(frozen=True, slots=True)
class Door:
    """Where a rank listens, as the other ranks get to know it."""

    version: str  # of meshmuon
    places: tuple[tuple[str, int], ...]  # addresses and ports
    secret: str  # random
    trouble: str = ""  # why nobody can call, if nobody can


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
        """Stops listening."""
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
    ports = list(allowed)
    random.Random(os.getpid()).shuffle(ports)  # ranks of one host would all begin with the same
    for port in ports:
        try:
            made = socket.create_server((address, port), family=_family(address), backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        made.setblocking(False)
        open_sockets.add(made)
        return made
    raise RuntimeError(f"{PORTS}={setting}: all of these ports are in use at {address}. Name more of them")


class UnreachableError(Exception):
    """The connections cannot be made."""


@dataclass(eq=False, slots=True)
class _Dialogue:
    """One connection that is being made, in either direction."""

    socket: socket.socket
    steps: _Steps
    failed: Callable[[str], None]
    deadline: float


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
        self._targets, self._sources = tuple(targets), frozenset(sources)
        self._key = hashlib.sha256("".join(door.secret for door in doors).encode()).digest()
        self._selector = selectors.DefaultSelector()
        self._strangers: list[_Dialogue] = []
        self._seconds = 0.0
        self._retries: list[tuple[float, int, tuple[str, int]]] = []  # when, which target, where
        self._troubles: dict[int, dict[str, str]] = {target: {} for target in targets}  # by address
        self.outgoing: dict[int, socket.socket] = {}
        self.incoming: dict[int, socket.socket] = {}

    def run(self, seconds: float) -> None:
        """Makes all connections, or raises ``UnreachableError`` and has made none."""
        self._seconds, end = seconds, time.monotonic() + seconds
        try:
            for listening in self._listener.sockets:
                self._selector.register(listening, selectors.EVENT_READ)
            self._retries = [(0.0, target, place) for target in self._targets for place in self._doors[target].places]
            while missing := {*self._targets} - self.outgoing.keys() | self._sources - self.incoming.keys():
                now = time.monotonic()
                if now > end:
                    raise UnreachableError(self._summary(missing))
                self._begin_calls(now)
                for key, _ in self._selector.select(min(0.1, end - now)):
                    # An earlier event may have closed the connection, and the next one may already have its number.
                    if self._selector.get_map().get(key.fd) == key:
                        self._accept(key.fileobj) if key.data is None else self._advance(key.data)  # type: ignore[arg-type]
                for stranger in [stranger for stranger in self._strangers if stranger.deadline < now]:
                    self._close(stranger, "it took too long")
        except BaseException:
            for made in (*self.outgoing.values(), *self.incoming.values()):
                made.close()
            raise
        finally:
            kept = {*self.outgoing.values(), *self.incoming.values()}
            for key in list(self._selector.get_map().values()):
                if key.data is not None and key.data.socket not in kept:
                    key.data.socket.close()
            self._selector.close()
            self._listener.close()

    def _summary(self, missing: set[int]) -> str:
        peer = min(missing, key=lambda peer: (peer not in self._targets or peer in self.outgoing, peer))
        troubles = "; ".join(f"{where}: {why}" for where, why in self._troubles.get(peer, {}).items())
        return f"no connection with {self._name_of(peer)} after {self._seconds:g} s ({troubles or 'no answer'})"

    # The two dialogues, and what follows on both sides.

    def _call(self, target: int, connection: socket.socket) -> _Steps:
        yield selectors.EVENT_WRITE
        if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code))
        hello = _HELLO.pack(_MAGIC, PROTOCOL, self._position, target, secrets.token_bytes(16))
        connection.sendall(hello)
        answer = yield from _received(connection, _CHALLENGE.size)
        magic, version, number, proof = _CHALLENGE.unpack(answer)
        _check_version(magic, version)
        if not hmac.compare_digest(proof, self._proof(b"called", hello, number)):
            raise ConnectionError("another program answers")
        if target in self.outgoing:
            raise ConnectionError("another address was faster")
        connection.sendall(self._proof(b"caller", hello, number))
        yield from self._keep(target, connection, self.outgoing)

    def _answer(self, connection: socket.socket) -> _Steps:
        hello = yield from _received(connection, _HELLO.size)
        magic, version, source, target, _ = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise ConnectionError("another program calls")
        number = secrets.token_bytes(16)
        connection.sendall(_CHALLENGE.pack(_MAGIC, PROTOCOL, number, self._proof(b"called", hello, number)))
        _check_version(magic, version)
        proof = yield from _received(connection, _PROOF)
        if not hmac.compare_digest(proof, self._proof(b"caller", hello, number)):
            raise ConnectionError("it does not have the key")
        if target != self._position or source not in self._sources or source in self.incoming:
            raise ConnectionError("it is not expected")
        yield from self._keep(source, connection, self.incoming)

    def _keep(self, peer: int, connection: socket.socket, connections: dict[int, socket.socket]) -> _Steps:
        """Watches a connection that was made: a rank that gives up closes its own, before it has made all of them."""
        connections[peer] = connection
        yield selectors.EVENT_READ
        try:
            left = not connection.recv(1, socket.MSG_PEEK)
        except OSError:
            left = True
        if left:  # perhaps since this rank could not reach another, and knows why
            untold = {target for target, troubles in self._troubles.items() if troubles} - self.outgoing.keys()
            raise UnreachableError(self._summary(untold) if untold else f"{self._name_of(peer)} has given up")

    def _proof(self, role: bytes, hello: bytes, number: bytes) -> bytes:
        return hmac.digest(self._key, role + hello + number, "sha256")

    # What makes them go on.

    def _begin_calls(self, now: float) -> None:
        due = [retry for retry in self._retries if retry[0] <= now]
        self._retries = [retry for retry in self._retries if retry[0] > now]
        for _, target, (address, port) in due:
            if target not in self.outgoing:
                self._begin_call(target, address, port)

    def _begin_call(self, target: int, address: str, port: int) -> None:
        def failed(why: str) -> None:
            if target not in self.outgoing:
                self._troubles[target][f"{address} port {port}"] = why
                self._retries.append((time.monotonic() + _RETRY_SECONDS, target, (address, port)))

        try:
            connection = socket.socket(_family(address), socket.SOCK_STREAM)
            connection.setblocking(False)
            code = connection.connect_ex((address, port))
            if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
                connection.close()
                raise OSError(code, os.strerror(code))
        except OSError as error:  # no IPv6 here, or no route
            failed(str(error))
            return
        self._begin(_Dialogue(connection, self._call(target, connection), failed, float("inf")))

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError:  # the caller has left again
            return
        connection.setblocking(False)
        if len(self._strangers) >= _MOST_STRANGERS:
            self._close(self._strangers[0], "others call")
        stranger = _Dialogue(connection, self._answer(connection), lambda why: None, time.monotonic() + _HELLO_SECONDS)
        self._strangers.append(stranger)
        self._begin(stranger)

    def _begin(self, dialogue: _Dialogue) -> None:
        open_sockets.add(dialogue.socket)
        self._selector.register(dialogue.socket, next(dialogue.steps), dialogue)

    def _advance(self, dialogue: _Dialogue) -> None:
        try:
            events = next(dialogue.steps, 0)
        except OSError as error:
            self._close(dialogue, str(error))
            return
        if dialogue in self._strangers and dialogue.socket in self.incoming.values():
            self._strangers.remove(dialogue)
        if events:
            self._selector.modify(dialogue.socket, events, dialogue)
        else:  # its first message is here already, and will be read later
            self._selector.unregister(dialogue.socket)

    def _close(self, dialogue: _Dialogue, why: str) -> None:
        self._selector.unregister(dialogue.socket)
        dialogue.socket.close()
        if dialogue in self._strangers:
            self._strangers.remove(dialogue)
        dialogue.failed(why)


def _received(connection: socket.socket, size: int) -> Generator[int, None, bytes]:
    received = b""
    while len(received) < size:
        yield selectors.EVENT_READ
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
