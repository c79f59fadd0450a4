"""Collectives as NCCL runs them: work on a stream of the process group, and the order in which each rank starts them.

A collective waits for what the current stream was given before it. ``wait()`` makes the stream that is current then
wait for the collective; until that, its buffers are in use. Nothing else protects them: newer versions of torch keep no
``record_stream`` for them. The values are exchanged at once, by the threaded process group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from .recorder import Recorder, active, recorder
from .twin_tensor import TwinTensor

_DEVICE_COLLECTIVES = ("all_to_all_single", "all_reduce", "broadcast")
_HOST_COLLECTIVES = ("all_gather_object",)


class StartedCollectives:
    """What each rank started, group by group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: dict[tuple[str, int], list[str]] = {}
        self._sizes: dict[tuple[str, int, int, int], dict[str, int]] = {}  # by group, number, sender and receiver

    def add(self, group: str, rank: int, collective: str, sizes: dict[tuple[int, int], tuple[str, int]]) -> None:
        """``sizes``: of each (sender, receiver) what this rank is of the two, and the number of elements."""
        with self._lock:
            started = self._started.setdefault((group, rank), [])
            for (sender, receiver), (role, size) in sizes.items():
                self._sizes.setdefault((group, len(started), sender, receiver), {})[role] = size
            started.append(collective)

    def count(self) -> int:
        return sum(map(len, self._started.values()))

    def differences(self) -> list[str]:
        """In words, where two ranks of a group started different collectives, or expect other sizes than are sent."""
        found = [
            f"group {key[0]}, collective {key[1]}: {s}" for key, s in self._sizes.items() if len(set(s.values())) > 1
        ]
        for group in sorted({name for name, _ in self._started}):
            ranks = sorted(rank for name, rank in self._started if name == group)
            first = self._started[group, ranks[0]]
            for rank in ranks[1:]:
                other = self._started[group, rank]
                if other != first:
                    k = next(
                        (k for k, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), len(first)
                    )
                    pair = [names[k] if k < len(names) else "nothing" for names in (first, other)]
                    found.append(
                        f"group {group}, collective {k}: rank {ranks[0]} starts {pair[0]}, rank {rank} {pair[1]}"
                    )
        return found


class Work:
    """A collective under way."""

    def __init__(self, rank: Recorder, stream: int) -> None:
        self._rank, self._clock = rank, rank.clocks.snapshot(stream)

    def wait(self, timeout: Any = None) -> bool:
        """The current stream waits, not the host."""
        self._rank.clocks.wait(self._rank.current, self._clock)
        return True

    def is_completed(self) -> bool:
        return self._rank.guess()


class _Nccl:
    """The collectives of all ranks."""

    def __init__(self, started: StartedCollectives) -> None:
        self.started = started

    def on_device(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A collective of tensors, in the place of ``original``."""

        def collective(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if not active():
                return original(*args, group=group, async_op=async_op, **kwargs)
            self._note(name, group, tensors, args[2:4] if name == "all_to_all_single" else ())
            if name != "all_to_all_single" and not any(isinstance(tensor, TwinTensor) for tensor in tensors):
                return original(*args, group=group, async_op=async_op, **kwargs)
            assert all(isinstance(tensor, TwinTensor) for tensor in tensors), (
                f"{name} of host memory, which NCCL refuses"
            )
            assert all(tensor.is_contiguous() for tensor in tensors), f"{name} of a tensor that is not contiguous"
            rank = recorder()
            # Newer versions run synchronous ones on the current stream: nothing orders them behind others of the group.
            stream = rank.stream_of_group(_name(group)) if async_op else rank.current
            rank.clocks.wait(stream, rank.clocks.snapshot(rank.current))
            reads = tensors[1:] if name == "all_to_all_single" else tensors
            rank.touch(stream, reads, tensors[:1], name)
            unwrapped = [value.host_values if isinstance(value, TwinTensor) else value for value in args]
            original(*unwrapped, group=group, async_op=False, **kwargs)
            work = Work(rank, stream)
            if async_op:
                return work
            work.wait()
            return None

        return collective

    def on_host(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A collective of objects."""

        def collective(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            if active():
                self._note(name, group, (), ())
            return original(*args, group=group, **kwargs)

        return collective

    def _note(self, name: str, group: Any, tensors: Sequence[Tensor], splits: Sequence[list[int]]) -> None:
        """Notes the start, a little later than it would be: the timing of ranks must not matter."""
        if recorder().guess():
            time.sleep(0)
        kinds = "" if not tensors else f" of {tensors[0].dtype} on {tensors[0].device.type}"
        sizes = "" if name == "all_to_all_single" else f" {[tensor.numel() for tensor in tensors]}"
        own, pairs = dist.get_group_rank(_group(group), dist.get_rank()), dict[tuple[int, int], tuple[str, int]]()
        for role, counts in zip(("expected", "sent"), splits, strict=bool(splits)):
            for peer, count in enumerate(counts):
                pairs[(own, peer) if role == "sent" else (peer, own)] = role, count
        self.started.add(_name(group), dist.get_rank(), f"{name}{kinds}{sizes}", pairs)


def _name(group: Any) -> str:
    return str(_group(group).group_name)


def _group(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


@contextmanager
def installed() -> Iterator[StartedCollectives]:
    """``torch.distributed`` inside the ``with``, for all threads with a recorder."""
    started = StartedCollectives()
    nccl = _Nccl(started)
    with ExitStack() as stack:
        for names, wrap in ((_DEVICE_COLLECTIVES, nccl.on_device), (_HOST_COLLECTIVES, nccl.on_host)):
            for name in names:
                stack.enter_context(patch.object(dist, name, wrap(getattr(dist, name), name)))
        yield started
