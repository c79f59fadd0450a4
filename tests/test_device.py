"""Recording and replaying work, streams of it, and copies to host memory.

No GPU is used here: what needs one runs on the stand-in for ``torch.cuda`` of ``tests/support/happens_before``, which
reports accesses that nothing orders. ``tests/happens_before/test_removals.py`` shows that each wait, mark and note of
use is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshmuon import KernelWarning
from meshmuon.device import (
    CudaReplay,
    CudaStreams,
    CudaTransfers,
    Graphs,
    Hardware,
    Streams,
    Transfers,
    _warn_of_capture,
    gpu_bits,
    hardware_of,
    known_to_host,
    memory_budget_for,
    replay_for,
    streams_for,
    transfers_for,
    wide_sums,
)
from tests.support.happens_before.recorder import Recorder
from tests.support.happens_before.runs import twins
from tests.support.happens_before.twin_tensor import DEVICE


@pytest.fixture
def cuda() -> Iterator[Recorder]:
    with twins(), Recorder().recording() as recorder:
        yield recorder


def test_cuda_replay_does_the_work_once_per_call_and_captures_it_once(cuda: Recorder) -> None:
    """Capturing writes nothing, and replaying calls nothing."""
    counter, calls = torch.zeros((), device=DEVICE), list[int]()

    def work() -> None:
        calls.append(1)
        counter.add_(1)

    replay = CudaReplay(work, [])
    assert not calls
    for step in range(1, 4):
        replay()
        assert counter.cpu().item() == step
    assert len(calls) == 2
    assert not cuda.findings or {finding.kind for finding in cuda.findings} == {"host wait"}


def test_a_batch_that_cannot_be_recorded_runs_without_a_graph(cuda: Recorder) -> None:
    """On the stream on which it would have run, and with one warning for all such batches."""
    counter, captures = torch.zeros((), device=DEVICE), list[int]()

    def failing() -> None:
        counter.add_(1)
        if cuda.capture is not None:
            captures.append(1)
            raise RuntimeError("operation not permitted when stream is capturing")

    _warn_of_capture.cache_clear()
    graphs: Graphs = []
    replays = [CudaReplay(failing, graphs) for _ in range(2)]
    user = torch.cuda.Stream()
    user.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(user):
        with pytest.warns(
            KernelWarning, match="without one, with the same results .RuntimeError: operation not perm"
        ) as caught:
            replays[0]()
        for _ in range(3):  # a warning would be an error here
            replays[1]()
        replays[0]()
        assert torch.cuda.current_stream() == user
    assert counter.cpu().item() == 5
    assert len(caught) == 1
    assert len(captures) == 2, "each is tried once"


def test_graphs_share_a_pool_until_a_capture_fails(cuda: Recorder) -> None:
    """Torch refuses a pool to which it thinks that a graph is still being captured."""
    counter, graphs = torch.zeros((), device=DEVICE), list[Any]()

    def work() -> None:
        counter.add_(1)

    def failing() -> None:
        if cuda.capture is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    _warn_of_capture.cache_clear()
    replays = [CudaReplay(work, graphs) for _ in range(4)]
    for replay in replays[:2]:
        replay()
    with pytest.warns(KernelWarning, match="runs without one"):
        CudaReplay(failing, graphs)()
    for replay in (*replays[2:], *replays):
        replay()
    first, second, third, fourth = cuda.pools
    assert first is second is not third is fourth
    assert counter.cpu().item() == 8


@pytest.mark.parametrize(("device", "graphs"), [("cpu", None), ("cpu", []), ("cuda", None), ("cuda", [])])
def test_replay_follows_the_device(device: str, graphs: Graphs | None) -> None:
    def work() -> None: ...

    replay = replay_for(torch.device(device), work, graphs)
    assert type(replay) is CudaReplay if device == "cuda" and graphs is not None else replay is work


FLAGS = [
    *(f"allow_{dtype}_reduced_precision_reduction{which}" for dtype in ("fp16", "bf16") for which in ("", "_split_k")),
    "allow_fp16_accumulation",
]


def flags() -> list[bool]:
    return [getattr(torch.backends.cuda.matmul, name) for name in FLAGS]


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("given", [(True, True, False), (True, True, True), ((False, False), (False, True), True)])
def test_sums_are_wide_on_a_gpu_whatever_the_user_has_set(given: tuple[Any, ...], real: bool) -> None:
    """On torch's own flags, which exist without a GPU, and on the stand-in."""
    with nullcontext() if real else twins():
        matmul, before = torch.backends.cuda.matmul, flags()
        try:
            matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = given[:2]
            matmul.allow_fp16_accumulation = given[2]
            users = flags()
            assert users[4] is given[2]
            for device, dtype in ((torch.device("cpu"), torch.float16), (DEVICE, torch.float32)):
                with wide_sums(device, dtype):
                    assert flags() == users
            with wide_sums(DEVICE, torch.float16):
                assert flags() == [False, *users[1:4], False]
            with wide_sums(DEVICE, torch.bfloat16):
                assert flags() == [*users[:2], False, *users[3:]]
            assert flags() == users
            with pytest.raises(ValueError, match="inside"), wide_sums(DEVICE, torch.float16):
                raise ValueError("inside")
            assert flags() == users
        finally:
            matmul.allow_fp16_reduced_precision_reduction = tuple(before[:2])  # type: ignore[assignment]
            matmul.allow_bf16_reduced_precision_reduction = tuple(before[2:4])  # type: ignore[assignment]
            matmul.allow_fp16_accumulation = before[4]


