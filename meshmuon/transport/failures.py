"""Lost ranks and broken connections: every rank hears of them soon, and gets an error that names the phase of the step.

A thread looks at the channels of this process a few times a second. If a rank is lost, it closes the channel and its
process group, so that what waits there wakes, and the ranks at the other ends hear of it in turn.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MeshmuonError, TransportError
from ..torch_compat import abort, cause_of, gloo_of
from .host_channel import HostChannel

_UNUSED_TAG = 0x6D6D  # no rank sends with this tag, so waiting for it times out
_SHORT = timedelta(milliseconds=1)
_SLICE = timedelta(seconds=0.5)  # of a wait for gloo
_PERIOD = 0.25  # seconds from one look at the channels to the next

# The channel that belongs to a group, or None if it has none: ``hang_up`` closes both, also if a rank is lost.
channels: weakref.WeakKeyDictionary[dist.ProcessGroup, HostChannel | None] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # of this dictionary
_watching: list[threading.Thread] = []  # the one thread, once there is a channel
_without_channel: list[dist.ProcessGroup] = []  # in which this process waits, and which end with any channel


def set_channel(group: dist.ProcessGroup, channel: HostChannel | None) -> None:
    if channel is not None:
        channel.beside_gloo = gloo_of(group) is not None
    with _lock:
        channels[group] = channel
        if channel is not None and channel.connections and not _watching:
            _watching.append(threading.Thread(target=_watch, name="meshmuon: lost ranks", daemon=True))
            _watching[0].start()


def _watch() -> None:
    while True:
        time.sleep(_PERIOD)
        _look_for_lost()  # a separate function: no group and no channel may be kept alive while this thread sleeps


def _look_for_lost() -> None:
    with _lock:
        living = [channel for channel in channels.values() if channel is not None]
    while living:
        channel = living.pop()
        if why := channel.look_for_lost(time.monotonic()):
            channel.end(why)
            with _lock:
                groups = [group for group, held in channels.items() if held is channel]
            for group in (*groups, *_without_channel):
                hang_up(group)


def wait_for(work: Any, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Waits as ``work.wait()`` does, for a collective of ``tensor``; raises soon after a rank of ``group`` was lost.

    gloo does not always wake a collective whose connection it has closed, or is not told that one has ended, since a
    fork of the lost rank holds it open. It is therefore waited for in slices: giving up a slice does not disturb the
    collective. Collectives of other backends either do not make the host wait, or are woken when the group is aborted.
    """
    channel = channels.get(group)
    if channel is None or not channel.beside_gloo or tensor.device.type != "cpu":
        work.wait()
        return
    while not _ends_within(work, _SLICE):
        if channel.lost:
            raise RuntimeError(channel.lost)


def _ends_within(work: Any, time_slice: timedelta) -> bool:
    try:
        work.wait(time_slice)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has ended by now, perhaps with an error
    return True


@contextmanager
def named_phase(phase: str, *groups: dist.ProcessGroup) -> Iterator[None]:
    """Turns errors of process groups into a TransportError that names ``phase``, and tells the ranks of ``groups``."""
    beside = [group for group in groups if channels.get(group) is None]
    try:
        _without_channel.extend(beside)
        yield
    except MeshmuonError:
        raise
    except (RuntimeError, OSError, ValueError) as raised:
        for group in groups:
            hang_up(group)
        error = cause_of(raised)
        if isinstance(error, ValueError):
            raise
        # gloo's and NCCL's errors, lost peers and timeouts, and those of connections
        raise TransportError(
            f"ranks lost each other in the {phase} of a step: {error}. A rank has died, has stalled past the group's "
            "timeout, or has failed: look for the first error in the logs of all ranks, and resume from the last "
            "checkpoint."
        ) from error
    except BaseException:  # Ctrl-C: the next collective of this rank would meet the present one of the others
        for group in groups:
            hang_up(group)
        raise
    finally:
        for group in beside:
            _without_channel.remove(group)


def hang_up(group: dist.ProcessGroup) -> None:
    """Closes the connections of a group that can no longer be used, so that ranks which wait for this one fail at once.

    Not every rank is connected to the one that died: only its neighbours notice, and the others would wait for these
    until the group's timeout. Ranks may wait in the group or in its channel, so both are closed. Backends such as NCCL
    can be aborted. gloo has no call that closes its connections. It closes them when a message times out, so this waits
    one millisecond for a message that no rank sends.
    """
    channel, backend = channels.get(group), gloo_of(group)
    if channel is not None:
        channel.end("an error in an earlier phase has closed the connections between the ranks")
    abort(group)
    for peer in range(0 if backend is None else backend.size()):
        if peer != backend.rank():
            try:
                backend.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(_SHORT)
            except RuntimeError:  # the timeout, as intended
                continue


def _forget_in_fork() -> None:
    """The thread does not survive a fork, and may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _watching.clear()
    _without_channel.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_fork)
