"""The demo's processes: this one is rank 0, shows the progress and writes the report; the others follow silently."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Semaphore
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous

Follower = Callable[[Sequence[str] | None], object]
PLACE = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")  # as torchrun sets them
T = TypeVar("T")
_ready: Semaphore | None = None  # in a child: tells rank 0 that it is about to join


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where this process stands: its device and its place among the processes that share the batch."""

    device: torch.device
    rank: int = 0
    world_size: int = 1


@contextmanager
def joined(runtime: Runtime, follower: Follower, arguments: Sequence[str] | None) -> Iterator[None]:
    """The process group of the demo. Starts the other processes unless a launcher such as torchrun has done so."""
    if runtime.world_size == 1:
        yield
        return
    children: list[multiprocessing.process.BaseProcess] = []
    before = {key: os.environ.get(key) for key in PLACE}
    try:
        if not launched():
            _await(children, _start(children, runtime.world_size, follower, arguments))
        elif _ready is not None:
            _ready.release()
        _join("nccl" if runtime.device.type == "cuda" else "gloo")
        yield
    except RuntimeError as error:
        # What a collective says about a lost neighbour is hard to read: say which process ended.
        if lost := _lost(children):
            raise ChildProcessError(lost) from error
        raise
    finally:
        for child in children:
            child.terminate()
        if dist.is_initialized():
            dist.destroy_process_group()
        _restore(before)


def launched() -> bool:
    """Whether a launcher has started this process and set the number of processes, which may be one."""
    return "WORLD_SIZE" in os.environ


def shard(model: nn.Module, runtime: Runtime) -> None:
    """FSDP2 over all processes, layer by layer; nothing to do for a single one."""
    if runtime.world_size == 1:
        return
    mesh = init_device_mesh(runtime.device.type, (runtime.world_size,))
    layers = model.get_submodule("layers")
    for layer in layers.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def mean(values: Sequence[float], runtime: Runtime) -> list[float]:
    """The mean of each value over all processes."""
    if runtime.world_size == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64, device=runtime.device)
    dist.all_reduce(total)
    return [value / runtime.world_size for value in total.tolist()]


def from_first(value: T, runtime: Runtime) -> T:
    """The first process's value, on every process."""
    if runtime.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=runtime.device)
    return box[0]


def _join(backend: str) -> None:
    """As `init_process_group` does, but sound when torchrun starts the processes again.

    torchrun's store outlives them and still holds the addresses of those before: whoever is quick connects to a process
    that is no more and waits for half an hour. Under a name for each attempt nothing old is found.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is None:
        dist.init_process_group(backend)
        return
    store, rank, world_size = next(rendezvous("env://"))
    dist.init_process_group(backend, store=PrefixStore(f"attempt {attempt}", store), rank=rank, world_size=world_size)


def _restore(before: dict[str, str | None]) -> None:
    """The environment as it was: another run in this process must not take it for a launcher's."""
    for key, value in before.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value


def _lost(children: Sequence[multiprocessing.process.BaseProcess]) -> str | None:
    for rank, child in enumerate(children, 1):
        child.join(1.0)  # its sockets close a moment before it counts as ended
        if child.exitcode:
            how = (
                f"was killed by signal {-child.exitcode}"
                if child.exitcode < 0
                else f"ended with exit code {child.exitcode}"
            )
            return f"process {rank} of {len(children) + 1} {how}"
    return None


def _start(
    children: list[multiprocessing.process.BaseProcess], count: int, follower: Follower, arguments: Sequence[str] | None
) -> Semaphore:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    context = multiprocessing.get_context("spawn")
    ready = context.Semaphore(0)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # Ctrl-C is rank 0's to handle, and it ends the others when it is done; they inherit that they ignore it.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for rank in range(1, count):
            environment = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            child = context.Process(target=_follow, args=(environment, ready, follower, arguments), daemon=True)
            child.start()
            children.append(child)
    finally:
        signal.signal(signal.SIGINT, handler)
    os.environ.update({**place, "RANK": "0", "LOCAL_RANK": "0"})
    return ready


def _await(children: Sequence[multiprocessing.process.BaseProcess], ready: Semaphore) -> None:
    """Waits until all children are about to join, in small steps: Ctrl-C and a child that has died end it at once."""
    missing = len(children)
    while missing:
        if ready.acquire(timeout=0.1):
            missing -= 1
        elif any(not child.is_alive() for child in children):
            raise ChildProcessError("one of the processes ended while it was starting; its message is above")


def _follow(environment: dict[str, str], ready: Semaphore, follower: Follower, arguments: Sequence[str]) -> None:
    global _ready
    _ready = ready
    os.environ.update(environment)
    follower(arguments)
