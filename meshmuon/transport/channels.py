"""The channel that belongs to a process group, and how its ranks find each other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..torch_compat import default_store, gloo_of
from .failures import close_with, existing_channel
from .groups import moves, timeout_of_group
from .host_channel import HostChannel
from .sockets import Door


def channel_of(group: dist.ProcessGroup) -> HostChannel | None:
    """The channel between the ranks of ``group``; None where its own collectives do as well, or where there are no processes.

    The ranks tell each other their doors over the group itself if it is gloo's, which notices a lost rank at once, else (NCCL)
    over the store of the default group. Other groups that take host memory (MPI, and those of tests) use their collectives.
    """
    channel = existing_channel(group)
    if channel is None and (gloo_of(group) is not None or not moves(group, torch.device("cpu"))):
        ranks = dist.get_process_group_ranks(group)
        publish = _over_group(group) if gloo_of(group) is not None else _over_store(group, len(ranks))
        channel = HostChannel(dist.get_group_rank(group, dist.get_rank()), ranks, publish)
        close_with(group, channel)
    return channel


def seconds_of(group: dist.ProcessGroup) -> float:
    """How long ranks of ``group`` wait for each other."""
    return (timeout_of_group(group) or timedelta(minutes=30)).total_seconds()


def _over_group(group: dist.ProcessGroup) -> Callable[[Door, float], Callable[[int], Door]]:
    """Doors are all-gathered once. The closure must not keep ``group`` alive, whose channel it belongs to."""
    reference = weakref.ref(group)

    def publish(door: Door, seconds: float) -> Callable[[int], Door]:
        living = reference()
        assert living is not None
        doors: list[Any] = [None] * living.size()
        dist.all_gather_object(doors, door.to_bytes(), group=living)
        return lambda position: Door.from_bytes(doors[position])

    return publish


def _over_store(group: dist.ProcessGroup, size: int) -> Callable[[Door, float], Callable[[int], Door]]:
    """Doors are put into the store of the default group, and read by those who need them."""
    position, name = dist.get_group_rank(group, dist.get_rank()), group.group_name

    def publish(door: Door, seconds: float) -> Callable[[int], Door]:
        store = default_store()
        # A store may outlive its process groups and be given to new ones, of the same names: then nobody may read old doors.
        generation = (store.add(f"meshmuon/{name}/doors", 1) - 1) // size
        prefix = f"meshmuon/{name}/{generation}"
        store.set(f"{prefix}/{position}", door.to_bytes())

        def door_of(peer: int) -> Door:
            key = f"{prefix}/{peer}"
            store.wait([key], timedelta(seconds=seconds))
            return Door.from_bytes(store.get(key))

        return door_of

    return publish
