"""Connections to a few ranks, made when they are first used.

A rank listens, and lets the others know its ``Door``: addresses, port and a random token. It then connects to each of its targets
under all addresses of its door at the same time and keeps the connection that answers first, and it accepts connections from its
sources. Whoever does not know the token is turned away. Once all connections are made nobody listens any more.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .addresses import own_addresses

_HELLO = struct.Struct("!8s16sII")  # magic, token of the receiver, position of the sender, position of the receiver
_ANSWER = struct.Struct("!8s16s")  # magic, proof of the receiver's token
_MAGIC = b"meshmuon"
_IN_PROGRESS = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)
_MOST_CALLERS = 512  # that wait to be accepted, or whose hello is not complete


@dataclass(frozen=True, slots=True)
class Door:
    """Where a rank listens, as the other ranks get to know it."""

    addresses: tuple[str, ...]
    port: int
    token: bytes  # 16 random bytes

    def to_bytes(self) -> bytes:
        """As one message, for a store or a gather."""
        return self.token + struct.pack("!H", self.port) + ",".join(self.addresses).encode()

    @staticmethod
    def from_bytes(message: bytes) -> Door:
        """The inverse of ``to_bytes``."""
        return Door(tuple(message[18:].decode().split(",")), struct.unpack("!H", message[16:18])[0], message[:16])


class Listener:
    """Listens for other ranks, from its creation to ``close``."""

    def __init__(self) -> None:
        if socket.has_dualstack_ipv6():
            self.socket = socket.create_server(("", 0), family=socket.AF_INET6, backlog=_MOST_CALLERS, dualstack_ipv6=True)
        else:
            self.socket = socket.create_server(("", 0), backlog=_MOST_CALLERS)
        self.socket.setblocking(False)
        self.door = Door(own_addresses(), self.socket.getsockname()[1], secrets.token_bytes(16))

    def close(self) -> None:
        """Stops listening."""
        self.socket.close()


@dataclass(slots=True)
class _Attempt:
    """A connection that is being made, in either direction."""

    socket: socket.socket
    peer: int | None  # None until an accepted connection has said who it is
    address: str
    buffer: bytearray = field(default_factory=bytearray)


class Connecting:
    """Makes the connections of one rank. ``run`` is called once; afterwards ``outgoing`` and ``incoming`` have all of them.

    Args:
        position: this rank, counted within its process group.
        targets: to which positions it connects.
        sources: which positions connect to it.
        listener: its own; it is closed in the end.
        door_of: the door of a target; may wait for it.
        name_of: what errors call a position.
    """

    def __init__(
        self,
        position: int,
        targets: Sequence[int],
        sources: Sequence[int],
        listener: Listener,
        door_of: Callable[[int], Door],
        name_of: Callable[[int], str],
    ) -> None:
        self._position = position
        self._sources = frozenset(sources)
        self._targets = tuple(targets)
        self._listener = listener
        self._door_of = door_of
        self._name_of = name_of
        self._selector = selectors.DefaultSelector()
        self._doors: dict[int, Door] = {}
        self._attempts: dict[int, list[_Attempt]] = {}  # by target
        self._callers: list[_Attempt] = []  # accepted, and not known yet
        self._refusals: dict[int, list[str]] = {}  # by target, why attempts have failed
        self.outgoing: dict[int, socket.socket] = {}
        self.incoming: dict[int, socket.socket] = {}

    def run(self, seconds: float) -> None:
        """Makes all connections, or raises ``RuntimeError`` or ``OSError`` and has made none."""
        deadline = time.monotonic() + seconds
        try:
            self._selector.register(self._listener.socket, selectors.EVENT_READ, self._accept)
            for target in self._targets:
                self._begin(target)
            while missing := self._missing():
                left = deadline - time.monotonic()
                events = self._selector.select(left) if left > 0 else []
                if not events and left <= 0:
                    names = ", ".join(map(self._name_of, missing))
                    raise RuntimeError(f"Timed out waiting {round(1000 * seconds)}ms to be connected with {names}")
                for key, _ in events:
                    # An earlier event may have closed the connection, and the next one may already have its number.
                    if self._selector.get_map().get(key.fd) == key:
                        key.data()
        except BaseException:
            for made in (*self.outgoing.values(), *self.incoming.values()):
                made.close()
            raise
        finally:
            for attempt in (*self._callers, *(attempt for attempts in self._attempts.values() for attempt in attempts)):
                attempt.socket.close()
            self._selector.close()
            self._listener.close()

    def _missing(self) -> list[int]:
        return sorted({*self._targets} - self.outgoing.keys() | self._sources - self.incoming.keys())

    def _begin(self, target: int) -> None:
        """Connects to every address of ``target`` at once."""
        door = self._doors[target] = self._door_of(target)
        self._attempts[target], self._refusals[target] = [], []
        for address in door.addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                connection = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:  # no IPv6 here
                self._refusals[target].append(f"{address}: {error}")
                continue
            attempt = _Attempt(connection, target, address)
            self._attempts[target].append(attempt)
            connection.setblocking(False)
            code = connection.connect_ex((address, door.port))
            if code in _IN_PROGRESS:
                self._selector.register(connection, selectors.EVENT_WRITE, lambda attempt=attempt: self._greet(attempt))
            else:
                self._drop(attempt, os.strerror(code))
        self._check_reachable(target)

    def _greet(self, attempt: _Attempt) -> None:
        """The connection stands or has failed: says who calls and whom."""
        assert attempt.peer is not None
        try:
            if code := attempt.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            attempt.socket.send(_HELLO.pack(_MAGIC, self._doors[attempt.peer].token, self._position, attempt.peer))
        except OSError as error:
            self._give_up(attempt, str(error))
            return
        self._selector.modify(attempt.socket, selectors.EVENT_READ, lambda: self._hear_answer(attempt))

    def _hear_answer(self, attempt: _Attempt) -> None:
        peer = attempt.peer
        assert peer is not None
        trouble = self._read(attempt, _ANSWER.size)
        if trouble:
            self._give_up(attempt, trouble)
        elif len(attempt.buffer) == _ANSWER.size:
            if _ANSWER.unpack(attempt.buffer) != (_MAGIC, _proof(self._doors[peer].token)):
                self._give_up(attempt, "another program answers")
                return
            self._attempts[peer].remove(attempt)
            self._establish(attempt, self.outgoing)
            for rival in self._attempts.pop(peer):
                self._forget(rival)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.socket.accept()
        except OSError:  # the caller has left again
            return
        if len(self._callers) >= _MOST_CALLERS:  # strangers that say nothing make room for those that come
            self._forget(self._callers.pop(0))
        connection.setblocking(False)
        caller = _Attempt(connection, None, str(address[0]))
        self._callers.append(caller)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear_hello(caller))

    def _hear_hello(self, caller: _Attempt) -> None:
        """Lets in a source that knows the token, under the first of its addresses that gets through."""
        trouble = self._read(caller, _HELLO.size)
        if not trouble and len(caller.buffer) < _HELLO.size:
            return
        self._callers.remove(caller)
        if not trouble:
            magic, token, source, target = _HELLO.unpack(caller.buffer)
            known = magic == _MAGIC and hmac.compare_digest(token, self._listener.door.token) and target == self._position
            if known and source in self._sources and source not in self.incoming:
                try:
                    caller.socket.send(_ANSWER.pack(_MAGIC, _proof(token)))
                except OSError:
                    self._forget(caller)
                    return
                caller.peer = source
                self._establish(caller, self.incoming)
                return
        self._forget(caller)

    def _establish(self, attempt: _Attempt, connections: dict[int, socket.socket]) -> None:
        """Keeps a connection, and watches it: a rank that gives up closes its own, before it has made all of them."""
        assert attempt.peer is not None
        attempt.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        attempt.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connections[attempt.peer] = attempt.socket
        self._selector.modify(attempt.socket, selectors.EVENT_READ, lambda: self._watch(attempt))

    def _watch(self, attempt: _Attempt) -> None:
        assert attempt.peer is not None
        try:
            first = attempt.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        if not first:
            raise RuntimeError(f"{self._name_of(attempt.peer)} has closed its connection")
        self._selector.unregister(attempt.socket)  # its first message is here already, and will be read later

    def _read(self, attempt: _Attempt, size: int) -> str:
        """Reads what is there, up to ``size`` bytes in all; returns what went wrong, or nothing."""
        try:
            part = attempt.socket.recv(size - len(attempt.buffer))
        except BlockingIOError:
            return ""
        except OSError as error:
            return str(error)
        attempt.buffer += part
        return "" if part else "it hung up"

    def _give_up(self, attempt: _Attempt, why: str) -> None:
        """One address leads nowhere; raises if it was the last of them."""
        assert attempt.peer is not None
        self._drop(attempt, why)
        self._check_reachable(attempt.peer)

    def _drop(self, attempt: _Attempt, why: str) -> None:
        assert attempt.peer is not None
        self._attempts[attempt.peer].remove(attempt)
        self._refusals[attempt.peer].append(f"{attempt.address}: {why}")
        self._forget(attempt)

    def _check_reachable(self, target: int) -> None:
        if not self._attempts[target]:
            raise RuntimeError(
                f"{self._name_of(target)} cannot be reached at port {self._doors[target].port} "
                f"({'; '.join(self._refusals[target])}). If it is alive, set GLOO_SOCKET_IFNAME to the network interface that "
                "connects the hosts"
            )

    def _forget(self, attempt: _Attempt) -> None:
        if attempt.socket.fileno() >= 0 and attempt.socket in self._selector.get_map():
            self._selector.unregister(attempt.socket)
        attempt.socket.close()


def _proof(token: bytes) -> bytes:
    """Shows that the rank that answers has the token, and does not just echo what it hears."""
    return hashlib.sha256(token + b"answer").digest()[:16]
