"""Recording and replaying work, streams of it, and copies to host memory.

No GPU is used here: graphs are recorded by a stand-in for ``torch.cuda``. What orders streams, ``tests/happens_before`` derives
from what the calls are for: it runs steps and reports accesses that nothing orders, and demands every wait.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from meshmuon import KernelWarning
from meshmuon.device import (
    AcceleratorHardware,
    CudaReplay,
    CudaStreams,
    CudaTransfers,
    Hardware,
    Streams,
    Transfers,
    _warn_of_capture,
    hardware_of,
    known_to_host,
    replay_for,
    streams_for,
    transfers_for,
)


class FakeCuda:
    """Notes what is called, in order. While a graph records, work is noted but not done, as on a device."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.done = 0
        self.recording = False
        self.modes: list[str] = []  # in which graphs were captured
        self.current: Any = MagicMock()  # the current stream

    def work(self) -> None:
        self.events.append("record" if self.recording else "work")
        self.done += not self.recording

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = self

        class Graph:
            def replay(self) -> None:
                fake.events.append("replay")
                fake.done += 1

        @contextmanager
        def graph(target: Graph, capture_error_mode: str = "global") -> Iterator[None]:
            """As in torch, the stream of the capture stays current if the capture fails."""
            assert isinstance(target, Graph)
            fake.modes.append(capture_error_mode)
            fake.recording, before, fake.current = True, fake.current, MagicMock()
            try:
                yield
            finally:
                fake.recording = False
            fake.current = before

        for name, value in {
            "Stream": lambda device=None: MagicMock(),
            "CUDAGraph": Graph,
            "current_stream": lambda device=None: fake.current,
            "stream": lambda stream: nullcontext(),
            "graph": graph,
            "set_stream": lambda stream: setattr(fake, "current", stream),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def test_cuda_replay_works_once_before_it_records_and_replays_later(cuda: FakeCuda) -> None:
    replay = CudaReplay(cuda.work)
    for calls, events in enumerate((["work", "record"], ["replay"], ["replay"]), 1):
        cuda.events.clear()
        replay()
        assert cuda.events == events
        assert cuda.done == calls
    assert cuda.modes == ["thread_local"]  # other threads do not end the capture


def test_a_batch_that_cannot_be_recorded_runs_without_a_graph(cuda: FakeCuda) -> None:
    """On the stream on which it would have run, and with one warning for all such batches."""

    def failing() -> None:
        cuda.work()
        if cuda.recording:
            raise RuntimeError("operation not permitted when stream is capturing")

    _warn_of_capture.cache_clear()
    current = cuda.current
    replays = [CudaReplay(failing) for _ in range(2)]
    with pytest.warns(KernelWarning, match="without one, with the same results .RuntimeError: operation not permitted") as caught:
        replays[0]()
    for _ in range(3):  # a warning would be an error here
        replays[1]()
    replays[0]()
    assert torch.cuda.current_stream() is current
    assert cuda.done == 5
    assert len(caught) == 1
    assert cuda.events.count("record") == 2, "each is tried once"


@pytest.mark.parametrize(("device", "graphs"), [("cpu", False), ("cpu", True), ("cuda", False), ("cuda", True)])
def test_replay_follows_the_device(device: str, graphs: bool, cuda: FakeCuda) -> None:
    replay = replay_for(torch.device(device), cuda.work, graphs=graphs)
    if device == "cuda" and graphs:
        assert type(replay) is CudaReplay
    else:
        assert replay == cuda.work


DEVICE = torch.device("cuda", 3)


def test_errors_beside_are_errors(cuda: FakeCuda) -> None:
    for streams in (Streams(), CudaStreams(DEVICE)):
        with pytest.raises(ValueError, match="inside"), streams.beside(streams.main_mark()):
            raise ValueError("inside")


@pytest.mark.parametrize(
    ("twin_for", "twins"), [(streams_for, (Streams, CudaStreams)), (transfers_for, (Transfers, CudaTransfers))]
)
def test_twins_follow_the_device_and_have_one_interface(twin_for: Any, twins: tuple[type, type], cuda: FakeCuda) -> None:
    assert [type(twin_for(torch.device(device))) for device in ("cpu", "meta", "cuda")] == [twins[0], twins[0], twins[1]]
    names = [name for name, value in vars(twins[0]).items() if inspect.isfunction(value) and not name.startswith("_")]
    assert names
    for name in names:
        assert inspect.signature(vars(twins[1])[name]).parameters == inspect.signature(vars(twins[0])[name]).parameters, name


def test_direct_transfers_really_copy() -> None:
    """The "device" memory may be freed or written at once; nothing is shared."""
    transfers: Transfers = Transfers()
    device = torch.arange(6.0)
    host = transfers.host_buffer(6, torch.float32)
    assert (host.shape, host.dtype, host.device.type) == ((6,), torch.float32, "cpu")
    transfers.store(host, device)
    device.zero_()
    transfers.settle()
    assert host.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    back = torch.empty(6)
    transfers.load(back, host)
    host.zero_()
    assert back.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_what_the_host_knows() -> None:
    assert known_to_host(torch.ones(()))
    assert not known_to_host(torch.ones((), device="meta"))


# What devices there are.


class DeviceModule:
    """Stands in for torch's module of a kind of device, such as ``torch.cuda``; ``offers`` less than that on some kinds."""

    def __init__(self, *offers: str) -> None:
        self.calls: list[Any] = []
        self.capturing = False
        self._offers = offers
        self._clock = 0.0

    def __getattr__(self, name: str) -> Any:
        offered = {
            "set_device": lambda device: self.calls.append(("use", device)),
            "get_device_name": lambda device: f"a GPU with index {device.index}",
            "get_device_properties": lambda device: SimpleNamespace(total_memory=80 * 2**30, major=9, minor=0),
            "can_device_access_peer": lambda i, j: (i, j) != (0, 1),
            "is_current_stream_capturing": lambda: self.capturing,
        }
        if name in self._offers:
            return offered[name]
        raise AttributeError(name)

    def device_count(self) -> int:
        return 3

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(("finish", device))

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802
        assert enable_timing
        module, event = self, SimpleNamespace(at=None, done=False)

        def record() -> None:
            event.at = module._clock

        def synchronize() -> None:
            event.done = True

        def elapsed_time(other: Any) -> float:
            assert other.done, "torch raises if the device has not got there"
            return float(other.at - event.at)

        event.record, event.synchronize, event.elapsed_time = record, synchronize, elapsed_time
        return event

    def works(self) -> None:
        self._clock += 7.0  # milliseconds


ALL_OFFERS = ("set_device", "get_device_name", "get_device_properties", "can_device_access_peer", "is_current_stream_capturing")


def hardware(module: DeviceModule, monkeypatch: pytest.MonkeyPatch) -> AcceleratorHardware:
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return AcceleratorHardware("cuda")


def test_what_torch_tells_about_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    module, device = DeviceModule(*ALL_OFFERS), torch.device("cuda", 2)
    found = hardware(module, monkeypatch)
    found.use(device)
    found.finish(device)
    assert module.calls == [("use", device), ("finish", device)]
    assert (found.count(), found.name(device), found.details(device)) == (3, "a GPU with index 2", "80 GiB, sm_90")
    assert found.peers() == (5, 6)
    assert found.runs_now(device)
    module.capturing = True
    assert not found.runs_now(device)
    assert found.seconds(device, module.works) == pytest.approx(7e-3)


def test_a_kind_of_device_may_tell_less(monkeypatch: pytest.MonkeyPatch) -> None:
    found, device = hardware(DeviceModule(), monkeypatch), torch.device("cuda", 1)
    found.use(device)
    assert (found.name(device), found.details(device), found.peers(), found.runs_now(device)) == ("cuda:1", "", None, True)


def test_the_cpu_is_a_device() -> None:
    found, cpu = hardware_of(torch.device("cpu")), torch.device("cpu")
    found.use(cpu)
    found.finish(cpu)
    assert isinstance(found, Hardware)
    assert (found.count(), found.peers(), found.runs_now(cpu)) == (1, None, True)
    assert found.name(cpu)
    assert found.seconds(cpu, lambda: None) >= 0.0
    assert "per rank" in found.details(cpu)
    assert isinstance(hardware_of(torch.device("cuda")), AcceleratorHardware)
