"""Recording and replaying work, streams of it, and copies to host memory.

No GPU is used here: the CUDA twin's logic runs against stand-ins for ``torch.cuda``. What these tests say call by call,
``tests/happens_before`` derives from what the calls are for: it runs steps and reports accesses that nothing orders.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshmuon import KernelWarning
from meshmuon.device import (
    AcceleratorHardware,
    CudaReplay,
    CudaStreams,
    CudaTransfers,
    DirectStreams,
    DirectTransfers,
    HostHardware,
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
        self.devices: list[torch.device | None] = []  # of new streams and of those asked for
        self.current: Any = None  # another stream than the main one
        self.stream_type: Any = None

    def work(self) -> None:
        self.events.append("record" if self.recording else "work")
        self.done += not self.recording

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = self

        class Stream:
            def __init__(self, device: torch.device | None = None, name: str = "side") -> None:
                self.name = name
                self.marks = 0
                fake.devices.append(device)

            def wait_stream(self, other: Stream) -> None:
                fake.events.append(f"{self.name} waits for {other.name}")

            def record_event(self) -> str:
                self.marks += 1
                fake.events.append(f"{self.name} marks {self.name}{self.marks}")
                return f"{self.name}{self.marks}"

            def synchronize(self) -> None:
                fake.events.append(f"the host waits for {self.name}")

            def wait_event(self, event: str) -> None:
                fake.events.append(f"{self.name} waits for {event}")

        class Graph:
            def replay(self) -> None:
                fake.events.append("replay")
                fake.done += 1

        main = Stream(name="main")
        fake.devices.clear()

        def current_stream(device: torch.device | None = None) -> Stream:
            fake.devices.append(device)
            return fake.current or main

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            fake.events.append(f"enter {chosen.name}")
            try:
                yield
            finally:
                fake.events.append(f"leave {chosen.name}")

        fake.stream_type = Stream

        def set_stream(chosen: Stream) -> None:
            fake.current = None if chosen is main else chosen

        @contextmanager
        def graph(target: Graph, capture_error_mode: str = "global") -> Iterator[None]:
            """As in torch, the stream of the capture stays current if the capture fails."""
            assert isinstance(target, Graph)
            fake.modes.append(capture_error_mode)
            fake.recording, before, fake.current = True, fake.current, Stream(name="capture")
            try:
                yield
            finally:
                fake.recording = False
            fake.current = before

        for name, value in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "current_stream": current_stream,
            "stream": stream,
            "graph": graph,
            "set_stream": set_stream,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def test_cuda_replay_records_once_and_replays_later(cuda: FakeCuda) -> None:
    replay = CudaReplay(cuda.work)
    assert cuda.events == []
    replay()
    assert (cuda.events.count("work"), cuda.events.count("record"), cuda.events.count("replay")) == (1, 1, 0)
    first = list(cuda.events)
    replay()
    replay()
    assert cuda.events == [*first, "replay", "replay"]


def test_cuda_replay_does_the_work_once_per_call(cuda: FakeCuda) -> None:
    replay = CudaReplay(cuda.work)
    for calls in (1, 2, 3):
        replay()
        assert cuda.done == calls


def test_cuda_replay_works_once_before_it_records(cuda: FakeCuda) -> None:
    CudaReplay(cuda.work)()
    assert cuda.events == ["work", "record"]


def test_a_batch_that_cannot_be_recorded_runs_without_a_graph(cuda: FakeCuda) -> None:
    """On the stream on which it would have run, and with one warning for all such batches."""

    def failing() -> None:
        cuda.work()
        if cuda.recording:
            raise RuntimeError("operation not permitted when stream is capturing")

    _warn_of_capture.cache_clear()
    cuda.current = current = cuda.stream_type(name="the user's")
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


def test_other_threads_do_not_end_a_capture(cuda: FakeCuda) -> None:
    CudaReplay(cuda.work)()
    assert cuda.modes == ["thread_local"]


@pytest.mark.parametrize(("device", "graphs"), [("cpu", False), ("cpu", True), ("cuda", False), ("cuda", True)])
def test_replay_follows_the_device(device: str, graphs: bool, cuda: FakeCuda) -> None:
    replay = replay_for(torch.device(device), cuda.work, graphs=graphs)
    if device == "cuda" and graphs:
        assert type(replay) is CudaReplay
    else:
        assert replay == cuda.work


DEVICE = torch.device("cuda", 3)


class FakeTensor:
    """Notes which streams use it, so that its memory is not given away too early."""

    def __init__(self, fake: FakeCuda, name: str, device: str = "cuda") -> None:
        self._fake, self._name, self.device = fake, name, torch.device(device)

    def record_stream(self, stream: Any) -> None:
        self._fake.events.append(f"{self._name} is used by {stream.name}")

    def copy_(self, source: FakeTensor, non_blocking: bool = False) -> None:
        how = "without waiting" if non_blocking else "waiting"
        self._fake.events.append(f"copy {source._name} to {self._name}, {how}")


def test_direct_streams_run_at_once() -> None:
    streams: Streams = DirectStreams()
    order: list[str] = []
    mark = streams.main_mark()
    with streams.beside(mark, [torch.ones(1)]):
        order.append("beside")
    streams.main_waits(streams.side_mark())
    order.append("main")
    with streams.beside(streams.main_mark()):
        order.append("beside again")
    assert order == ["beside", "main", "beside again"]


def test_errors_beside_are_errors(cuda: FakeCuda) -> None:
    for streams in (DirectStreams(), CudaStreams(DEVICE)):
        with pytest.raises(ValueError, match="inside"), streams.beside(streams.main_mark()):
            raise ValueError("inside")
    assert cuda.events[-1] == "leave side"


def test_work_beside_waits_for_its_mark_before_it_begins(cuda: FakeCuda) -> None:
    streams = CudaStreams(DEVICE)
    ready = streams.main_mark()
    with streams.beside(ready):
        cuda.work()
    assert cuda.events == ["main marks main1", "side waits for main1", "enter side", "work", "leave side"]


def test_the_main_stream_waits_for_the_side(cuda: FakeCuda) -> None:
    streams = CudaStreams(DEVICE)
    filled = streams.side_mark()
    later = streams.side_mark()
    streams.main_waits(filled)
    streams.main_waits(later)
    assert cuda.events == ["side marks side1", "side marks side2", "main waits for side1", "main waits for side2"]


def test_tensors_used_beside_are_kept_for_the_side_stream(cuda: FakeCuda) -> None:
    """Before the work that uses them is given: the main stream may free them as soon as ``beside`` is left.

    torch cannot do that to host memory, and need not.
    """
    streams = CudaStreams(DEVICE)
    tensors: Any = [FakeTensor(cuda, "first"), FakeTensor(cuda, "in host memory", "cpu"), FakeTensor(cuda, "second")]
    with streams.beside(streams.main_mark(), tensors):
        cuda.work()
    assert cuda.events[1:] == [
        "side waits for main1",
        "first is used by side",
        "second is used by side",
        "enter side",
        "work",
        "leave side",
    ]


def test_main_is_the_stream_that_is_current_at_each_call(cuda: FakeCuda) -> None:
    streams = CudaStreams(DEVICE)
    streams.main_mark()
    cuda.current = cuda.stream_type(name="user's")
    mark = streams.main_mark()
    streams.main_waits(mark)
    assert cuda.events == ["main marks main1", "user's marks user's1", "user's waits for user's1"]


def test_streams_belong_to_the_device(cuda: FakeCuda) -> None:
    streams = CudaStreams(DEVICE)
    streams.main_waits(streams.main_mark())
    assert cuda.devices == [DEVICE] * 3


def test_a_wave_in_order(cuda: FakeCuda) -> None:
    """Fill beside, compute in the main stream, apply beside, join at the end."""
    streams = CudaStreams(DEVICE)
    ready = streams.main_mark()
    with streams.beside(ready):
        cuda.events.append("fill")
    filled = streams.side_mark()
    streams.main_waits(filled)
    cuda.events.append("compute")
    with streams.beside(streams.main_mark()):
        cuda.events.append("apply")
    streams.main_waits(streams.side_mark())
    assert cuda.events == [
        "main marks main1",
        "side waits for main1",
        "enter side",
        "fill",
        "leave side",
        "side marks side1",
        "main waits for side1",
        "compute",
        "main marks main2",
        "side waits for main2",
        "enter side",
        "apply",
        "leave side",
        "side marks side2",
        "main waits for side2",
    ]


def test_streams_follow_the_device(cuda: FakeCuda) -> None:
    assert type(streams_for(torch.device("cpu"))) is DirectStreams
    assert type(streams_for(torch.device("meta"))) is DirectStreams
    assert cuda.devices == []
    assert type(streams_for(DEVICE)) is CudaStreams
    assert cuda.devices == [DEVICE]


def test_direct_transfers_really_copy() -> None:
    """The "device" memory may be freed or written at once; nothing is shared."""
    transfers: Transfers = DirectTransfers()
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


def test_storing_runs_beside_and_after_what_the_device_was_given(cuda: FakeCuda) -> None:
    """The memory it reads is kept for the side stream; neither the host nor the main stream waits."""
    transfers, device, host = CudaTransfers(DEVICE), FakeTensor(cuda, "device"), FakeTensor(cuda, "host")
    transfers.store(host, device)  # type: ignore[arg-type]
    assert cuda.events == [
        "side waits for main",
        "enter side",
        "copy device to host, without waiting",
        "leave side",
        "device is used by side",
    ]


def test_loading_runs_behind_what_was_stored_and_before_what_the_device_is_given_next(cuda: FakeCuda) -> None:
    """New memory may still be read by the main stream's earlier work, so that the side stream waits for it."""
    transfers, device, host = CudaTransfers(DEVICE), FakeTensor(cuda, "device"), FakeTensor(cuda, "host")
    transfers.load(device, host)  # type: ignore[arg-type]
    assert cuda.events == [
        "side waits for main",
        "enter side",
        "copy host to device, without waiting",
        "leave side",
        "main waits for side",
    ]


