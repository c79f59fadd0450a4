"""A step allocates nothing new after the first.

Measured with torch's profiler, which sees every block that torch's CPU allocator hands out, inside operators too: a
positive number is an allocation, a negative one a release, and a running sum gives the peak. A scalar is allowed: torch
wraps numbers such as a learning rate into tensors of 8 bytes. The profiler sees the thread that starts it: in the tests
with two ranks that is rank 1, as torch's threaded process group does the work of its collectives, with small tensors of
its own, on rank 0.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

from meshmuon import Muon
from tests.support.reference import LR, engine_muon, gradients, group, make_params, set_gradients
from tests.support.threads import run_threads

pytestmark = pytest.mark.usefixtures("frozen_heap")

SCALAR = 16  # bytes
SHAPES = ((40, 40), (24, 64), (64, 24), (24, 64), (3, 20, 16), (390, 400))
FORMS: list[dict[str, Any]] = [
    {},
    {"form": "gram"},
    {"form": "standard", "scheme": "keller"},
    {"nesterov": False, "none_grad": False},
    {"deterministic": True},
    {"chunk_size": 1},
    {"momentum": 0.5, "maximize": True, "lr": torch.tensor(0.005)},
]


class Memory(NamedTuple):
    largest: int
    peak: int
    kept: int


def measure(optimizer: Muon, params: list[nn.Parameter], step: int) -> Memory:
    """Bytes of the largest allocation of a step, of its peak and of what it keeps, beyond what was there before it."""
    set_gradients(params, gradients(params, step))
    return measure_step(optimizer)


def measure_step(optimizer: Muon) -> Memory:
    gc.collect()  # what earlier tests have left must not be released, and counted, during the step
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            optimizer.step()
    finally:
        gc.enable()
    assert recorded.profiler is not None
    blocks = [event.nbytes() for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, peak = 0, 0
    for block in blocks:
        held += block
        peak = max(peak, held)
    return Memory(max(blocks, default=0), peak, held)


def build(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[nn.Parameter], Muon]:
    params = make_params(*shapes, (50,), dtype=dtype)
    written = [group(params[:-1], prefix="experts"), group(params[-1:], use_muon=False, prefix="norms")]
    return params, engine_muon(written, **{"lr": LR, "expert_keys": ["experts"], "none_grad": False, **options})


def state_bytes(optimizer: Muon) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


Lacks = Callable[[int, int], bool]  # (step, parameter): whether it has no gradient then


def check_steady(
    params: list[nn.Parameter],
    optimizer: Muon,
    lacks: Lacks = lambda step, k: False,
    *,
    largest: int = SCALAR,
    peak: int = SCALAR,
) -> None:
    """Demands that steps after the first allocate no more, keep nothing, and leave the workspace as it is."""
    measure(optimizer, params, 0)
    held = optimizer.workspace_bytes()
    assert held > 0
    for step in range(1, 5):
        set_gradients(params, [None if lacks(step, k) else grad for k, grad in enumerate(gradients(params, step))])
        memory = measure_step(optimizer)
        assert memory.largest <= largest
        assert memory.peak <= max(peak, 4 * SCALAR)
        assert memory.kept <= SCALAR
        assert optimizer.workspace_bytes() == held


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_later_steps_allocate_nothing(options: dict[str, Any], dtype: torch.dtype) -> None:
    check_steady(*build(SHAPES, dtype, **options))


@pytest.mark.parametrize("shape", [(8, 8), (9, 9), (3, 4, 5)], ids=str)
def test_many_small_matrices_allocate_nothing(shape: tuple[int, ...]) -> None:
    """They are stacked in the workspace, whichever of them have gradients."""
    check_steady(*build((shape,) * 40), lacks=lambda step, k: step > 2 and k % 3 == step % 3)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"rule": "normuon"}, {"deterministic": True}], ids=str)
def test_changing_gradients_allocate_nothing(options: dict[str, Any]) -> None:
    """Every step another third of the parameters has no gradient."""
    params, optimizer = build(SHAPES, **options)
    measure(optimizer, params, 0)
    _, peak, _ = memory = measure(optimizer, params, 1)  # rules make temporaries
    check_steady(params, optimizer, lambda step, k: k % 3 == step % 3, largest=max(SCALAR, memory.largest), peak=peak)


@pytest.mark.parametrize("form", ["standard", "gram"])
def test_the_first_step_allocates_state_and_workspace_and_no_more(form: str) -> None:
    """The profiler proves itself here: what it sees is what the optimizer says it holds."""
    warm, first = build(((64, 96), (64, 96)), form=form)
    measure(first, warm, 0)  # simulations of the dtype's rounding, done once per process
    params, optimizer = build(((64, 96), (64, 96)), form=form)
    memory = measure(optimizer, params, 0)
    expected = optimizer.workspace_bytes() + state_bytes(optimizer)
    assert optimizer.workspace_bytes() > 2 * 64 * 96 * 4
    assert expected <= memory.kept <= expected + 4 * SCALAR
    assert expected <= memory.peak <= expected + 4 * SCALAR


def test_half_precision_parameters_keep_nothing() -> None:
    """torch casts mixed operands through temporaries on CPU: one matrix at a time, and none outlives the step."""
    matrix = 40 * 40 * 4
    params, optimizer = build(((40, 40), (24, 64), (24, 64)), torch.bfloat16, momentum_dtype=torch.float32)
    check_steady(params, optimizer, largest=matrix, peak=2 * matrix + 4 * SCALAR)


@pytest.mark.parametrize("options", [{}, {"cautious_weight_decay": True}, {"lr": torch.tensor(0.005)}], ids=str)
def test_bfloat16_weights_are_formed_in_kept_memory(options: dict[str, Any]) -> None:
    check_steady(*build(SHAPES, torch.bfloat16, nesterov=False, **options))


def test_random_bits_take_a_word_per_row_and_column() -> None:
    """Beside the kept memory of a chunk: a few vectors of 8 bytes per row and per column of one matrix at a time."""
    params = make_params(*SHAPES, dtype=torch.bfloat16)
    options: dict[str, Any] = {
        "expert_keys": ["experts"],
        "none_grad": False,
        "nesterov": False,
        "rounding": "stochastic",
    }
    optimizer = Muon([group(params, prefix="experts")], lr=LR, **options)
    check_steady(params, optimizer, largest=8 * 400, peak=6 * 8 * (390 + 400) * len(SHAPES))


@pytest.mark.parametrize("budget", [1, 50_000, 200_000])
def test_workspace_stays_within_its_budget(budget: int) -> None:
    params, optimizer = build(((24, 64),) * 12, memory_budget=budget)
    measure(optimizer, params, 0)
    one = (2 * 24 * 64 + 5 * 24 * 24) * 4
    numbers = 12 * 4  # a normaliser per matrix
    assert optimizer.workspace_bytes() <= max(budget, one) + numbers


def test_chunk_size_bounds_the_workspace() -> None:
    sizes = []
    for chunk_size in (1, 2, 4):
        params, optimizer = build(((24, 64),) * 4, chunk_size=chunk_size)
        measure(optimizer, params, 0)
        sizes.append(optimizer.workspace_bytes())
    assert sizes[1] == 2 * sizes[0]
    assert sizes[2] == 4 * sizes[0]


SHARDED: list[dict[str, Any]] = [
    {},
    {"chunk_size": 1},
    {"chunk_size": 1, "warmup_step": 0},
    {"nesterov": False, "none_grad": True},
    {"deterministic": True},
    {"form": "gram"},
    {"replicas": "share"},
]


def sharded_step_memory(rank: int, options: dict[str, Any], placements: tuple[Any, ...]) -> list[Memory]:
    """What four steps of one of two ranks allocate; rank 0 is not measured."""
    mesh = init_device_mesh("cpu", (2,) if len(placements) == 1 else (1, 2))
    shapes = ((40, 40), (24, 64), (64, 24), (33, 50), (24, 64), (4, 20, 16))

    def place(value: Tensor) -> DTensor:
        return distribute_tensor(value, mesh, list(placements), src_data_rank=None)

    whole = make_params(*shapes)
    params = [nn.Parameter(place(param.detach())) for param in whole]
    optimizer = engine_muon(
        [group(params, prefix="experts")], **{"lr": LR, "expert_keys": ["experts"], "none_grad": False, **options}
    )
    found = []
    for step in range(4):
        for param, grad in zip(params, gradients(whole, step), strict=True):
            param.grad = place(grad)
        if rank == 1:
            found.append(measure_step(optimizer))
        else:
            optimizer.step()
    assert optimizer.plan().buffer_bytes(rank) > 0
    assert optimizer.workspace_bytes() > optimizer.plan().buffer_bytes(rank)
    return found


@pytest.mark.parametrize(
    ("options", "placements"),
    [
        *((options, placements) for options in SHARDED for placements in ((Shard(0),), (Shard(1),))),
        ({"replicas": "share"}, (Replicate(),)),  # results need a buffer of their own
        ({}, (Replicate(), Shard(0))),
    ],
    ids=str,
)
def test_later_steps_on_two_ranks_allocate_nothing(options: dict[str, Any], placements: tuple[Any, ...]) -> None:
    """Exchange buffers, stages and the agreement's five words are all made by the first step."""
    gc.collect()
    gc.disable()  # what it frees of other tests would be counted here
    try:
        _, found = run_threads(2, lambda rank: sharded_step_memory(rank, options, placements))
    finally:
        gc.enable()
    first, _, *later = found
    assert first.kept > 10_000  # the profiler sees this thread
    for memory in later:
        assert memory.largest <= SCALAR
        assert memory.kept <= SCALAR
