"""Authenticated connections to a few ranks, made once.

A rank listens, and tells the others its ``Door``: addresses, ports and a random secret. From the doors of all ranks
follows a key that only they know. A rank then calls each of its targets under all addresses of its door at the same
time, and keeps the connection on which the target first proves that it has the key; its sources call it. Both sides
prove it by an HMAC over numbers that the other has just drawn: the key is never sent, and a recorded handshake cannot
be replayed. Messages of the handshake have a fixed length, and begin with a magic word and the version of the protocol.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import os
import random
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from .addresses import own_addresses
from .plain_data import sendable

PROTOCOL = 2
PORTS = "MESHMUON_PORTS"
_MAGIC = b"meshmuon"
_HELLO = struct.Struct("!8sHII16s")  # magic, version, rank of the caller and of the called, a random number
# magic, version, another random number, proof of the called; the caller's proof follows
_CHALLENGE = struct.Struct("!8sH16s32s")
_PROOF = hashlib.sha256().digest_size
_BACKLOG = 128
_MOST_STRANGERS = 64  # callers that have not proved anything yet; the oldest makes room
_HELLO_SECONDS = 10.0  # for a caller to prove that it is a rank
_RETRY_SECONDS = 0.5  # after which an address that led nowhere is tried again

open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # which a fork must not keep


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
    """Listens at every address of this host that other ranks are told, and at no other, from its creation to
    ``close``.
    """

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
    """Makes the connections of one rank. ``run`` is called once; afterwards ``outgoing`` and ``incoming`` have all of
    them.

    Args:
        rank: this rank.
        doors: of all ranks of the process group, in its order, as all of them know them.
        targets: to which ranks it connects.
        sources: which ranks connect to it.
    """

    def __init__(self, rank: int, doors: Mapping[int, Door], targets: Iterable[int], sources: Iterable[int]) -> None:
        self._rank, self._doors = rank, doors
        self._targets, self._sources = frozenset(targets), frozenset(sources)
        self._key = hashlib.sha256("".join(door.secret for door in doors.values()).encode()).digest()
        self._troubles: dict[int, dict[str, str]] = {target: {} for target in self._targets}  # by address
        self._seconds = self._end = 0.0
        self._ended: asyncio.Future[None]  # once all connections are made, or a rank has given up
        self.outgoing: dict[int, socket.socket] = {}
        self.incoming: dict[int, socket.socket] = {}

    def run(self, listener: Listener, seconds: float) -> None:
        """Makes all connections, or raises ``UnreachableError`` and has made none; closes the listener."""
        self._seconds, self._end = seconds, time.monotonic() + seconds
        try:
            with ThreadPoolExecutor(1) as thread:  # an event loop may run in that of the caller, as in notebooks
                try:
                    thread.submit(asyncio.run, self._connect(listener)).result()
                finally:
                    self._end = 0.0  # after Ctrl-C, which only the caller hears
        except BaseException:
            self.close()
            raise
        finally:
            listener.close()

    def close(self) -> None:
        for connection in self._kept():
            connection.close()

    def _kept(self) -> list[socket.socket]:
        return [*self.outgoing.values(), *self.incoming.values()]

    async def _connect(self, listener: Listener) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        conversations = [self._accept(listening) for listening in listener.sockets]
        conversations += [
            self._call(target, *place) for target in self._targets for place in self._doors[target].places
        ]
        # the loop itself does not keep them
        _tasks = [asyncio.create_task(conversation) for conversation in conversations]
        while not self._ended.done():
            if time.monotonic() > self._end:
                missing = self._targets - self.outgoing.keys() or self._sources - self.incoming.keys()
                self._ended.set_exception(UnreachableError(self._summary(min(missing))))
            await asyncio.wait([self._ended], timeout=0.1)
        for connection in self._kept():
            asyncio.get_running_loop().remove_reader(connection)
        self._ended.result()

    async def _call(self, target: int, address: str, port: int) -> None:
        """Calls a target at one of its places until one of them has answered."""
        while target not in self.outgoing:
            try:
                with self._closed_unless_kept(socket.socket(_family(address))) as connection:
                    await asyncio.get_running_loop().sock_connect(connection, (address, port))
                    await self._introduce(target, connection)
            except OSError as error:  # also if there is no IPv6 here, or no route
                self._troubles[target][f"{address} port {port}"] = (
                    os.strerror(error.errno) if error.errno else str(error)
                )
            await asyncio.sleep(_RETRY_SECONDS)

    async def _introduce(self, target: int, connection: socket.socket) -> None:
        hello = _HELLO.pack(_MAGIC, PROTOCOL, self._rank, target, secrets.token_bytes(16))
        connection.sendall(hello)
        magic, version, number, proof = _CHALLENGE.unpack(await _received(connection, _CHALLENGE.size))
        _check_version(magic, version)
        if not hmac.compare_digest(proof, self._proof(b"called", hello, number)):
            raise ConnectionError("another program answers")
        if target in self.outgoing:
            raise ConnectionError("another address was faster")
        connection.sendall(self._proof(b"caller", hello, number))
        self._keep(target, connection, self.outgoing)

    async def _accept(self, listening: socket.socket) -> None:
        strangers: list[asyncio.Task[None]] = []  # callers that have not proved anything yet
        while True:
            with suppress(OSError):  # the caller has left again
                connection, _ = await asyncio.get_running_loop().sock_accept(listening)
                strangers = [stranger for stranger in strangers if not stranger.done()]
                if len(strangers) >= _MOST_STRANGERS:
                    strangers.pop(0).cancel()
                strangers.append(asyncio.create_task(self._answer(connection)))
            await asyncio.sleep(0)

    async def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError, asyncio.TimeoutError), self._closed_unless_kept(connection):
            await asyncio.wait_for(self._let_in(connection), _HELLO_SECONDS)

    async def _let_in(self, connection: socket.socket) -> None:
        hello = await _received(connection, _HELLO.size)
        magic, version, source, target, _ = _HELLO.unpack(hello)
        if magic != _MAGIC:
            return
        number = secrets.token_bytes(16)
        connection.sendall(_CHALLENGE.pack(_MAGIC, PROTOCOL, number, self._proof(b"called", hello, number)))
        _check_version(magic, version)
        proof = await _received(connection, _PROOF)
        has_key = hmac.compare_digest(proof, self._proof(b"caller", hello, number))
        if has_key and target == self._rank and source in self._sources - self.incoming.keys():
            self._keep(source, connection, self.incoming)

    def _keep(self, peer: int, connection: socket.socket, connections: dict[int, socket.socket]) -> None:
        connections[peer] = connection
        asyncio.get_running_loop().add_reader(connection, self._check_kept, peer, connection)
        if (
            len(self.outgoing) == len(self._targets)
            and len(self.incoming) == len(self._sources)
            and not self._ended.done()
        ):
            self._ended.set_result(None)

    def _check_kept(self, peer: int, connection: socket.socket) -> None:
        """Something has arrived: a first message, which will be read later, or the end. A rank that gives up closes
        its own.
        """
        asyncio.get_running_loop().remove_reader(connection)
        try:
            left = not connection.recv(1, socket.MSG_PEEK)
        except OSError:
            left = True
        if left and not self._ended.done():  # perhaps since this rank could not reach another, and knows why
            untold = {target for target, troubles in self._troubles.items() if troubles} - self.outgoing.keys()
            why = self._summary(min(untold)) if untold else f"rank {peer} has given up"
            self._ended.set_exception(UnreachableError(why))

    @contextmanager
    def _closed_unless_kept(self, connection: socket.socket) -> Iterator[socket.socket]:
        open_sockets.add(connection)
        connection.setblocking(False)
        try:
            yield connection
        finally:
            if connection not in self._kept():
                connection.close()

    def _proof(self, role: bytes, hello: bytes, number: bytes) -> bytes:
        return hmac.digest(self._key, role + hello + number, "sha256")

    def _summary(self, peer: int) -> str:
        troubles = "; ".join(f"{where}: {why}" for where, why in self._troubles.get(peer, {}).items())
        return f"no connection with rank {peer} after {self._seconds:g} s ({troubles or 'no answer'})"


async def _received(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = await asyncio.get_running_loop().sock_recv(connection, size - len(received))
        if not part:
            raise ConnectionError("it hung up")
        received += part
    return received


def _check_version(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise ConnectionError("another program answers")
    if version != PROTOCOL:
        raise ConnectionError(
            f"it speaks version {version} of the protocol, this rank {PROTOCOL}: use one version of meshmuon on all "
            "ranks"
        )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
