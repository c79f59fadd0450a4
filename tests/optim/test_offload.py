"""Offloading changes where the state is between steps, and nothing else: same bits, storage that really moves, bulk
copies.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshmuon import Muon, OrthogonalizeError
from meshmuon.device import CudaTransfers, Transfers, pinned_bytes
from meshmuon.optim import offload
from meshmuon.optim.offload import Offload
from meshmuon.state import param_state
from tests.support.happens_before import fake_cuda
from tests.support.happens_before.recorder import Recorder
from tests.support.reference import Run, gapped, group, make_params, set_gradients
from tests.support.tensors import assert_bits, through_disk

STEPS = 7
STATE_KEYS = {"momentum_buffer", "exp_avg", "exp_avg_sq", "rule_memory"}


@dataclass
class Log:
    """What all transfers did since the last look."""

    buffers: int = 0
    stored: list[tuple[Tensor, int]] = field(default_factory=list)
    loaded: list[tuple[weakref.ref[Tensor], StorageWeakRef]] = field(default_factory=list)

    def clear(self) -> None:
        self.buffers, self.stored, self.loaded = 0, [], []


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Transfers of the CPU twin that are written down."""
    kept = Log()

    class Recorded(Transfers):
        def host_buffer(self, size: int, dtype: torch.dtype) -> Tensor:
            kept.buffers += 1
            return super().host_buffer(size, dtype)

        def store(self, host: Tensor, device: Tensor) -> None:
            kept.stored.append((host, device.untyped_storage().data_ptr()))
            super().store(host, device)

        def load(self, device: Tensor, host: Tensor, **waits: bool) -> None:
            kept.loaded.append((weakref.ref(device), StorageWeakRef(device.untyped_storage())))
            super().load(device, host, **waits)

    monkeypatch.setattr(offload, "transfers_for", lambda device: Recorded())
    return kept


def moved(optimizer: Muon) -> list[Tensor]:
    return [value for entry in optimizer.state.values() for key, value in entry.items() if key in STATE_KEYS]


def lies_in(value: Tensor, hosts: Sequence[Tensor]) -> bool:
    return any(host.data_ptr() <= value.data_ptr() < host.data_ptr() + host.nbytes for host in hosts)


def turned(param: Tensor) -> nn.Parameter:
    return nn.Parameter(param.detach().mT.contiguous().mT)


def plain() -> list[dict[str, Any]]:
    return [group(make_params((6, 4), (4, 9), (6, 4))), group(make_params((5,), (7, 3), seed=1), use_muon=False)]


def halves() -> list[dict[str, Any]]:
    half = {"dtype": torch.bfloat16}
    return [
        group(make_params((6, 4), (9, 5), **half), momentum_dtype=torch.float32),
        group(make_params((5, 5), **half), prefix="more"),
        group(make_params((7,), (3, 3), **half), use_muon=False),
        group(make_params((4, 6), dtype=torch.float64), prefix="doubles"),
    ]


def strided() -> list[dict[str, Any]]:
    filters = [
        nn.Parameter(p.detach().contiguous(memory_format=torch.channels_last)) for p in make_params((8, 4, 3, 3))
    ]
    others = make_params((5, 7), (6, 4))
    assert not filters[0].is_contiguous()
    return [
        group(filters, conv="flatten"),
        group([turned(others[0]), gapped(others[1])], prefix="matrices"),
        group([turned(others[0]), gapped(others[1]), filters[0].detach().clone().requires_grad_()], use_muon=False),
    ]


def experts() -> list[dict[str, Any]]:
    return [
        group(make_params((3, 4, 5)), prefix="experts", expert_keys=["experts"]),
        group(make_params((4, 4)), use_muon=False),
    ]


def ruled() -> list[dict[str, Any]]:
    """A rule's numbers per output are state too, of another shape and here of another dtype than the parameter."""
    return [
        group(make_params((6, 4), (5, 9)), rule="normuon", cautious_weight_decay=True),
        group(make_params((4, 6), dtype=torch.bfloat16), rule="normuon", prefix="more"),
    ]


Model = Callable[[], list[dict[str, Any]]]
MODELS: dict[str, Model] = {"plain": plain, "halves": halves, "strided": strided, "experts": experts, "ruled": ruled}


@pytest.fixture
def away() -> Run:
    """Three steps, offloaded."""
    run = Run(plain())
    run.optimizer.turn_on_cpu_offload()
    for step in range(3):
        run.step(step)
    return run


def never(steps: int, model: Model = plain, **options: Any) -> Run:
    run = Run(model(), **options)
    for step in range(steps):
        run.step(step)
    return run


