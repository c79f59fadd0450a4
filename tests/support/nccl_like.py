"""A c10d back end on real processes that keeps NCCL's rules, so that code which relies on more than NCCL promises fails
on it.

It takes CPU tensors, but says that it moves those of GPUs alone: meshmuon must vote beside it, over connections of its
own.

- A group that is made while the default group has a bound device is split from it: all ranks of the default group take
  part. Any other group connects at its first collective, in which all of its ranks take part.
- The host blocks at its first contact with a peer until the peer has come to the same point.
- The input of a collective is read as late as possible: when a peer waits for it, or this rank itself does. The output
  holds NaN until ``wait()``. Ranks that have nothing for each other have no contact.
- The n-th collective of a rank in a group meets the n-th of every other rank. Nothing else is ordered: a collective
  that has completed says nothing of those that were started before it. Kinds, dtypes and sizes of both sides are
  compared.
- Nobody hears of a rank that is gone. ``abort`` wakes what waits on this rank, and only there.

Threads of each process read what others send. Messages are small here, so that sending one does not wait for its
reader.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Client, Connection, Listener
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "nccl_like"
DEVICE = torch.device("cuda", 0)  # what the default group is bound to
Parts = dict[int, Tensor]  # global rank → elements
Key = tuple[str, int, int]  # a group, the number of a collective, and the rank that sends a message about it


class _Network:
    """The messages of one process, for all of its groups."""

    def __init__(self, rank: int, store: Any) -> None:
        self.rank, self.store = rank, store
        self.news = threading.Condition()
        self.met: set[tuple[str, int]] = set()  # a point, and a rank that has come there
        self.data: dict[Key, tuple[str, Tensor]] = {}
        self.wanted: dict[Key, str] = {}  # of collectives that this rank has not started
        self.groups: dict[str, NcclLike] = {}
        self._outgoing: dict[int, tuple[Connection, threading.Lock]] = {}
        self._connecting = threading.Lock()
        self._listener = Listener(None, "AF_UNIX", backlog=64)
        store.set(f"{NAME} {rank}", str(self._listener.address))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                incoming = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._read, args=(incoming,), daemon=True).start()

    def _read(self, incoming: Connection) -> None:
        while True:
            try:
                kind, key, *rest = incoming.recv()
            except (EOFError, OSError):  # the other process is gone, which NCCL does not tell
                return
            with self.news:
                if kind == "met":
                    self.met.add(key)
                elif kind == "data":
                    self.data[key] = rest[0], rest[1]
                elif kind == "want":
                    self._want(key, rest[0])
                else:
                    self.groups[key].fail(rest[0])
                self.news.notify_all()

    def _want(self, key: Key, expected: str) -> None:
        name, number, source = key
        group = self.groups.get(name)
        if group is None or number > group.started:
            self.wanted[key] = expected
        else:
            group.give(number, source, expected)

    def send(self, rank: int, *message: Any) -> None:
        with self._connecting:
            if rank not in self._outgoing:
                self._outgoing[rank] = Client(self.store.get(f"{NAME} {rank}").decode(), "AF_UNIX"), threading.Lock()
        connection, sending = self._outgoing[rank]
        with sending:
            try:
                connection.send(message)
            except OSError:  # the other process is gone
                return

    def meet(self, point: str, ranks: Iterable[int], group: NcclLike) -> None:
        """The host blocks until all ``ranks`` have come to the same point."""
        others = set(ranks) - {self.rank}
        for rank in others:
            self.send(rank, "met", (point, self.rank))
        group.block(lambda: [rank for rank in sorted(others) if (point, rank) not in self.met], point)

    def close(self) -> None:
        self._listener.close()
        for connection, _ in self._outgoing.values():
            connection.close()


class _Collective(dist.Work):
    """A collective under way: what this rank sends to each rank, and how many elements it expects from each."""

    def __init__(
        self, group: NcclLike, kind: str, sent: Parts, expected: Mapping[int, int], finish: Callable[[Parts], None]
    ) -> None:
        super().__init__()
        self.kind, self._group, self._finish = kind, group, finish
        self._own = sent.pop(group.network.rank)
        self.sent = {rank: part for rank, part in sent.items() if part.numel()}
        self.expected = {rank: count for rank, count in expected.items() if count and rank != group.network.rank}
        self.number = 0  # among the collectives of the group
        self._pushed: set[int] = set()
        self._done = False

    def says(self, count: int) -> str:
        """What both sides of a transfer must say of it."""
        return f"{self.kind} of {count} elements"

    def push(self, rank: int) -> None:
        """Reads the part of another rank, now, and sends it."""
        if rank in self.sent and rank not in self._pushed:
            self._pushed.add(rank)
            part = self.sent[rank].detach().clone()
            self._group.network.send(rank, "data", self._key(self._group.network.rank), self.says(part.numel()), part)

    def _key(self, sender: int) -> Key:
        return self._group.label, self.number, sender

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._done:
            return True
        group, network = self._group, self._group.network
        with network.news:
            for rank in self.sent:
                self.push(rank)
            for rank, count in self.expected.items():
                network.send(rank, "want", self._key(network.rank), self.says(count))
        point = f"collective {self.number} of group {group.label}, {self.kind}"
        group.block(lambda: [rank for rank in self.expected if self._key(rank) not in network.data], point, timeout)
        parts = {network.rank: self._own}
        for rank, count in self.expected.items():
            said, parts[rank] = network.data.pop(self._key(rank))
            group.compare(self.number, rank, said, self.says(count))
        with torch.no_grad():
            self._finish(parts)
        self._done = True
        group.forget(self.number)
        return True


_ProcessGroup: Any = dist.ProcessGroup  # its declared arguments differ from version to version


class NcclLike(_ProcessGroup):  # type: ignore[misc]
    """A process group that is its own back end."""

    supports_splitting = True

    def __init__(self, label: str, ranks: Sequence[int], network: _Network, timeout: timedelta) -> None:
        super().__init__(list(ranks).index(network.rank), len(ranks))
        self.label, self.ranks, self.network = label, list(ranks), network
        self.options = SimpleNamespace(_timeout=timeout)
        self.connected = False
        self.started = self.splits = self.aborts = 0  # how many there were
        self.history: list[tuple[str, dict[int, int], dict[int, int]]] = []  # kind, elements sent and expected by rank
        self._contacts: set[int] = set()
        self._under_way: dict[int, _Collective] = {}
        self._failure: str | None = None
        network.groups[label] = self

    # ------------------------------------------------------------------------------------------ what torch asks of it

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    @property
    def group_name(self) -> str:
        return self.label

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(DEVICE.type)]

    def _get_backend(self, device: torch.device) -> NcclLike:
        if device.type != DEVICE.type:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def perform_nocolor_split(self, device: torch.device) -> None:
        """What torch calls on a rank outside the new group."""
        self.split()

    def eager_connect_single_device(self, device: torch.device) -> None:
        """A group that was split is connected."""

    def split(self) -> None:
        """``ncclCommSplit``."""
        self.splits += 1
        self.network.meet(f"split {self.splits} of group {self.label}", self.ranks, self)

    def abort(self) -> None:
        self.aborts += 1
        self.fail("aborted")

    def shutdown(self) -> None:
        if self is dist.group.WORLD:
            self.network.close()

    # -------------------------------------------------------------------------------------------- waits and comparisons

    def block(self, missing: Callable[[], list[int]], point: str, timeout: timedelta | None = None) -> None:
        """The host waits until no rank is missing. It raises after the timeout, and as soon as the group has failed."""
        seconds = (timeout or self.options._timeout).total_seconds()
        with self.network.news:
            if not self.network.news.wait_for(lambda: self._failure is not None or not missing(), seconds):
                raise RuntimeError(
                    f"Timed out waiting {round(1000 * seconds)}ms at {point}: ranks {missing()} do not come"
                )
            if self._failure is not None:
                raise RuntimeError(f"group {self.label} of {NAME}: {self._failure}")

    def fail(self, why: str) -> None:
        with self.network.news:
            self._failure = self._failure or why
            self.network.news.notify_all()

    def compare(self, number: int, rank: int, said: str, here: str) -> None:
        """Fails here and on ``rank`` if the two ranks mean different transfers."""
        if said != here:
            text = f"collective {number}: rank {rank} has {said}, rank {self.network.rank} has {here}"
            self.network.send(rank, "differs", self.label, text)
            self.fail(text)
            raise RuntimeError(text)

    def give(self, number: int, rank: int, expected: str) -> None:
        """Another rank waits for its part."""
        collective = self._under_way.get(number)
        if collective is None:  # all of it was sent
            return
        try:
            self.compare(number, rank, expected, collective.says(collective.sent.get(rank, torch.empty(0)).numel()))
        except RuntimeError:  # raised where this rank waits
            return
        collective.push(rank)

    def forget(self, number: int) -> None:
        with self.network.news:
            del self._under_way[number]

    # ----------------------------------------------------------------------------------------------------- collectives

    def _start(
        self, kind: str, sent: Sequence[Tensor], outputs: Sequence[Tensor], finish: Callable[[Parts], None]
    ) -> dist.Work:
        """``outputs``: what comes from each rank, in the order of the ranks, as ``sent``."""
        assert all(map(Tensor.is_contiguous, (*sent, *outputs))), f"{kind} of a tensor that is not contiguous"
        overwritten = {output.untyped_storage().data_ptr() for output in outputs}
        sent = [part.detach().clone() if part.untyped_storage().data_ptr() in overwritten else part for part in sent]
        expected = {rank: output.numel() for rank, output in zip(self.ranks, outputs, strict=True)}
        kind = f"{kind} {outputs[0].dtype}"
        collective = _Collective(self, kind, dict(zip(self.ranks, sent, strict=True)), expected, finish)
        if not self.connected:
            self.connected = True
            self.network.meet(f"first collective of group {self.label}", self.ranks, self)
        for peer in sorted({*collective.sent, *collective.expected} - self._contacts):
            pair = sorted((peer, self.network.rank))
            self.network.meet(f"first contact of ranks {pair} in group {self.label}", [peer], self)
            self._contacts.add(peer)
        for output in outputs:
            output.data.fill_(float("nan") if output.is_floating_point() else 77)
        with self.network.news:
            self.block(list, kind)
            self.started += 1
            collective.number = self.started
            self._under_way[self.started] = collective
            self.history.append(
                (kind, {rank: part.numel() for rank, part in collective.sent.items()}, collective.expected)
            )
            for rank in self.ranks:
                expectation = self.network.wanted.pop((self.label, self.started, rank), None)
                if expectation is not None:
                    self.give(self.started, rank, expectation)
        return collective

    def _moved(self, kind: str, sent: Sequence[Tensor], received: Sequence[Tensor]) -> dist.Work:
        into = dict(zip(self.ranks, received, strict=True))

        def finish(parts: Parts) -> None:
            for rank, part in parts.items():
                into[rank].data.copy_(part.view_as(into[rank]))

        return self._start(kind, sent, received, finish)

    def all_to_all_single(
        self, output: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int], opts: Any = None
    ) -> dist.Work:
        return self._moved("all_to_all_single", self._cut(sent, sent_splits), self._cut(output, received_splits))

    def _cut(self, tensor: Tensor, splits: list[int] | None = None) -> list[Tensor]:
        return list(torch.split(tensor, splits or [len(tensor) // self.size()] * self.size()))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._moved("all_gather", inputs * self.size(), outputs[0])

    def all_gather_single(self, output: Tensor, sent: Tensor, opts: Any = None) -> dist.Work:
        return self._moved("all_gather", [sent] * self.size(), self._cut(output))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        nothing = outputs[0].new_empty(0)
        received = [outputs[0] if position == opts.rootRank else nothing for position in range(self.size())]
        return self._moved("scatter", inputs[0] if self.rank() == opts.rootRank else [nothing] * self.size(), received)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self.scatter(tensors, [tensors * self.size()], opts)

    def _reduced(self, kind: str, sent: Sequence[Tensor], output: Tensor, operation: Any) -> dist.Work:
        assert any(operation == known for known in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX)), operation

        def finish(parts: Parts) -> None:  # in the order of the ranks, so that all get the same bits
            values = [parts[rank].flatten() for rank in self.ranks]
            total = reduce(torch.maximum if operation == dist.ReduceOp.MAX else torch.add, values)
            output.data.copy_((total / self.size() if operation == dist.ReduceOp.AVG else total).view_as(output))

        return self._start(kind, sent, [output] * self.size(), finish)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._reduced("all_reduce", tensors * self.size(), tensors[0], opts.reduceOp)

    def reduce_scatter_single(self, output: Tensor, sent: Tensor, opts: Any) -> dist.Work:
        return self._reduced("reduce_scatter", self._cut(sent), output, opts.reduceOp)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.all_gather_single(torch.zeros(self.size()), torch.zeros(1))

    def _one_by_one(
        self, start: Callable[..., dist.Work], outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        works = [start(output, sent, opts) for output, sent in zip(outputs, inputs, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._one_by_one(self.all_gather_single, outputs, inputs, opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        return self._one_by_one(self.reduce_scatter_single, outputs, inputs, opts)

    # Older versions of torch call them so.
    alltoall_base, _allgather_base, _reduce_scatter_base = all_to_all_single, all_gather_single, reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _create(options: Any, _: Any) -> NcclLike:
    """A new group. torch's NCCL is given the communicator to split from under the same condition."""
    default: Any = dist.group.WORLD
    network = _Network(options.group_rank, options.store) if default is None else default.network
    ranks = options.global_ranks_in_group or range(options.group_size)
    group = NcclLike(options.group_id, ranks, network, options.timeout)
    if default is not None and default.bound_device_id is not None:
        default.split()
        group.connected = True
    return group


