"""Recording and replaying work.

No GPU is used here: the CUDA twin's logic runs against stand-ins for ``torch.cuda``, and was not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from meshmuon.device import CudaReplay, DirectReplay, replay_for


class FakeCuda:
    """Notes what is called, in order. While a graph records, work is noted but not done, as on a device."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.done = 0
        self.recording = False

    def work(self) -> None:
        self.events.append("record" if self.recording else "work")
        self.done += not self.recording

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = self

        class Stream:
            def __init__(self, name: str = "side") -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                fake.events.append(f"{self.name} waits for {other.name}")

        class Graph:
            def replay(self) -> None:
                fake.events.append("replay")
                fake.done += 1

        main = Stream("main")

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            fake.events.append(f"enter {chosen.name}")
            yield
            fake.events.append(f"leave {chosen.name}")

        @contextmanager
        def graph(target: Graph) -> Iterator[None]:
            assert isinstance(target, Graph)
            fake.recording = True
            yield
            fake.recording = False

        for name, value in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "current_stream": lambda: main,
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