@pytest.mark.parametrize("toggled", [(0,), (3,), (1, 3, 4), (1, 3, 5, 5)], ids=str)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        *((model, {}) for model in MODELS),
        ("plain", {"use_distributed_muon": True}),
        ("halves", {"rounding": "stochastic"}),
    ],
    ids=str,
)
def test_the_same_bits_on_and_off(model: str, options: dict[str, Any], toggled: tuple[int, ...]) -> None:
    run, on = Run(MODELS[model](), **options), False
    for step in range(STEPS):
        for _ in range(toggled.count(step)):
            on = not on
            (run.optimizer.turn_on_cpu_offload if on else run.optimizer.turn_off_cpu_offload)()
        run.step(step)
    expected = never(STEPS, MODELS[model], **options)
    assert_bits(run.everything(), expected.everything())
    for param, other in zip(run.params, expected.params, strict=True):
        for key, value in run.optimizer.state[param].items():
            assert value.stride() == expected.optimizer.state[other][key].stride(), key


def test_the_state_leaves_its_device_after_every_step(log: Log) -> None:
    """What was there or was loaded is gone: tensors and storages; what stands in the state is the host's."""
    run = Run(halves())
    run.step(0)
    old = [StorageWeakRef(value.untyped_storage()) for value in moved(run.optimizer)]
    run.optimizer.turn_on_cpu_offload()
    assert old
    assert all(storage.expired() for storage in old)
    for step in range(1, 4):
        log.clear()
        run.step(step)
        gc.collect()
        assert log.loaded
        assert all(tensor() is None and storage.expired() for tensor, storage in log.loaded)
        assert all(lies_in(value, [host for host, _ in log.stored]) for value in moved(run.optimizer))


def test_few_copies_each_way_and_no_new_buffers(log: Log) -> None:
    """One for each dtype, and another one for AdamW's state, which a step needs later."""
    run = Run(halves())
    run.optimizer.turn_on_cpu_offload()
    run.step(0)
    entries = [item for entry in run.optimizer.state.values() for item in entry.items()]
    kinds = {(value.dtype, key.startswith("exp")) for key, value in entries if key in STATE_KEYS}
    assert kinds == {(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float64, False)}
    assert log.buffers == len(kinds)
    hosts = None
    for step in range(1, 5):
        log.clear()
        run.step(step)
        assert (log.buffers, len(log.stored), len(log.loaded)) == (0, len(kinds), len(kinds))
        now = [host.data_ptr() for host, _ in log.stored]
        assert hosts is None or hosts == now
        hosts = now


def test_the_state_of_adamw_arrives_while_a_step_works_on_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Ordered(Transfers):
        def load(self, device: Tensor, host: Tensor, *, waits: bool = True) -> None:
            order.append("load" if waits else "load for later")
            super().load(device, host, waits=waits)

        def wait(self, loaded: Any) -> None:
            order.append("wait")

    def scheme(batch: Tensor) -> Tensor:
        order.append("matrices")
        return batch

    monkeypatch.setattr(offload, "transfers_for", lambda device: Ordered())
    run = Run(plain())
    run.optimizer.param_groups[0]["scheme"] = scheme
    run.optimizer.turn_on_cpu_offload()
    for step in range(3):
        order.clear()
        run.step(step)
    assert list(dict.fromkeys(order)) == ["load", "load for later", "matrices", "wait"]


def test_state_dict_moves_nothing_in_the_steady_state(away: Run, log: Log) -> None:
    away.optimizer.state_dict()
    assert log.buffers == len(log.stored) == len(log.loaded) == 0


def test_a_state_dict_is_the_never_offloaded_one(away: Run) -> None:
    """Bit for bit, also of a parameter that never had a gradient, and after loading it elsewhere."""
    away.optimizer.add_param_group(group(make_params((3, 5)), prefix="unused"))
    expected = never(3)
    expected.optimizer.add_param_group(group(make_params((3, 5)), prefix="unused"))
    saved, wanted = away.optimizer.state_dict(), expected.optimizer.state_dict()
    assert saved["param_groups"] == wanted["param_groups"]
    assert saved["state"].keys() == wanted["state"].keys()
    for key, entry in saved["state"].items():
        assert_bits(list(entry.values()), list(wanted["state"][key].values()))
    other = Run(plain())
    other.optimizer.add_param_group(group(make_params((3, 5)), prefix="unused"))
    for param, value in zip(other.params, expected.params, strict=True):
        param.data.copy_(value)
    other.optimizer.load_state_dict(through_disk(saved))
    for step in (3, 4):
        other.step(step)
        expected.step(step)
    assert_bits(other.everything(), expected.everything())


