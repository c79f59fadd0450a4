"""Recording and replaying work, and streams of it.

No GPU is used here: the CUDA twin's logic runs against stand-ins for ``torch.cuda``, and was not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from meshmuon.device import CudaReplay, CudaStreams, DirectReplay, DirectStreams, Streams, replay_for, streams_for


class FakeCuda:
    """Notes what is called, in order. While a graph records, work is noted but not done, as on a device."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.done = 0
        self.recording = False
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

        @contextmanager
        def graph(target: Graph) -> Iterator[None]:
            assert isinstance(target, Graph)
            fake.recording = True
            yield
            fake.recording = False

        for name, value in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "current_stream": current_stream,
            "stream": stream,
            "graph": graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def test_direct_replay_works_at_every_call() -> None:
    done: list[int] = []
    replay = DirectReplay(lambda: done.append(len(done)))
    assert done == []
    for _ in range(3):
        replay()
    assert done == [0, 1, 2]


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


def test_cuda_replay_warms_up_on_a_side_stream_that_both_sides_wait_for(cuda: FakeCuda) -> None:
    CudaReplay(cuda.work)()
    assert cuda.events == ["side waits for main", "enter side", "work", "leave side", "main waits for side", "record"]


def test_cuda_replay_tries_again_after_a_failed_recording(cuda: FakeCuda) -> None:
    def failing() -> None:
        cuda.work()
        if cuda.recording and cuda.events.count("record") == 1:
            cuda.recording = False
            raise RuntimeError("capture failed")

    replay = CudaReplay(failing)
    with pytest.raises(RuntimeError, match="capture failed"):
        replay()
    replay()
    assert cuda.events.count("record") == 2
    replay()
    assert cuda.events[-1] == "replay"


@pytest.mark.parametrize(
    ("device", "graphs", "kind"),
    [("cpu", False, DirectReplay), ("cpu", True, DirectReplay), ("cuda", False, DirectReplay), ("cuda", True, CudaReplay)],
)
def test_replay_follows_the_device(device: str, graphs: bool, kind: type) -> None:
    done: list[int] = []
    replay = replay_for(torch.device(device), lambda: done.append(1), graphs=graphs)
    assert type(replay) is kind
    if kind is DirectReplay:
        replay()
        assert done == [1]


DEVICE = torch.device("cuda", 3)


class FakeTensor:
    """Notes which streams use it, so that its memory is not given away too early."""

    def __init__(self, fake: FakeCuda, name: str) -> None:
        self._fake, self._name = fake, name

    def record_stream(self, stream: Any) -> None:
        self._fake.events.append(f"{self._name} is used by {stream.name}")


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
    """Before the work that uses them is given: the main stream may free them as soon as ``beside`` is left."""
    streams = CudaStreams(DEVICE)
    tensors: Any = [FakeTensor(cuda, "first"), FakeTensor(cuda, "second")]
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
    """As ``execute.wave`` uses it: fill and send beside, compute in the main stream, apply beside, join at the end."""
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
