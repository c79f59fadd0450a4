"""Sees every operation of one rank: on which stream it runs, what it reads and writes, and whether the host waits
for it.
"""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import meshmuon

from .clocks import HOST, Access, Clock, Clocks, Finding, History, describe
from .footprints import Footprint
from .twin_tensor import DEVICE, Block, Blocks, TwinTensor, host_values

_PACKAGE = str(Path(meshmuon.__file__).parent)
_THIS = str(Path(__file__).parent)
_current = threading.local()

# What gives the host a number, or a shape that depends on numbers.
_WAITS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_linalg_check_errors",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "allclose",
    "bincount",
    "_linalg_svd",
    "_linalg_eigh",
    "linalg_eig",
}
_METADATA = {"set_", "detach_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"}  # write no memory
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


def recorder() -> Recorder:
    """The recorder of this thread."""
    found: Recorder | None = getattr(_current, "recorder", None)
    assert found is not None, "no recorder is active in this thread"
    return found


def active() -> bool:
    """Whether this thread has a recorder."""
    return getattr(_current, "recorder", None) is not None


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations of twin tensors on the CPU, and notes what they would do on a GPU."""

    def __init__(self, name: str = "rank 0", *, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self._random = random.Random(seed)
        self.clocks = Clocks()
        self.blocks = Blocks()
        self.main = self.clocks.new_stream("main")
        self.current = self.main  # the stream that is given work now
        self._group_streams: dict[str, int] = {}
        self.capture: Any = None  # the graph that records work instead
        self.pools: list[object] = []  # of the graphs that were captured, one after the other
        # of each stream, the uses of freed memory that may not have ended
        self._given_back: dict[int, list[Access]] = {}
        self.findings: list[Finding] = []
        self.beside_main: set[int] = set()  # streams whose work has overlapped with work of the main stream
        self.busy_waits: set[str] = set()  # lines at which the host has waited while the main stream had other work
        self.operations = 0

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """This thread's work is recorded inside."""
        _current.recorder = self
        try:
            with self:
                yield self
        finally:
            _current.recorder = None

    def stream_of_group(self, group: str) -> int:
        """The stream on which the collectives of a process group run, one after the other."""
        if group not in self._group_streams:
            self._group_streams[group] = self.clocks.new_stream(f"NCCL {len(self._group_streams)}")
        return self._group_streams[group]

    # ------------------------------------------------------------------------------------------------------- findings

    def report(self, kind: str, text: str, *sites: str) -> None:
        self.findings.append(Finding(kind, f"{self.name}: {text}", tuple(dict.fromkeys(sites))))

    def host_waits(self, for_clock: Clock, why: str) -> None:
        """The host waits for what ``for_clock`` has reached, and continues with what it has seen."""
        site = package_line()
        self.report("host wait", f"{why} at {site}", site)
        if self.capture is not None:
            self.report("misuse", f"{why} while a graph is captured, at {site}", site)
        self.clocks.wait(HOST, for_clock)
        if self.main_is_busy():
            self.busy_waits.add(site)

    def main_is_busy(self) -> bool:
        """Whether the main stream has been given work which the host does not know to be done."""
        return self.clocks.snapshot(self.main)[self.main] > self.clocks.snapshot(HOST).get(self.main, 0)

    def guess(self) -> bool:
        """Whether work that may or may not be done is done: nothing may depend on it."""
        return self._random.random() < 0.5

    # --------------------------------------------------------------------------------------------------------- memory

    def on_device(self, values: Tensor) -> TwinTensor:
        """A copy of a CPU tensor in new device memory, which the current stream writes."""
        twin = self._allocated(values.detach().clone())
        self.touch(self.current, (), (twin,), "initial values")
        return twin

    def _allocated(self, inner: Tensor) -> TwinTensor:
        """A tensor in new memory of the current stream."""
        storage = inner.untyped_storage()
        if not storage.nbytes():
            return TwinTensor(inner, None)
        block = Block(storage.data_ptr(), self.current)
        if self.capture is None:  # a graph has, and keeps, memory of its own
            self._reuse(self.current)
            weakref.finalize(block, _freed, weakref.ref(self), block.stream, block.history).atexit = False
        self.blocks.add(block)
        twin = TwinTensor(inner, block)
        # Earlier work of the stream may still use the memory, so that another stream must wait for the allocation.
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        block.history.add(
            Access(self.current, self._launch(self.current), True, Footprint.of(whole, block.address), "allocation")
        )
        return twin

    def freed(self, stream: int, history: History) -> None:
        """The allocator has a block back. The next allocation of ``stream`` may get its memory."""
        self._given_back.setdefault(stream, []).extend(history.unfinished(stream, self.clocks))

    def _reuse(self, stream: int) -> None:
        """New memory of ``stream`` may be any that was given back: nothing else may still use that."""
        late = [access for access in self._given_back.pop(stream, ()) if not self.clocks.reached(stream, access)]
        if late:
            owner = self.clocks.names[stream]
            text = (
                f"freed memory of stream {owner} is reused, which nothing orders behind: {describe(late, self.clocks)}"
            )
            self.report("lifetime", text, *(access.where for access in late))

    def touch(self, stream: int, reads: Sequence[Tensor], writes: Sequence[Tensor], operation: str) -> None:
        """New work of ``stream`` that reads and writes tensors, twins or in host memory."""
        count, site = self._launch(stream), f"{operation} at {package_line()}"
        for tensor in reads:
            self._access(tensor, stream, count, False, site)
        for tensor in writes:
            self._access(tensor, stream, count, True, site)

    def launch(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], name: str, compute: Callable[[], object]
    ) -> None:
        """A kernel that no operation of torch stands for: ``compute`` does its work on host values."""
        if self.capture is None:
            self.touch(self.current, reads, writes, name)
            self.also(compute)
            return
        self.capture.save([host_values(tensor) for tensor in writes])
        self.also(compute)
        self.capture.touches(reads, writes)

    def also(self, compute: Callable[[], object]) -> None:
        """Work on host values that belongs to the launch before."""
        with torch.utils._python_dispatch._disable_current_modes():
            compute()
        if self.capture is not None:
            self.capture.also(compute)

    def _launch(self, stream: int) -> int:
        """The count of new work of ``stream``; notes which other streams may be working at the same time."""
        count = self.clocks.launch(stream)
        if stream == self.main:
            self.beside_main.update(self.clocks.beside(stream))
        return count

    def _access(self, tensor: Tensor, stream: int, count: int, writes: bool, site: str) -> None:
        inner = tensor.host_values if isinstance(tensor, TwinTensor) else tensor
        block = tensor.block if isinstance(tensor, TwinTensor) else self.blocks.pinned_at(tensor)
        if block is None or not inner.numel():
            return
        access = Access(stream, count, writes, Footprint.of(inner, block.address), site)
        for earlier in block.history.unordered(access, self.clocks):
            pair = describe((earlier, access), self.clocks)
            self.report("race", f"nothing orders {pair}", earlier.where, access.where)
        block.history.add(access)

    # ----------------------------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):  # torch asks how the result of an operation is laid out
            return func(*args, **(kwargs or {}))
        if not all(kind is Tensor or issubclass(kind, TwinTensor) for kind in types):
            return NotImplemented  # a DTensor: it does the same to its local tensors
        kwargs = dict(kwargs or {})
        target = kwargs.get("device")
        if (
            not types
            and not self.blocks.pinned
            and not kwargs.get("pin_memory")
            and (target is None or target.type != "cuda")
        ):
            return func(*args, **kwargs)  # work of the host on memory that no device touches
        name = _name(func)
        if name in _METADATA:
            assert not any(isinstance(tensor, TwinTensor) for tensor in _tensors(args)), f"{name} of a twin"
            return func(*args, **kwargs)
        reads, writes = _operands(func, args, kwargs)
        twins = any(isinstance(tensor, TwinTensor) for tensor in (*reads, *writes))
        on_device = twins if target is None else target.type == "cuda"
        if not twins and not on_device:
            return self._on_host(func, args, kwargs, reads, writes)
        self.operations += 1
        host = [tensor for tensor in (*reads, *writes) if not isinstance(tensor, TwinTensor)]
        if name in _COPIES and (host or (twins and not on_device)):
            return self._between_host_and_device(func, args, kwargs, reads, writes)
        if any(tensor.dim() for tensor in host):
            raise RuntimeError(f"{func}: tensors of a GPU and of the host in one operation, at {package_line()}")
        inner = _unwrapped(args), _on_cpu(_unwrapped(kwargs))
        if self.capture is not None:
            self.capture.save([tensor.host_values for tensor in writes if isinstance(tensor, TwinTensor)])
        result = func(*inner[0], **inner[1])
        before = {id(tensor.host_values): tensor for tensor in (*reads, *writes) if isinstance(tensor, TwinTensor)}
        wrapped, created = self._wrapped(result, before)
        if name not in _EMPTY and (writes or created or not _tensors(result)):
            if self.capture is not None:
                self.capture.add(func, inner, result, created, reads, writes)
            else:
                self.touch(self.current, reads, (*writes, *created), name)
        if name in _WAITS or (name in _INDEXING and _by_mask(args)):
            self.host_waits(self.clocks.snapshot(self.current), name)
        return wrapped

    def _on_host(self, func: Any, args: Any, kwargs: Any, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Any:
        pinned = kwargs.get("pin_memory", False)
        if pinned:
            kwargs["pin_memory"] = False
        result = func(*args, **kwargs)
        if pinned:
            self.blocks.pinned.append((Block(result.untyped_storage().data_ptr(), HOST, pinned=True), result))
        elif self.blocks.pinned and (writes or not _is_view(result, reads)):
            self.touch(HOST, reads, writes, _name(func))
        return result

    def _between_host_and_device(
        self, func: Any, args: Any, kwargs: Any, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> Any:
        """A copy from or to host memory: on the current stream if the memory is pinned, else the host waits for it."""
        name = _name(func)
        blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        result = func(*_unwrapped(args), **_on_cpu(_unwrapped(kwargs)))
        created: list[Tensor] = []
        if name == "_to_copy" and kwargs["device"].type == "cuda":
            result, created = self._wrapped(result, {})
        elif name == "copy_":
            result = args[0]
        host = [tensor for tensor in (*reads, *writes) if not isinstance(tensor, TwinTensor)]
        self.touch(self.current, reads, (*writes, *created), name)
        pageable = not host or any(tensor.numel() and self.blocks.pinned_at(tensor) is None for tensor in host)
        if blocking or pageable:
            kind = "a copy that blocks" if blocking else "a copy of host memory that is not pinned"
            self.host_waits(self.clocks.snapshot(self.current), f"{name}, {kind},")
        return result

    def _wrapped(self, result: Any, before: dict[int, TwinTensor]) -> tuple[Any, list[Tensor]]:
        """What an operation returns as twins, and those of them that are in new memory."""
        created: list[Tensor] = []
        return self._wrap(result, before, created), created

    def _wrap(self, value: Any, before: dict[int, TwinTensor], created: list[Tensor]) -> Any:
        # A method, because a function that calls itself would keep what it refers to until the next collection of
        # garbage, and with it memory that the package has freed.
        if isinstance(value, (list, tuple)):
            return type(value)(self._wrap(item, before, created) for item in value)
        if not isinstance(value, Tensor):
            return value
        if id(value) in before:
            return before[id(value)]
        has_memory = bool(value.untyped_storage().nbytes())
        block = self.blocks.of_storage(value) if has_memory else None
        if block is not None or not has_memory:
            return TwinTensor(value, block)
        created.append(self._allocated(value))
        return created[-1]


def _freed(reference: weakref.ref[Recorder], stream: int, history: History) -> None:
    owner = reference()
    if owner is not None and active() and recorder() is owner:  # not while the thread ends
        owner.freed(stream, history)


def package_line(without: str = "") -> str:
    """The innermost line of the package, ``without`` a file of it, that is running; else of whoever runs it."""
    frame: Any = sys._getframe(1)
    outside = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and not (without and file.endswith(without)):
            return f"meshmuon{file[len(_PACKAGE) :]}:{frame.f_lineno} {frame.f_code.co_name}"
        if not outside and not file.startswith(_THIS) and "site-packages" not in file and not file.startswith("<"):
            outside = f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return outside


@cache
def _name(func: Any) -> str:
    name: str = func._schema.name.split("::")[-1]
    return name


@cache
def _writes_of(func: Any) -> tuple[tuple[str, bool], ...]:
    """The name of each argument of an operation, and whether it is written."""
    return tuple((arg.name, arg.alias_info is not None and arg.alias_info.is_write) for arg in func._schema.arguments)


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for k, (name, written) in enumerate(_writes_of(func)):
        value = args[k] if k < len(args) else kwargs.get(name)
        found = _tensors(value)
        (writes if written else reads).extend(found)
    return reads, writes


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _unwrapped(value: Any) -> Any:
    if isinstance(value, TwinTensor):
        return value.host_values
    if isinstance(value, (list, tuple)):
        return type(value)(map(_unwrapped, value))
    return {key: _unwrapped(item) for key, item in value.items()} if isinstance(value, dict) else value


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    return kwargs


def _is_view(result: Any, reads: Sequence[Tensor]) -> bool:
    storages = {tensor.untyped_storage().data_ptr() for tensor in reads}
    results = _tensors(result)
    return bool(results) and all(tensor.untyped_storage().data_ptr() in storages for tensor in results)


def _by_mask(args: Any) -> bool:
    """Whether an operation is indexed by a mask, so that the host must count its elements."""
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1]))


__all__ = ["DEVICE", "Recorder", "active", "package_line", "recorder"]
