"""Ranks as threads of this process that have nothing in common but channels: real connections, no process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from meshmuon.transport.host_channel import HostChannel
from meshmuon.transport.sockets import Door

T = TypeVar("T")
SECONDS = 60.0  # no test that passes waits so long


class Doors:
    """The doors of all ranks, as the ranks publish them. ``change`` may alter what is published."""

    def __init__(self, change: Callable[[int, Door], Door] = lambda position, door: door) -> None:
        self._doors: dict[int, Door] = {}
        self._news = threading.Condition()
        self._change = change

    def publisher(self, position: int) -> Callable[[Door, float], Callable[[int], Door]]:
        """What a channel of ``position`` is given."""

        def publish(door: Door, seconds: float) -> Callable[[int], Door]:
            with self._news:
                self._doors[position] = self._change(position, door)
                self._news.notify_all()
            return lambda peer: self.door_of(peer, seconds)

        return publish

    def door_of(self, position: int, seconds: float = SECONDS) -> Door:
        with self._news:
            if not self._news.wait_for(lambda: position in self._doors, seconds):
                raise RuntimeError(f"Timed out waiting {round(1000 * seconds)}ms for the door of {position}")
            return self._doors[position]


def run_channels(size: int, main: Callable[[HostChannel, int], T], doors: Doors | None = None) -> list[T | RuntimeError]:
    """What ``main(channel, position)`` returns on each rank, or the RuntimeError that it raises; other errors are raised here.

    As in a step, a rank whose ``main`` fails closes its channel. The ranks number 100, 101, ….
    """
    doors = doors or Doors()
    results: dict[int, Any] = {}
    ranks = range(100, 100 + size)

    def run(position: int) -> None:
        channel = HostChannel(position, ranks, doors.publisher(position))
        try:
            results[position] = main(channel, position)
        except BaseException as error:
            results[position] = error
        finally:
            channel.close()

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
