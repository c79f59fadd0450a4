"""The channel that belongs to a process group, how its ranks find each other, and what does its work where there is none."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_compat import gloo_of, object_device
from .failures import existing_channel, has_channel, set_channel, wait_for
from .groups import moves, timeout_of_group
from .host_channel import HostChannel, open_channel


def channel_of(group: dist.ProcessGroup) -> HostChannel | None:
    """The channel between the ranks of ``group``; None where its own collectives do as well, or no rank can be reached.

    The first call connects the ranks: all of them must call. They tell each other their doors over the group itself, so that
    nothing of an earlier process group can be mistaken for theirs. Groups that take host memory and are not gloo's (MPI, and
    those of tests) use their collectives.
    """
    if not has_channel(group):
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
        channel: HostChannel | str | None = None
        if gloo_of(group) is not None or not moves(group, torch.device("cpu")):
            channel = open_channel(ranks.index(rank), ranks, lambda message: gathered_bytes(message, group))
        if isinstance(channel, str):
            if rank == ranks[0]:
                warnings.warn(
                    f"ranks cannot be connected for the agreement: {channel}. They vote through collectives of their process "
                    "group instead, which is slower, and a rank that is lost may be noticed late. Set GLOO_SOCKET_IFNAME to the "
                    "network interface that connects the hosts, and let it pass TCP (MESHMUON_PORTS limits the ports).",
                    stacklevel=2,
                )
            channel = None
        set_channel(group, channel)
    return existing_channel(group)


def seconds_of(group: dist.ProcessGroup) -> float:
    """How long ranks of ``group`` wait for each other."""
    return (timeout_of_group(group) or timedelta(minutes=30)).total_seconds()


def reduce(tensor: Tensor, group: dist.ProcessGroup, operation: Any = None) -> None:
    """Replaces each number of ``tensor`` by its sum or maximum over the ranks; waits for gloo, not for a device."""
    channel_of(group)  # it is watched while the ranks wait for each other
    operation = operation or dist.ReduceOp.SUM  # looked up here: not every build of torch has it
    wait_for(dist.all_reduce(tensor, operation, group=group, async_op=True), tensor, group)


def spread(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Overwrites a dense ``tensor`` on every rank of ``group`` with what rank ``source`` has in it; waits as ``reduce`` does."""
    channel_of(group)
    wait_for(dist.broadcast(tensor, source, group=group, async_op=True), tensor, group)


def gathered_bytes(message: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """The message of every rank of ``group``, in its order, by collectives of the group: lengths first, then padded messages."""
    device = object_device(group)

    def gathered(own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(group.size())]
        work = dist.all_gather(parts, own, group=group, async_op=True)
        wait_for(work, own, group)
        return [part.cpu() for part in parts]

    with torch.inference_mode(False):
        lengths = [int(length) for length in gathered(torch.tensor([len(message)], device=device))]
        padded = torch.zeros(max(max(lengths), 1), dtype=torch.uint8)
        padded[: len(message)] = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)[: len(message)]
        return [bytes(part[:length].tolist()) for part, length in zip(gathered(padded.to(device)), lengths, strict=True)]
