"""Small collectives over a process group, and the channel that belongs to it, which is watched while ranks wait."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_compat import gloo_of, object_device
from .failures import channels, named_phase, set_channel, wait_for
from .groups import moves, timeout_of_group
from .host_channel import HostChannel, open_channel
from .plain_data import from_bytes, to_bytes

if TYPE_CHECKING:
    pass

_T = TypeVar("_T")
# memory, by its length
_votes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Tensor]] = weakref.WeakKeyDictionary()


def channel_of(group: dist.ProcessGroup) -> HostChannel | None:
    """The channel between the ranks of ``group``; None where its own collectives do as well, or no rank can be reached.

    The first call connects the ranks: all of them must call. They tell each other their doors over the group itself, so
    that nothing of an earlier process group can be mistaken for theirs. Groups that take host memory and are not gloo's
    (MPI, and those of tests) use their collectives.
    """
    if group not in channels:
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
        channel: HostChannel | str | None = None
        if gloo_of(group) is not None or not moves(group, torch.device("cpu")):
            channel = open_channel(rank, ranks, lambda message: _gathered(message, group))
        if isinstance(channel, str):
            if rank == ranks[0]:
                warnings.warn(
                    f"ranks cannot be connected for the agreement: {channel}. They vote through collectives of their "
                    "process group instead, which is slower, and a rank that is lost may be noticed late. Set "
                    "GLOO_SOCKET_IFNAME to the network interface that connects the hosts, and let it pass TCP "
                    "(MESHMUON_PORTS limits the ports).",
                    stacklevel=2,
                )
            channel = None
        set_channel(group, channel)
    return channels[group]


def seconds_of(group: dist.ProcessGroup) -> float:
    """How long ranks of ``group`` wait for each other."""
    return (timeout_of_group(group) or timedelta(minutes=30)).total_seconds()


def reduce_sum(tensor: Tensor, group: dist.ProcessGroup, *, phase: str, largest: bool = False) -> None:
    """Replaces each number of ``tensor`` by its sum over the ranks; waits for gloo, not for a device. ``phase`` is
    for errors.
    """
    with named_phase(phase, group):
        channel_of(group)
        # looked up here: not every build of torch has it
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        wait_for(dist.all_reduce(tensor, operation, group=group, async_op=True), tensor, group)


def reduce_largest(
    tensor: Tensor, group: dist.ProcessGroup, *, phase: str = "reduction of the largest attention logits"
) -> None:
    """As ``reduce_sum``, with the maximum. There must be no NaN: what its maximum is depends on the backend."""
    reduce_sum(tensor, group, phase=phase, largest=True)


def maximum(words: tuple[int, ...], group: dist.ProcessGroup) -> tuple[int, ...]:
    """The largest of each word over all ranks: in ⌈log2 W⌉ rounds over the channel of the group, if it has one, or
    by its own.
    """
    channel = channel_of(group)
    if channel is not None:
        return channel.maximum(words, seconds_of(group))
    of_group = _votes.setdefault(group, {})
    if len(words) not in of_group:
        with torch.inference_mode(False):
            of_group[len(words)] = torch.empty(len(words), dtype=torch.int64, device=object_device(group))
    reduced = of_group[len(words)]
    for k, word in enumerate(words):
        reduced[k].fill_(word)
    reduce_largest(reduced, group, phase="agreement")
    return tuple(reduced.tolist())


def averaged(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The mean of each tensor over the ranks of ``group``; all reductions start before the first is waited for."""
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    with named_phase("averaging of AdamW's gradients", group):
        channel_of(group)
        pending = [dist.all_reduce(copy, group=group, async_op=True) for copy in copies]
        for work, copy in zip(pending, copies, strict=True):
            if work is not None:
                wait_for(work, copy, group)
    return [copy.div_(dist.get_world_size(group)) for copy in copies]


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Overwrites ``tensor`` on every rank of ``group`` with what rank ``source`` has in it."""
    flat = tensor.contiguous()
    with named_phase("moving of momentum", group):
        channel_of(group)
        wait_for(dist.broadcast(flat, source, group=group, async_op=True), flat, group)
    if flat is not tensor:
        tensor.copy_(flat)


def all_gather_objects(value: _T, group: dist.ProcessGroup, *, phase: str = "agreement") -> dict[int, _T]:
    """Rank → its ``value``, which must be plain data (``plain_data.py``)."""
    with named_phase(phase, group):
        channel = channel_of(group)
        if channel is not None:
            return channel.all_gather(value, seconds_of(group))
        values: list[Any] = [from_bytes(message)[0] for message in _gathered(to_bytes([value]), group)]
    return dict(zip(dist.get_process_group_ranks(group), values, strict=True))


def _gathered(message: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """The message of every rank of ``group``, in its order, by collectives of the group: lengths first, then padded
    messages.
    """
    device = object_device(group)

    def gathered(own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(group.size())]
        wait_for(dist.all_gather(parts, own, group=group, async_op=True), own, group)
        return [part.cpu() for part in parts]

    with torch.inference_mode(False):
        lengths = [int(length) for length in gathered(torch.tensor([len(message)], device=device))]
        padded = torch.frombuffer(bytearray(message.ljust(max(1, *lengths), b"\0")), dtype=torch.uint8)
        return [
            bytes(part[:length].tolist()) for part, length in zip(gathered(padded.to(device)), lengths, strict=True)
        ]


def swap_with(peer: int, sent: Tensor, received: Tensor) -> None:
    """Sends ``sent`` to rank ``peer`` of the default group and receives as much from it. Only these two ranks call.

    It measures one link, which an exchange of gloo cannot: that waits for all ranks, also for those that send nothing.
    """
    with named_phase("measuring of a link"):
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        ):
            work.wait()


def norm_device(devices: Iterable[torch.device], groups: Sequence[dist.ProcessGroup]) -> torch.device:
    """Where numbers to reduce are put: on ``devices`` if ``groups`` take such tensors, accelerators first; equal on
    all ranks.
    """
    host = torch.device("cpu")
    candidates = [*dict.fromkeys(device for device in devices if device.type != "cpu"), host]
    if torch.accelerator.is_available() and (current := torch.accelerator.current_accelerator()) is not None:
        candidates.append(torch.device(current.type, torch.accelerator.current_device_index()))
    return next((device for device in candidates if all(moves(group, device) for group in groups)), host)