def test_loading_while_offloaded(away: Run, log: Log) -> None:
    """What is loaded is put away too, and replaces what was there."""
    earlier = never(2)
    away.optimizer.load_state_dict(copy.deepcopy(earlier.optimizer.state_dict()))
    assert log.buffers == 2
    assert all(lies_in(value, [host for host, _ in log.stored]) for value in moved(away.optimizer))
    for param, value in zip(away.params, earlier.params, strict=True):
        param.data.copy_(value)
    for step in (2, 3, 4):
        away.step(step)
    assert_bits(away.everything(), never(5).everything())


def test_each_tensor_has_a_storage_of_its_own(away: Run) -> None:
    """Saving one saves no others with it, while it is away, aligned, and after it came back."""
    values = moved(away.optimizer)
    assert all((value.storage_offset(), value.untyped_storage().nbytes()) == (0, value.nbytes) for value in values)
    assert all((value.data_ptr() - values[0].data_ptr()) % 64 == 0 for value in values)
    away.optimizer.turn_off_cpu_offload()
    values = moved(away.optimizer)
    assert all((value.storage_offset(), value.untyped_storage().nbytes()) == (0, value.nbytes) for value in values)
    assert len({value.untyped_storage().data_ptr() for value in values}) == len(values)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_an_offloaded_optimizer(how: str, away: Run, log: Log) -> None:
    """A copy has the state, offloads as well, and shares no storage with the original."""
    other = copy.deepcopy(away) if how == "deepcopy" else pickle.loads(pickle.dumps(away))
    other.step(3)
    assert log.buffers == 2, "the copy does not offload"
    assert_bits(away.everything(), never(3).everything())
    away.step(3)
    other.step(4)
    away.step(4)
    assert_bits(away.everything(), never(5).everything())
    assert_bits(other.everything(), never(5).everything())
    other.optimizer.turn_off_cpu_offload()
    other.step(5)
    assert_bits(other.everything(), never(6).everything())


def test_a_step_that_fails_in_the_middle_still_puts_the_state_away(log: Log) -> None:
    """Its state is what the same failure leaves without offload."""

    def failing(batch: Tensor) -> Tensor:
        raise ValueError("scheme")

    def train(offloaded: bool) -> Run:
        run = Run(plain())
        if offloaded:
            run.optimizer.turn_on_cpu_offload()
        for step in range(4):
            scheme = run.optimizer.param_groups[0]["scheme"]
            if step == 2:
                run.optimizer.param_groups[0]["scheme"] = failing
                with pytest.raises(OrthogonalizeError, match="ValueError: scheme"):
                    run.step(step)
                run.optimizer.param_groups[0]["scheme"] = scheme
            else:
                run.step(step)
        return run

    offloaded = train(True)
    gc.collect()
    assert log.loaded
    assert all(storage.expired() for _, storage in log.loaded)
    assert_bits(offloaded.everything(), train(False).everything())


def test_pinned_memory_is_little_more_than_the_state() -> None:
    """torch rounds pinned buffers up to powers of two. Counted on a stand-in for a GPU, with the proportions of a
    Llama layer.
    """
    width, wide = 192, 608
    shapes = [(width, width)] * 4 + [(wide, width)] * 2 + [(width, wide)]
    with fake_cuda.installed(), Recorder().recording() as recorder:
        states: dict[Tensor, dict[str, Any]] = {}
        for shape in shapes * 10:
            states[recorder.on_device(torch.zeros(shape))] = {"momentum_buffer": recorder.on_device(torch.zeros(shape))}
        needed = sum(state["momentum_buffer"].nbytes for state in states.values())
        Offload().turn_on(states)
        buffers = [memory.untyped_storage().nbytes() for _, memory in recorder.blocks.pinned]
    assert sum(buffers) == needed
    assert pinned_bytes(needed) > 1.3 * needed, "in one buffer"
    assert sum(map(pinned_bytes, buffers)) <= 1.05 * needed
    assert len(buffers) <= 6


def test_portions_pin_the_least() -> None:
    """Against all ways to divide a few tensors."""
    transfers, per_copy = CudaTransfers.__new__(CudaTransfers), 1 << 18
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 9):
        sizes = [int(size) << 12 for size in torch.randint(0, 700, (count,), generator=generator)]

        def cost(counts: Sequence[int], sizes: Sequence[int] = tuple(sizes)) -> int:
            stops = list(accumulate(counts))
            return sum(
                pinned_bytes(sum(sizes[stop - n : stop])) + per_copy for n, stop in zip(counts, stops, strict=True)
            )

        ways = [
            [stop - start for start, stop in pairwise([0, *cuts, count])]
            for k in range(count)
            for cuts in combinations(range(1, count), k)
        ]
        counts = transfers.portions(sizes)
        assert sum(counts) == count
        assert cost(counts) == min(map(cost, ways))


