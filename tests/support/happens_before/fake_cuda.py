"""``torch.cuda`` as far as the package uses it: streams, events and graphs, whose effects the recorder of the
thread notes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from .clocks import HOST, Clock
from .recorder import active, recorder
from .twin_tensor import DEVICE, Block, TwinTensor


class Stream:
    """A CUDA stream."""

    def __init__(self, device: Any = None, *, number: int | None = None) -> None:
        assert device is None or torch.device(device).type == "cuda", f"a CUDA stream of {device}"
        self._recorder = recorder()
        clocks = self._recorder.clocks
        self.number = clocks.new_stream(_maker()) if number is None else number

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self._recorder.host_waits(self._recorder.clocks.snapshot(self.number), "synchronize")

    def query(self) -> bool:
        return self._recorder.guess()

    def note_use(self, block: Block) -> None:
        """``tensor.record_stream(self)``: the allocator waits for what this stream has been given when the block is
        freed.
        """
        block.history.recorded.add(self.number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


def _maker() -> str:
    """Who makes a stream: the class of the package, else the user."""
    owner = sys._getframe(2).f_locals.get("self")
    return type(owner).__name__ if type(owner).__module__.startswith("meshmuon") else "user"


class Event:
    """A CUDA event. Waiting for one that was never recorded is no wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        number = recorder().current if stream is None else stream.number
        self._clock = recorder().clocks.snapshot(number)

    def wait(self, stream: Stream | None = None) -> None:
        number = recorder().current if stream is None else stream.number
        recorder().clocks.wait(number, self._clock)

    def synchronize(self) -> None:
        recorder().host_waits(self._clock, "synchronize")

    def query(self) -> bool:
        """A guess. If it says that the work is done, the host has seen it."""
        done = recorder().guess()
        if done:
            recorder().clocks.wait(HOST, self._clock)
        return done