_c10d: Any = dist.distributed_c10d
_object_device = _c10d._get_object_coll_device
# torch puts objects into the memory of the group's device, which is not there.
_c10d._get_object_coll_device = lambda group=None: "cpu" if isinstance(group, NcclLike) else _object_device(group)
# From 2.15 on torch hands every back end the one to split from, which must not be written in Python, ...
_c10d._DistributedBackendOptions = type("Options", (_c10d._DistributedBackendOptions,), {"split_from": None})
# ... and records what a group does under a name that groups written in Python do not have.
_c10d._maybe_attach_flight_recorder = lambda *arguments: None
dist.Backend.register_backend(NAME, _create, extended_api=True, devices=[DEVICE.type])


def bind_device() -> None:
    """What ``init_process_group(device_id=...)`` does, which refuses a device that is not there."""
    default: Any = dist.group.WORLD
    default.connected = True
    default.bound_device_id = DEVICE


def compare_histories() -> None:
    """Demands that all ranks have started the same collectives, with sizes that fit; for all ranks of the default
    group.
    """
    default: Any = dist.group.WORLD
    network, store = default.network, default.network.store
    for label, group in network.groups.items():
        store.set(f"{NAME} {label} {network.rank}", pickle.dumps(group.history))
        histories = {rank: pickle.loads(store.get(f"{NAME} {label} {rank}")) for rank in group.ranks}
        mine = histories[network.rank]
        for rank, history in histories.items():
            counts = len(mine), len(history)
            assert counts[0] == counts[1], f"group {label}: {counts} collectives on ranks {network.rank} and {rank}"
            for number, ((kind, sent, _), (other_kind, _, expected)) in enumerate(zip(mine, history, strict=True)):
                pair = (kind, sent.get(rank, 0)), (other_kind, expected.get(network.rank, 0))
                assert pair[0] == pair[1], (
                    f"group {label}, collective {number}, ranks {network.rank} and {rank}: {pair}"
                )