def test_what_changes_bits_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with twins():
        before = gpu_bits(DEVICE)
        assert before == gpu_bits(DEVICE)
        assert {"GPU=a stand-in", f"torch={torch.__version__}", "fp32_precision=none"} <= set(before.split(", "))
        seen = {before}
        others = {FLAGS[0]: False, FLAGS[2]: False, FLAGS[4]: True, "fp32_precision": "tf32"}
        for name, value in others.items():
            setattr(torch.backends.cuda.matmul, name, value)
            seen.add(gpu_bits(DEVICE))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
        assert len({*seen, gpu_bits(DEVICE)}) == 6


def test_errors_beside_are_errors(cuda: Recorder) -> None:
    main = torch.cuda.current_stream()
    for streams in (Streams(), CudaStreams(DEVICE)):
        with pytest.raises(ValueError, match="inside"), streams.on_side_stream(streams.main_mark()):
            raise ValueError("inside")
    assert torch.cuda.current_stream() == main


def test_a_wave_on_a_stream_of_the_user(cuda: Recorder) -> None:
    """Fill beside, compute in the main stream, apply beside, join at the end; what is used beside may be freed at
    once.
    """
    user = torch.cuda.Stream()
    user.wait_stream(torch.cuda.current_stream())
    streams = CudaStreams(DEVICE)
    with torch.cuda.stream(user):
        weight, gradient = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
        # the last one is in host memory
        with streams.on_side_stream(streams.main_mark(), [weight, gradient, torch.ones(4)]):
            filled = gradient + 1
        del gradient
        torch.empty(4, device=DEVICE).fill_(7)  # perhaps in the memory of the gradient
        streams.main_waits(streams.side_mark())
        filled.mul_(2)
        with streams.on_side_stream(streams.main_mark(), [weight, filled]):
            weight.sub_(filled)
        streams.main_waits(streams.side_mark())
        weight.add_(1)
    assert not cuda.findings
    torch.cuda.current_stream().wait_stream(user)
    assert weight.cpu().tolist() == [-2.0] * 4


