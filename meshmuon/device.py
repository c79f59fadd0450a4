"""One interface to GPU and CPU: streams, CUDA graphs, copies to host memory, devices.

Each class is the CPU's; the class that is derived from it is its CUDA twin. No CUDA twin has run on a GPU yet. A
happens-before checker runs them on stand-ins for CUDA, and demands each of their waits: docs/proofs.md.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .errors import KernelWarning
from .torch_compat import as_dtensor, device_of_mesh

HOST = torch.device("cpu")

Graphs: TypeAlias = "list[torch.cuda.CUDAGraph]"
"""CUDA graphs that share one pool of memory. None keeps anything there, and no two of them run at the same time."""


class CudaReplay:
    """Runs ``work`` on its first call and records it as a CUDA graph; later calls replay the graph.

    ``work`` must always read and write the same memory and must not wait for the device. If it cannot be recorded,
    later calls run it, which gives the same bits. ``graphs`` are those with which it shares memory; its own is added to
    them.
    """

    def __init__(self, work: Callable[[], None], graphs: Graphs) -> None:
        self._work, self._graphs = work, graphs
        self._run: Callable[[], None] | None = None  # what later calls run

    def __call__(self) -> None:
        if self._run is not None:
            self._run()
            return
        self._work()  # the first run does the real work: libraries must be warm before a graph is captured
        self._run = self._work
        before = torch.cuda.current_stream()
        try:
            graph = torch.cuda.CUDAGraph()
            pool = self._graphs[-1].pool() if self._graphs else None
            # In torch's default mode any thread's call, such as that of a data loader which pins memory, would end the
            # capture.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._work()
            self._run = graph.replay
            self._graphs.append(graph)
        except Exception as error:
            # torch may take the pool for one that is still being captured to: the next graph has another
            self._graphs.clear()
            torch.cuda.set_stream(before)  # torch leaves the stream of the capture current if ending the capture fails
            _warn_of_capture(f"{type(error).__name__}: {error}")


@lru_cache  # once for each reason
def _warn_of_capture(reason: str) -> None:
    warnings.warn(
        "cuda_graphs=True: a batch cannot be recorded as a CUDA graph and runs without one, with the same results "
        f"({reason}).",
        KernelWarning,
        stacklevel=3,
    )


def replay_for(device: torch.device, work: Callable[[], None], graphs: Graphs | None) -> Callable[[], None]:
    """What to call at every step: on a GPU, unless ``graphs`` is None, a CUDA graph of ``work``, else ``work``
    itself.
    """
    return CudaReplay(work, graphs) if graphs is not None and device.type == "cuda" else work


_SHORT_SUMS = {  # flags of torch that let products of a dtype accumulate in fewer than 32 bits
    torch.float16: ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation"),
    torch.bfloat16: ("allow_bf16_reduced_precision_reduction",),
}
_SPLIT_SUMS = ("allow_fp16_reduced_precision_reduction_split_k", "allow_bf16_reduced_precision_reduction_split_k")
# and their names
_PACKAGES = {"triton": ("triton", "pytorch-triton"), "cublas": ("nvidia-cublas", "nvidia-cublas-cu12")}


def wide_sums(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """A context in which torch accumulates products of ``dtype`` in 32 bits or more, whatever the user allows
    elsewhere.

    A CPU always does.
    """
    return _cuda_wide_sums(_SHORT_SUMS[dtype]) if device.type == "cuda" and dtype in _SHORT_SUMS else nullcontext()


@contextmanager
def _cuda_wide_sums(flags: Iterable[str]) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    allowed = [name for name in flags if getattr(matmul, name)]
    try:
        for name in allowed:
            setattr(matmul, name, False)
        yield
    finally:
        for name in allowed:
            setattr(matmul, name, True)


def gpu_bits(device: torch.device) -> str:
    """What the bits of products on a GPU depend on beside the program, as text that ranks compare.

    Only schemes and rules of the user obey the flags of short sums.
    """
    names = ("fp32_precision", *(name for names in _SHORT_SUMS.values() for name in names), *_SPLIT_SUMS)
    flags = (f"{name}={getattr(torch.backends.cuda.matmul, name)}" for name in names)
    return ", ".join((f"GPU={torch.cuda.get_device_name(device)}", _library_versions(), *flags))


@lru_cache(maxsize=1)
def _library_versions() -> str:
    found = {"torch": torch.__version__, "cuda": torch.version.cuda or torch.version.hip}
    for library, packages in _PACKAGES.items():
        for package in packages:
            with suppress(PackageNotFoundError):
                found.setdefault(library, version(package))
    return ", ".join(f"{library}={number}" for library, number in found.items())


_LARGEST_PORTION = 256  # tensors; bounds the time of dividing thousands of them
_BYTES_PER_COPY = 1 << 18  # that one more copy per step must save: about what is copied in the time of a launch

Mark: TypeAlias = Any
"""A point in a stream of work: an event on a GPU, None on a CPU."""


class Streams:
    """A main stream and a side stream of work, ordered by marks. On a CPU work runs at once, in order."""

    def main_mark(self) -> Mark:
        """Marks the end of the work on the main stream so far."""
        return None

    def side_mark(self) -> Mark:
        """Marks the end of the work on the side stream so far."""
        return None

    @contextmanager
    def on_side_stream(self, after: Mark, uses: Iterable[Tensor] = ()) -> Iterator[None]:
        """Runs the work inside on the side stream, after ``after``; the main stream may free ``uses`` meanwhile."""
        yield

    def main_waits(self, mark: Mark) -> None:
        """Later work on the main stream runs after ``mark``."""


class CudaStreams(Streams):
    """The stream that is current at each call, and a side stream for elementwise work and exchanges."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def main_mark(self) -> Mark:
        return torch.cuda.current_stream(self._device).record_event()

    def side_mark(self) -> Mark:
        return self._side.record_event()

    @contextmanager
    def on_side_stream(self, after: Mark, uses: Iterable[Tensor] = ()) -> Iterator[None]:
        self._side.wait_event(after)
        for tensor in uses:
            if tensor.device.type == "cuda":  # the host is done with its own memory when it frees it
                tensor.record_stream(self._side)
        with torch.cuda.stream(self._side):
            yield

    def main_waits(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


def streams_for(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else Streams()


class Transfers:
    """Bulk copies between a device and host memory. On a CPU they are done at once, and nothing is pending
    afterwards.
    """

    def host_buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """Flat host memory for copies to and from the device."""
        return torch.empty(size, dtype=dtype, device="cpu")

    def portions(self, sizes: Sequence[int]) -> list[int]:
        """How many tensors each host buffer should take of consecutive ones of ``sizes`` bytes."""
        return [len(sizes)]

    def store(self, host: Tensor, device: Tensor) -> None:
        """Starts copying ``device`` to ``host``, after what the device has been given so far; ``device`` may be
        freed at once.
        """
        host.copy_(device)

    def load(self, device: Tensor, host: Tensor, *, waits: bool = True) -> Mark:
        """Starts copying ``host`` to ``device``; what the device is given next finds it there.

        With ``waits=False`` it finds it there only after ``wait`` for what is returned here.
        """
        device.copy_(host)

    def wait(self, loaded: Mark) -> None:
        """What the device is given next finds there what was loaded."""

    def settle(self) -> None:
        """Returns once the host may read what was stored."""

    def stored(self) -> Mark:
        """The end of what has been stored so far."""
        return None

    def done(self, mark: Mark) -> bool:
        """Whether the host may already read what had been stored at ``mark``; it does not wait."""
        return True


class CudaTransfers(Transfers):
    """Pinned host memory, and a side stream whose copies overlap with the next forward pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        # The host continues only during copies of pinned memory.
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)

    def portions(self, sizes: Sequence[int]) -> list[int]:
        """Such that as few bytes as possible are pinned: torch rounds every buffer up to a power of two.

        ``least[n]`` is what the first n tensors need, and ``last[n]`` how many of them are in their last buffer.
        """
        least, last = [0], [0]
        for stop in range(1, len(sizes) + 1):
            together = accumulate(reversed(sizes[max(0, stop - _LARGEST_PORTION) : stop]))
            costs = [least[stop - count] + pinned_bytes(size) for count, size in enumerate(together, start=1)]
            least.append(min(costs) + _BYTES_PER_COPY)
            last.append(1 + costs.index(min(costs)))
        counts: list[int] = []
        while sum(counts) < len(sizes):
            counts.insert(0, last[len(sizes) - sum(counts)])
        return counts

    def store(self, host: Tensor, device: Tensor) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            host.copy_(device, non_blocking=True)
        device.record_stream(self._side)  # its memory is not reused before the copy is done

    def load(self, device: Tensor, host: Tensor, *, waits: bool = True) -> Mark:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            device.copy_(host, non_blocking=True)
        loaded = self._side.record_event()
        if waits:
            self.wait(loaded)
        return loaded

    def wait(self, loaded: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(loaded)

    def settle(self) -> None:
        self._side.synchronize()

    def stored(self) -> Mark:
        return self._side.record_event()

    def done(self, mark: Mark) -> bool:
        return bool(mark.query())


def pinned_bytes(size: int) -> int:
    """What torch pins for a buffer of ``size`` bytes."""
    return 1 << (size - 1).bit_length() if size else 0


def transfers_for(device: torch.device) -> Transfers:
    return CudaTransfers(device) if device.type == "cuda" else Transfers()


def work_device(param: Tensor) -> torch.device:
    """Where the matrices of a parameter travel and are orthogonalised: where it is, or on the device of its mesh.

    The latter if its shards are in host memory and the mesh is of devices, as with FSDP2's ``CPUOffloadPolicy``:
    orthogonalising would take minutes on a CPU, and NCCL does not move host memory.
    """
    sharded = as_dtensor(param)
    return device_of_mesh(sharded.device_mesh) if sharded is not None and is_staged(param) else param.device


def is_staged(param: Tensor) -> bool:
    """Whether a parameter is in host memory and its matrices go to a device, the ``work_device``, and back."""
    sharded = as_dtensor(param)
    return sharded is not None and param.device.type == "cpu" and sharded.device_mesh.device_type != "cpu"


def known_to_host(tensor: Tensor) -> bool:
    """Whether the host can read a value of ``tensor`` without waiting for a device."""
    return tensor.device.type == "cpu"


def memory_budget_for(memory_bytes: int | None) -> int:
    """The default of ``memory_budget``: 64 MiB in host memory (None).

    On a device, the power of two below a 128th of its memory, at most 1 GiB: 512 MiB of 80 GB. GPUs of one kind differ
    by less.
    """
    if memory_bytes is None:
        return 2**26
    return min(1 << 30, max(1 << 26, 1 << ((memory_bytes // 128).bit_length() - 1)))


def device_memory(device: torch.device) -> int | None:
    """Bytes of memory of a GPU; None for a CPU."""
    return None if device.type != "cuda" else int(torch.cuda.get_device_properties(device).total_memory)


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. Only a copy to the host waits: the host could otherwise read it before it has
    arrived.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


@lru_cache(maxsize=1)
def cpu_info() -> dict[str, str]:
    """The first entry of each name in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = [line.split(":", 1) for line in reversed(lines) if ":" in line]
    return {name.strip(): value.strip() for name, value in pairs}


class Hardware:
    """The devices of one type that this process sees, through torch's module for it, such as ``torch.cuda`` or
    ``torch.cpu``.

    It serves reports and measurements, not steps. Modules differ in what they offer.
    """

    def __init__(self, device_type: str) -> None:
        self._module = torch.get_device_module(device_type)
        self._is_cpu = device_type == "cpu"

    def count(self) -> int:
        return int(self._module.device_count())

    def use(self, device: torch.device) -> None:
        """Makes ``device`` the current one of its type."""
        if hasattr(self._module, "set_device"):
            self._module.set_device(device)

    def finish(self, device: torch.device) -> None:
        """Waits for all work on ``device``."""
        self._module.synchronize(device)

    @lru_cache(maxsize=64)  # noqa: B019 - one object per type of device, kept for the life of the process
    def name(self, device: torch.device) -> str:
        """The vendor's name of it."""
        if self._is_cpu:
            return cpu_info().get("model name") or platform.machine()
        return str(self._module.get_device_name(device)) if hasattr(self._module, "get_device_name") else str(device)

    def details(self, device: torch.device) -> str:
        """Its memory and architecture, as far as torch tells; may be empty."""
        if self._is_cpu:
            threads = torch.get_num_threads()
            return f"{threads} {'thread' if threads == 1 else 'threads'} per rank"
        if not hasattr(self._module, "get_device_properties"):
            return ""
        properties = self._module.get_device_properties(device)
        texts = [f"{properties.total_memory / 2**30:.0f} GiB"] if hasattr(properties, "total_memory") else []
        if hasattr(properties, "major"):
            texts.append(f"sm_{properties.major}{properties.minor}")
        return ", ".join(texts)

    def peers(self) -> tuple[int, int] | None:
        """Number of pairs of devices with peer access, and of all pairs; None if torch cannot tell."""
        if not hasattr(self._module, "can_device_access_peer"):
            return None
        pairs = [(i, j) for i in range(self.count()) for j in range(self.count()) if i != j]
        return sum(self._module.can_device_access_peer(i, j) for i, j in pairs), len(pairs)


@lru_cache(maxsize=8)
def _hardware(device_type: str) -> Hardware:
    return Hardware(device_type)


def hardware_of(device: torch.device) -> Hardware:
    return _hardware(device.type)
