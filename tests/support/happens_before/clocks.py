"""Vector clocks of streams and of the host, the accesses to each block of memory, and what nothing orders.

Every stream, and the host, counts what it does. A stream's clock says for every other stream up to which count it has
waited for it. An access happens before whatever runs on a stream whose clock has reached the access's count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .footprints import Footprint

HOST = 0  # the number of the host among the streams

Clock = dict[int, int]


@dataclass(frozen=True, slots=True)
class Access:
    """A read or a write of a part of a block, by the ``count``-th piece of work of a stream."""

    stream: int
    count: int
    writes: bool
    footprint: Footprint
    where: str  # operation, and the line of the package that asked for it


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that would go wrong on a GPU."""

    kind: str  # "race", "lifetime", "host wait" or "misuse"
    text: str
    sites: tuple[str, ...] = ()  # lines of the package

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Clocks:
    """The clocks of one rank."""

    def __init__(self) -> None:
        self.names = {HOST: "host"}
        self._clocks: dict[int, Clock] = {HOST: {HOST: 0}}

    def new_stream(self, name: str) -> int:
        """The number of a new stream, which nothing has been given to."""
        stream = len(self.names)
        self.names[stream] = name
        self._clocks[stream] = {stream: 0}
        return stream

    def launch(self, stream: int) -> int:
        """The count of new work of a stream; work runs after what the host had waited for when it launched it."""
        clock = self._clocks[stream]
        if stream != HOST:
            self._clocks[HOST][HOST] += 1
            _join(clock, self._clocks[HOST])
        clock[stream] += 1
        return clock[stream]

    def snapshot(self, stream: int) -> Clock:
        """All that has happened before what the stream is given next."""
        return dict(self._clocks[stream])

    def beside(self, stream: int) -> Iterator[int]:
        """The other streams that may still be working when the newest work of ``stream`` runs."""
        clock = self._clocks[stream]
        for other, its_clock in self._clocks.items():
            if other not in (HOST, stream) and its_clock[other] > clock.get(other, 0):
                yield other

    def everything(self) -> Clock:
        """All that any stream has been given."""
        clock: Clock = {}
        for other in self._clocks.values():
            _join(clock, other)
        return clock

    def wait(self, stream: int, clock: Clock) -> None:
        """What the stream is given next runs after all that ``clock`` has reached."""
        _join(self._clocks[stream], clock)

    def reached(self, stream: int, access: Access) -> bool:
        """Whether ``access`` happens before what the stream is given next: that comes after all that the host has
        waited for.
        """
        return any(self._clocks[waiting].get(access.stream, 0) >= access.count for waiting in (stream, HOST))


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if count > clock.get(stream, 0):
            clock[stream] = count


@dataclass(slots=True)
class History:
    """What was done to a block: the latest access of each kind, stream and footprint."""

    latest: dict[tuple[int, bool, Footprint], Access] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)  # streams that ``record_stream`` has named

    def add(self, access: Access) -> None:
        """Adds an access; earlier ones of the same stream to the same bytes happen before it and say nothing more."""
        self.latest[access.stream, access.writes, access.footprint] = access

    def unordered(self, access: Access, clocks: Clocks) -> Iterator[Access]:
        """Earlier accesses that conflict with ``access`` and that nothing orders before it."""
        for earlier in self.latest.values():
            if earlier.stream == access.stream or not (earlier.writes or access.writes):
                continue
            if not clocks.reached(access.stream, earlier) and earlier.footprint.overlaps(access.footprint):
                yield earlier

    def unfinished(self, owner: int, clocks: Clocks) -> Iterator[Access]:
        """Accesses that neither ``record_stream`` nor the order of the stream ``owner``, which allocated the block,
        protects.
        """
        for access in self.latest.values():
            if (
                access.stream not in (owner, HOST)
                and access.stream not in self.recorded
                and not clocks.reached(owner, access)
            ):
                yield access


def describe(accesses: Iterable[Access], clocks: Clocks) -> str:
    """Accesses in words."""
    return "; ".join(
        f"{'write' if access.writes else 'read'} on stream {clocks.names[access.stream]} by {access.where}"
        for access in accesses
    )
