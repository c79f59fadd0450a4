"""Ranks as threads of this process that have nothing in common but channels: real connections, no process group."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from meshmuon.transport.connecting import Door
from meshmuon.transport.host_channel import HostChannel, Share, open_channel
from meshmuon.transport.plain_data import from_bytes, to_bytes

T = TypeVar("T")
SECONDS = 60.0  # no test that passes waits so long


class Doors:
    """The messages that ranks share while they connect. ``change`` may alter the door of a rank before the others
    see it.
    """

    def __init__(self, size: int, change: Callable[[int, Door], Door] = lambda position, door: door) -> None:
        self._shared: dict[int, dict[int, bytes]] = {}  # by turn and position
        self._news = threading.Condition()
        self._size, self._change = size, change

    def sharer(self, position: int) -> Share:
        """What ``open_channel`` of ``position`` is given."""
        turns = itertools.count()

        def share(message: bytes) -> list[bytes]:
            turn = next(turns)
            if turn == 0:
                (door,) = from_bytes(message)
                message = to_bytes([self._change(position, door)])
            with self._news:
                shared = self._shared.setdefault(turn, {})
                shared[position] = message
                self._news.notify_all()
                if not self._news.wait_for(lambda: len(shared) == self._size, SECONDS):
                    raise RuntimeError(f"only {sorted(shared)} have come")
            return [shared[k] for k in range(self._size)]

        return share


def run_channels(
    size: int, main: Callable[[HostChannel, int], T], doors: Doors | None = None
) -> list[T | RuntimeError]:
    """What ``main(channel, position)`` returns on each rank, or the RuntimeError that it raises; other errors are
    raised here.

    As in a step, a rank whose ``main`` fails ends its channel. The ranks number 100, 101, ….
    """
    doors = doors or Doors(size)
    results: dict[int, Any] = {}
    ranks = range(100, 100 + size)

    def run(position: int) -> None:
        try:
            channel = open_channel(ranks[position], ranks, doors.sharer(position))
            if isinstance(channel, str):
                raise RuntimeError(channel)
        except BaseException as error:
            results[position] = error
            return
        try:
            results[position] = main(channel, position)
        except BaseException as error:
            results[position] = error
            channel.end("failed")
        finally:
            channel.leave()

    threads = [threading.Thread(target=run, args=(position,), daemon=True) for position in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    assert len(results) == size, f"only {sorted(results)} of {size} have ended"
    for error in results.values():
        if isinstance(error, BaseException) and not isinstance(error, RuntimeError):
            raise error
    return [results[position] for position in range(size)]
