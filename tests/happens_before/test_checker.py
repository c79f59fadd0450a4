"""The checker itself, beyond what random programs and removals show: what it must report, and what it must not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.happens_before.footprints import Footprint
from tests.support.happens_before.programs import Program, ProgramParam
from tests.support.happens_before.recorder import Recorder
from tests.support.happens_before.runs import run_program, twins
from tests.support.happens_before.twin_tensor import DEVICE
from tests.support.threads import run_threads


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with twins(), Recorder().recording() as recorder:
        yield recorder


def kinds(recorder: Recorder) -> list[str]:
    return [finding.kind for finding in recorder.findings]


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, device=DEVICE)


def beside(stream: Any, *, waits: bool) -> Any:
    if waits:
        stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def test_an_event_orders_what_was_given_before_it(recorder: Recorder) -> None:
    side, x, y = torch.cuda.Stream(), zeros(4), zeros(4)
    early = torch.cuda.current_stream().record_event()
    y.add_(1)
    side.wait_event(early)
    with torch.cuda.stream(side):
        x.add_(1)
        assert kinds(recorder) == []
        y.add_(1)
    assert kinds(recorder) == ["race"]
    side.wait_event(torch.cuda.Event())  # was never recorded
    with torch.cuda.stream(side):
        y.add_(1)
    assert kinds(recorder) == ["race", "race"]


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_is_freed_once_the_host_has_waited_is_nobody_s(recorder: Recorder, waits: bool) -> None:
    """No work of the stream that gets it must come between: the host allocates after its wait."""
    side, x = torch.cuda.Stream(), zeros(4)
    with beside(side, waits=True):
        x.add_(1)
    if waits:
        side.synchronize()
    del x
    zeros(4)
    assert kinds(recorder) == (["host wait"] if waits else ["lifetime"])


def test_columns_of_one_buffer_do_not_meet(recorder: Recorder) -> None:
    side, x = torch.cuda.Stream(), zeros(4, 6)
    side.wait_stream(torch.cuda.current_stream())
    x[:, 0:3].add_(1)
    with torch.cuda.stream(side):
        x[:, 3:6].add_(1)
        assert kinds(recorder) == []
        x[1:3, 2:4].add_(1)
    assert kinds(recorder) == ["race"]


def test_footprints_are_those_of_the_elements() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.arange(60, dtype=torch.int16)

    def view() -> Tensor:
        start, rows, cols, stride, step = (int(torch.randint(n, (), generator=generator)) for n in (9, 4, 5, 12, 4))
        return base.as_strided((rows, cols), (stride, step), start)

    found = set()
    for _ in range(300):
        a, b = view(), view()
        meet = bool(set(a.flatten().tolist()) & set(b.flatten().tolist()))
        assert Footprint.of(a, base.data_ptr()).overlaps(Footprint.of(b, base.data_ptr())) == meet
        found.add(meet)
    assert found == {True, False}


@pytest.mark.parametrize("waits", [True, False])
def test_new_memory_may_still_be_in_use_on_the_stream_that_allocates_it(recorder: Recorder, waits: bool) -> None:
    side, x = torch.cuda.Stream(), torch.empty(4, device=DEVICE)
    with beside(side, waits=waits):
        x.zero_()
    assert kinds(recorder) == ([] if waits else ["race"])


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(),
        lambda x: bool(x),
        lambda x: float(x),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x.to("cpu", non_blocking=True),  # to memory that is not pinned
        lambda x: torch.nonzero(x),
        lambda x: x.reshape(1)[x.reshape(1) > 0],
        lambda x: torch.equal(x, x),
        lambda x: torch.ones(()).to(DEVICE),
        lambda x: torch.ones(()).to(DEVICE, non_blocking=True),
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: x.copy_(torch.ones((), pin_memory=True)),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.current_stream().record_event().synchronize(),
    ],
)
def test_the_host_waits(recorder: Recorder, read: Any) -> None:
    x = zeros()
    assert kinds(recorder) == []
    read(x)
    assert kinds(recorder) == ["host wait"]


def test_the_host_does_not_wait(recorder: Recorder) -> None:
    x, host = zeros(3), torch.ones(3, pin_memory=True)
    x.copy_(host, non_blocking=True)
    x[0] = 2.0
    x.mul_(torch.ones(()))  # a number in host memory travels with the kernel
    y = torch.where(x > 0, x, 0.0).to(torch.float64)
    host.copy_(y, non_blocking=True)
    assert host.is_pinned()
    assert kinds(recorder) == []


@pytest.mark.parametrize("waits", [True, False])
def test_the_host_reads_pinned_memory(recorder: Recorder, waits: bool) -> None:
    x, host = zeros(3), torch.ones(3, pin_memory=True)
    host.copy_(x, non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    other = torch.empty(0).set_(host.untyped_storage()[4:8]).clone()  # from the middle of the same memory
    assert kinds(recorder) == (["host wait"] if waits else ["race"])
    del other


def test_devices_are_not_mixed(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError, match="tensors of a GPU and of the host in one operation"):
        zeros(3).add_(torch.ones(3))


def test_a_graph_is_captured_without_being_run(recorder: Recorder) -> None:
    x, scratch = zeros(4), zeros(4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        torch.add(x, 1.0, out=scratch)
        x.copy_(scratch * 2.0)
    assert kinds(recorder) == ["host wait"]  # to capture, torch waits for the device
    recorder.findings.clear()
    values: list[list[float]] = [x.host_values.tolist()]  # type: ignore[attr-defined]
    for _ in range(2):
        graph.replay()
        values.append(x.host_values.tolist())  # type: ignore[attr-defined]
    assert values == [[0.0] * 4, [2.0] * 4, [6.0] * 4]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        scratch.zero_()
    assert set(kinds(recorder)) == {"race"}


def test_a_wait_inside_a_graph_is_misuse(recorder: Recorder) -> None:
    x = zeros()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        x.item()
    assert "misuse" in kinds(recorder)


@pytest.mark.parametrize("how", ["waits", "touches", "frees"])
def test_the_buffers_of_a_collective_are_in_use_until_it_is_waited_for(how: str) -> None:
    def main(rank: int) -> list[str]:
        with Recorder().recording() as recorder:
            x = zeros(4)
            x.fill_(float(rank))
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            if how == "waits":
                work.wait()
                assert x.host_values.tolist() == [1.0] * 4  # type: ignore[attr-defined]
            if how == "frees":
                del x
                zeros(4)
            else:
                x.add_(1)
            return kinds(recorder)

    expected = {"waits": [], "touches": ["race", "race"], "frees": ["lifetime"]}[how]
    with twins():
        assert run_threads(2, main) == [expected] * 2


def test_waiting_for_a_collective_orders_the_streams_around_it() -> None:
    """Why a wave needs no mark beside its exchanges: an exchange runs after what its stream was given before it."""

    def main(rank: int) -> list[str]:
        with Recorder().recording() as recorder:
            side, x, y = torch.cuda.Stream(), zeros(4), zeros(4)
            with beside(side, waits=True):
                x.add_(1)
                y.add_(1)
                work = dist.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()
            y.add_(1)
            return kinds(recorder)

    with twins():
        assert run_threads(2, main) == [[], []]


def test_ranks_that_start_collectives_by_what_has_completed() -> None:
    """Whether work has completed is random here, so that a rank which asks soon starts something else than another."""

    def main(rank: int) -> None:
        with Recorder(seed=rank).recording():
            for _ in range(8):
                work = dist.all_reduce(zeros(4), async_op=True)
                assert work is not None
                dist.all_reduce(zeros(2 if work.is_completed() else 3))

    with twins() as started, pytest.raises(RuntimeError):
        run_threads(2, main)
    assert "starts all_reduce of torch.float32 on cuda [" in started.differences()[0]


def test_a_synchronous_collective_is_not_ordered_behind_an_asynchronous_one() -> None:
    def main(rank: int) -> list[str]:
        with Recorder().recording() as recorder:
            x = zeros(4)
            with beside(torch.cuda.Stream(), waits=True):
                work = dist.all_reduce(x, async_op=True)
            dist.all_reduce(zeros(2))
            x.add_(1)
            del work
            return kinds(recorder)

    with twins():
        assert run_threads(2, main) == [["race", "race"]] * 2


def test_sizes_that_do_not_fit() -> None:
    def main(rank: int) -> None:
        with Recorder().recording():
            splits = ([1, 2], [1, 2]) if rank else ([1, 3], [1, 1])
            sent, received = zeros(sum(splits[1])), zeros(sum(splits[0]))
            dist.all_to_all_single(received, sent, *splits)

    with twins() as started:
        run_threads(2, main)
    assert [text.split(": ", 1)[1].count("3") for text in started.differences()] == [1]


MATRICES = Program(
    mesh=(2,),
    params=(
        ProgramParam("layers.0.weight", (6, 4)),
        ProgramParam("layers.1.weight", (3, 5)),
        ProgramParam("bias", (5,), use_muon=False),
    ),
    options={"compute_dtype": torch.float32, "comm_dtype": torch.float32},
)


def test_twins_compute_the_same_with_graphs_and_offload() -> None:
    """What is recorded is a real step: its values are those of a step without the twin's detours."""
    plain = run_program(MATRICES)
    with_graphs = replace(MATRICES, options={**MATRICES.options, "cuda_graphs": True})
    for changed in (with_graphs, replace(MATRICES, events=((1, "offload"),))):
        other = run_program(changed)
        for ours, theirs in zip(plain.weights, other.weights, strict=True):
            assert all(map(torch.equal, ours, theirs))
    assert plain.operations > 100
    assert plain.collectives > 10