class Graph:
    """A CUDA graph: operations that are noted when they are captured, and done when it is replayed."""

    def __init__(self) -> None:
        self._operations: list[tuple[Any, Any, Any]] = []  # function, its arguments on the CPU, what it returned
        self._reads: list[Tensor] = []
        self._writes: list[Tensor] = []
        self._created: list[Tensor] = []  # the graph's own memory
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._pool: object = None

    def pool(self) -> object:
        assert self._pool is not None, "the pool of a graph that was not captured"
        return self._pool

    def save(self, written: Sequence[Tensor]) -> None:
        """Keeps what memory holds before an operation is captured: capturing does not write."""
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._saved:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._saved[storage.data_ptr()] = whole, whole.clone()

    def add(
        self,
        func: Any,
        inner: Any,
        result: Any,
        created: Sequence[Tensor],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
    ) -> None:
        """An operation that is captured."""
        self._operations.append((func, inner, result))
        self.touches(reads, writes)
        self._created += created

    def also(self, compute: Callable[[], object]) -> None:
        """Work on host values that is captured."""
        self._operations.append((compute, ((), {}), None))

    def touches(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        own = {id(tensor.block) for tensor in self._created}  # type: ignore[attr-defined]
        for tensors, target in ((reads, self._reads), (writes, self._writes)):
            target += [tensor for tensor in tensors if id(getattr(tensor, "block", None)) not in own]

    def captured(self) -> None:
        for whole, before in self._saved.values():
            whole.copy_(before)
        self._saved.clear()

    def replay(self) -> None:
        """Does all operations again, on the same memory, as one piece of work of the current stream."""
        rank = recorder()
        rank.touch(rank.current, self._reads, self._writes, "graph")
        with torch.utils._python_dispatch._disable_current_modes():
            for func, (args, kwargs), result in self._operations:
                _overwrite(result, func(*args, **kwargs))


def _overwrite(old: Any, new: Any) -> None:
    if isinstance(old, (list, tuple)):
        for one, other in zip(old, new, strict=True):
            _overwrite(one, other)
    elif isinstance(old, Tensor) and old is not new and old.data_ptr() != new.data_ptr():
        old.copy_(new)


@contextmanager
def _capture(graph: Graph, pool: object = None, *, capture_error_mode: str = "global") -> Iterator[None]:
    """``torch.cuda.graph``: waits for the device, then captures on a stream of its own, which stays current after
    an error.
    """
    assert capture_error_mode == "thread_local", (
        "another thread, such as a data loader that pins memory, would end the capture"
    )
    rank = recorder()
    rank.host_waits(rank.clocks.everything(), "capture of a graph")
    before, rank.current, rank.capture = rank.current, Stream().number, graph
    try:
        yield
        graph._pool = pool or object()
        rank.pools.append(graph._pool)
    finally:
        rank.capture = None
        with torch.utils._python_dispatch._disable_current_modes():
            graph.captured()
    rank.current = before


def device_name(device: Any) -> str:
    return "a stand-in"


class MatmulFlags(threading.local):
    """``torch.backends.cuda.matmul``: the flags of a process, which is a thread here, with torch's defaults."""

    fp32_precision = "none"
    allow_fp16_accumulation = False

    def __init__(self) -> None:
        self._sums = {"fp16": (True, True), "bf16": (True, True)}

    def __getattr__(self, name: str) -> bool:
        return self._sums[name.split("_")[1]][name.endswith("_split_k")]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.endswith("_reduced_precision_reduction"):
            self._sums[name.split("_")[1]] = (value, True) if isinstance(value, bool) else value
        else:
            super().__setattr__(name, value)


def _set_stream(stream: Stream) -> None:
    recorder().current = stream.number


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    rank = recorder()
    before = rank.current
    rank.current = before if stream is None else stream.number
    try:
        yield
    finally:
        rank.current = before


def _current_stream(device: Any = None) -> Stream:
    return Stream(number=recorder().current)


def _synchronize(device: Any = None) -> None:
    recorder().host_waits(recorder().clocks.everything(), "synchronize")


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return active() and not isinstance(tensor, TwinTensor) and recorder().blocks.pinned_at(tensor) is not None


def _grouped(lists: list[list[Tensor | None]], with_indices: bool = False) -> dict[Any, Any]:
    """torch's grouping by device and dtype, which C++ does and which takes twins for CPU tensors."""
    groups = _group_tensors_by_device_and_dtype(lists, with_indices)
    return {
        (DEVICE if any(isinstance(tensor, TwinTensor) for tensor in members[0][0]) else device, dtype): members
        for (device, dtype), members in groups.items()
    }


@contextmanager
def installed() -> Iterator[None]:
    """``torch.cuda`` inside the ``with``, for all threads with a recorder."""
    original = torch.tensor

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        made = original(data, **kwargs) if device is None else original(data, device="cpu", **kwargs)
        return made.to(device) if active() and device is not None else made

    replaced = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": _capture,
        "stream": _stream,
        "set_stream": _set_stream,
        "current_stream": _current_stream,
        "synchronize": _synchronize,
        "current_device": lambda: DEVICE.index,
        "device_count": lambda: 1,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=80 * 10**9),
        "is_initialized": lambda: True,
        "set_device": lambda device: None,
        "_lazy_init": lambda: None,
        "get_device_name": lambda device: device_name(device),
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch.backends.cuda, "matmul", MatmulFlags()))
        stack.enter_context(patch("torch.tensor", tensor))
        stack.enter_context(patch.object(Tensor, "is_pinned", _is_pinned))
        stack.enter_context(patch("torch.optim.optimizer._group_tensors_by_device_and_dtype", _grouped))
        # C++ gives a DTensor the device that it sees of the local tensor, which is a CPU.
        for name in ("device", "is_cuda"):
            stack.enter_context(patch.object(DTensor, name, property(attrgetter(f"_local_tensor.{name}")), create=True))
        yield