@pytest.mark.parametrize("what", ["load", "store", "host_buffer"])
def test_copies_that_fail_lose_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may run out on the way to the device or back: the error is raised, and the next step goes on."""
    run = Run(halves())
    run.optimizer.turn_on_cpu_offload()
    last = len(run.params) - 1
    run.step(0, without=(last,))
    run.step(1, without=(last,))

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError(what)

    with monkeypatch.context() as patch:
        patch.setattr(Transfers, what, fail)
        with pytest.raises(MemoryError, match=what):
            run.step(2)  # makes a state, and so a new buffer
    if what == "load":  # nothing was stepped
        run.step(2)
    run.step(3)
    expected = Run(halves())
    for step in range(4):
        expected.step(step, without=(last,) if step < 2 else ())
    assert_bits(run.everything(), expected.everything())


def test_inside_inference_mode() -> None:
    """What is made there can be written outside."""
    run = Run(plain())
    run.step(0)
    with torch.inference_mode():
        run.optimizer.turn_on_cpu_offload()
    run.step(1)
    with torch.inference_mode():
        run.optimizer.turn_off_cpu_offload()
    run.step(2)
    assert_bits(run.everything(), never(3).everything())


def test_state_replaced_or_removed_by_others(away: Run) -> None:
    """A user's own tensor, here one with gaps, wins over what the pool has; removed state starts from zero."""
    expected = never(3)
    for run in (away, expected):
        run.optimizer.state[run.params[0]]["momentum_buffer"] = torch.arange(480.0).view(6, 80)[:, ::20]
        del run.optimizer.state[run.params[1]]
        run.step(3)
        run.step(4)
    assert_bits(away.everything(), expected.everything())


def test_between_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands in for a GPU: it computes nothing, but it is not host memory, and no operation may mix
    both.
    """

    class Between(Transfers):
        def store(self, host: Tensor, device: Tensor) -> None:
            assert (host.device.type, device.device.type, host.shape) == ("cpu", "meta", device.shape)

        def load(self, device: Tensor, host: Tensor, **waits: bool) -> None:
            assert (host.device.type, device.device.type, host.shape) == ("cpu", "meta", device.shape)

    monkeypatch.setattr(offload, "transfers_for", lambda device: Between())
    monkeypatch.setattr(param_state, "_FUSED_DEVICES", ("cpu", "meta"))
    shapes = ((6, 4), (4, 9), (3, 5), (5,))
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    optimizer = Muon([group(params[:3]), group(params[3:], use_muon=False)])

    def where(one: Muon) -> set[str]:
        return {value.device.type for value in moved(one)}

    def step(one: Muon, active: int) -> None:
        own = [param for some in one.param_groups for param in some["params"]]
        set_gradients(own, [torch.empty_like(param) if k != active else None for k, param in enumerate(own)])
        one.step()

    step(optimizer, 2)
    assert where(optimizer) == {"meta"}
    optimizer.turn_on_cpu_offload()
    assert where(optimizer) == {"cpu"}
    step(optimizer, 2)
    saved = optimizer.state_dict()  # creates the state of parameter 2 on its device, and puts it beside what is away
    assert {
        value.device.type for entry in saved["state"].values() for key, value in entry.items() if key in STATE_KEYS
    } == {"cpu"}
    step(optimizer, 0)
    assert where(optimizer) == {"cpu"}
    other = copy.deepcopy(optimizer)
    step(other, 1)
    assert where(other) == {"cpu"}
    other.turn_off_cpu_offload()
    assert where(other) == {"meta"}
    other.load_state_dict(saved)
    assert where(other) == {"meta"}
    optimizer.load_state_dict(other.state_dict())
    assert where(optimizer) == {"cpu"}
    fresh = copy.deepcopy(optimizer)
    fresh.turn_off_cpu_offload()
    assert where(fresh) == {"meta"}


def test_host_buffers_are_not_let_go_while_they_are_written(away: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """More state needs other buffers; copies into the old ones may still be under way on a GPU."""
    offload = away.optimizer._offload
    old, settled = offload._pools, []
    monkeypatch.setattr(offload, "settle", lambda: settled.append(offload._pools is old))
    away.optimizer.add_param_group(group(make_params((5, 6), seed=9), prefix="late"))
    set_gradients(away.optimizer.param_groups[-1]["params"], [torch.ones(5, 6)])
    away.step(3)
    assert offload._pools is not old
    assert settled[:1] == [True]