def test_one_side_stream_orders_stores_and_loads(cuda: FakeCuda) -> None:
    transfers, device, host = CudaTransfers(DEVICE), FakeTensor(cuda, "device"), FakeTensor(cuda, "host")
    transfers.store(host, device)  # type: ignore[arg-type]
    transfers.load(device, host)  # type: ignore[arg-type]
    streams = [event.split()[1] for event in cuda.events if event.startswith("enter")]
    assert streams == ["side", "side"]
    assert cuda.devices == [DEVICE] * 4, "one stream of its own, and the current one at each call"


def test_settling_is_the_only_wait_of_the_host(cuda: FakeCuda) -> None:
    transfers, device, host = CudaTransfers(DEVICE), FakeTensor(cuda, "device"), FakeTensor(cuda, "host")
    transfers.store(host, device)  # type: ignore[arg-type]
    transfers.load(device, host)  # type: ignore[arg-type]
    assert not any("the host waits" in event for event in cuda.events)
    transfers.settle()
    assert cuda.events[-1] == "the host waits for side"


def test_host_buffers_of_a_gpu_are_pinned(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "empty", lambda size, **how: asked.append({"size": size, **how}))
    CudaTransfers(DEVICE).host_buffer(5, torch.bfloat16)
    DirectTransfers().host_buffer(5, torch.bfloat16)
    plain = {"size": 5, "dtype": torch.bfloat16, "device": "cpu"}
    assert asked == [{**plain, "pin_memory": True}, plain]


def test_transfers_follow_the_device(cuda: FakeCuda) -> None:
    assert type(transfers_for(torch.device("cpu"))) is DirectTransfers
    assert cuda.devices == []
    assert type(transfers_for(DEVICE)) is CudaTransfers
    assert cuda.devices == [DEVICE]


@pytest.mark.parametrize(
    ("protocol", "twins"), [(Streams, (DirectStreams, CudaStreams)), (Transfers, (DirectTransfers, CudaTransfers))]
)
def test_twins_have_one_interface(protocol: type, twins: tuple[type, type]) -> None:
    names = [name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")]
    assert names
    for twin in twins:
        for name in names:
            ours, wanted = (inspect.signature(getattr(one, name)).parameters for one in (twin, protocol))
            assert ours == wanted, (twin, name)


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
    assert isinstance(found, HostHardware)
    assert (found.count(), found.peers(), found.runs_now(cpu)) == (1, None, True)
    assert found.name(cpu)
    assert "per rank" in found.details(cpu)
    assert isinstance(hardware_of(torch.device("cuda")), AcceleratorHardware)