@pytest.mark.parametrize(
    ("choose", "twins"), [(streams_for, (Streams, CudaStreams)), (transfers_for, (Transfers, CudaTransfers))]
)
def test_twins_follow_the_device_and_have_one_interface(choose: Any, twins: tuple[type, type], cuda: Recorder) -> None:
    assert [type(choose(torch.device(device))) for device in ("cpu", "meta", DEVICE)] == [twins[0], twins[0], twins[1]]
    names = [name for name, value in vars(twins[0]).items() if inspect.isfunction(value) and not name.startswith("_")]
    assert names
    for name in names:
        assert (
            inspect.signature(vars(twins[1])[name]).parameters == inspect.signature(vars(twins[0])[name]).parameters
        ), name


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


def test_state_leaves_and_comes_back_without_a_wait_of_the_host(cuda: Recorder) -> None:
    """Stored behind what the device was given, loaded before what it is given next; only ``settle`` waits."""
    transfers = CudaTransfers(DEVICE)
    host = transfers.host_buffer(4, torch.float32)
    state = torch.ones(4, device=DEVICE)
    state.mul_(3)
    transfers.store(host, state)
    del state
    torch.empty(4, device=DEVICE).fill_(7)  # perhaps in the memory that is being stored
    back = torch.empty(4, device=DEVICE)
    transfers.load(back, host)
    back.add_(1)
    assert not cuda.findings
    transfers.settle()
    assert [finding.kind for finding in cuda.findings] == ["host wait"]
    assert host.tolist() == [3.0] * 4
    assert back.cpu().tolist() == [4.0] * 4


def test_host_buffers_of_a_gpu_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "empty", lambda size, **how: asked.append({"size": size, **how}))
    with twins(), Recorder().recording():
        transfers = CudaTransfers(DEVICE)
    transfers.host_buffer(5, torch.bfloat16)
    Transfers().host_buffer(5, torch.bfloat16)
    plain = {"size": 5, "dtype": torch.bfloat16, "device": "cpu"}
    assert asked == [{**plain, "pin_memory": True}, plain]


def test_what_the_host_knows() -> None:
    assert known_to_host(torch.ones(()))
    assert not known_to_host(torch.ones((), device="meta"))


# What devices there are.


def hardware(monkeypatch: pytest.MonkeyPatch, **offers: Any) -> Hardware:
    """Of a kind of device whose module in torch, such as ``torch.cuda``, has ``offers`` beside what all have."""
    module = SimpleNamespace(device_count=lambda: 3, **offers)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return Hardware("cuda")


def test_what_torch_tells_about_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, device = list[Any](), torch.device("cuda", 2)
    found = hardware(
        monkeypatch,
        synchronize=lambda device: calls.append(("finish", device)),
        set_device=lambda device: calls.append(("use", device)),
        get_device_name=lambda device: f"a GPU with index {device.index}",
        get_device_properties=lambda device: SimpleNamespace(total_memory=80 * 2**30, major=9, minor=0),
        can_device_access_peer=lambda i, j: (i, j) != (0, 1),
    )
    found.use(device)
    found.finish(device)
    assert calls == [("use", device), ("finish", device)]
    assert (found.count(), found.name(device), found.details(device)) == (3, "a GPU with index 2", "80 GiB, sm_90")
    assert found.peers() == (5, 6)


def test_a_kind_of_device_may_tell_less(monkeypatch: pytest.MonkeyPatch) -> None:
    found, device = hardware(monkeypatch), torch.device("cuda", 1)
    found.use(device)
    assert (found.name(device), found.details(device), found.peers()) == ("cuda:1", "", None)


def test_the_cpu_is_a_device() -> None:
    found, cpu = hardware_of(torch.device("cpu")), torch.device("cpu")
    found.use(cpu)
    found.finish(cpu)
    assert (found.count(), found.peers()) == (1, None)
    assert found.name(cpu)
    assert "per rank" in found.details(cpu)


@pytest.mark.parametrize(
    ("gigabytes", "exponent"), [(None, 26), (1, 26), (24, 27), (80, 29), (85, 29), (192, 30), (10**4, 30)]
)
def test_the_memory_budget_follows_the_memory_of_a_gpu(gigabytes: int | None, exponent: int) -> None:
    assert memory_budget_for(None if gigabytes is None else gigabytes * 10**9) == 2**exponent
