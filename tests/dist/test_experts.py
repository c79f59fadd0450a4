"""Experts: an (E, out, in) parameter is E matrices, and on every layout equals a loop over 2-D parameters, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import Muon
from meshmuon.plan import NO_WAVE, Plan
from meshmuon.torch_compat import strided_shards_nest
from tests.support.cases import Case, Param, gradient, initial, place, run
from tests.support.counting import Wire, counted
from tests.support.tensors import local, same
from tests.support.threads import run_threads

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
STEPS = 3
MATTERS_ON_ONE_DEVICE = ("adjust_lr_fn", "nesterov", "scheme")

Gradients = Callable[[int, int], Tensor]
Expected = tuple[list[Tensor], list[Tensor]]
Shards = list[list[Tensor]]  # rank → parameter → the flat indices of what torch puts there


def random_gradients(case: Case) -> Gradients:
    def grads(step: int, k: int) -> Tensor:
        found = gradient(case, step, k)
        assert found is not None
        return found

    return grads


def looped(case: Case, grads: Gradients | None = None) -> Expected:
    """One device, one optimizer per expert, each with one matrix: no stack of several, no batch, no plan over several.

    Experts that are stored as (in, out) stay so, as stacks of one: products of a transposed matrix are rounded differently.
    """
    grads = grads or random_gradients(case)
    options = {name: value for name, value in case.options.items() if name in MATTERS_ON_ONE_DEVICE}
    values, momentum = [], []
    for k, whole in enumerate(initial(case)):
        stacked = case.options.get("expert_dims") == "in_out" and whole.dim() == 3
        found = [
            _alone(start, [_experts(grads(step, k), stacked)[expert] for step in range(case.steps)], options)
            for expert, start in enumerate(_experts(whole, stacked))
        ]
        for side, kept in enumerate((values, momentum)):
            kept.append(torch.cat([one[side].reshape(-1) for one in found]).reshape(whole.shape))
    return values, momentum


def _experts(whole: Tensor, stacked: bool) -> list[Tensor]:
    stack = whole.unsqueeze(0) if whole.dim() == 2 else whole
    return [stack[k : k + 1].clone() if stacked else stack[k].clone() for k in range(len(stack))]


def _alone(start: Tensor, grads: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    param = nn.Parameter(start)
    stacked = {"expert_keys": ["experts"], "expert_dims": "in_out"} if start.dim() == 3 else {}
    name = "experts.weight" if stacked else "linear.weight"
    optimizer = Muon([{"params": [param], "names": [name], "use_muon": True}], lr=0.01, **{**options, **stacked})
    for grad in grads:
        param.grad = grad
        optimizer.step()
    return param.detach(), optimizer.state[param]["momentum_buffer"]


def on_a_mesh(
    case: Case,
    grid: tuple[int, ...],
    expected: Expected,
    *,
    grads: Gradients | None = None,
    without_gradient: Mapping[tuple[int, int], set[int]] | None = None,
) -> tuple[Wire, Plan, Shards]:
    """Every rank ends with torch's cut of ``expected``; at (step, parameter) ranks in ``without_gradient`` have no gradient."""
    grads = grads or random_gradients(case)

    def main(rank: int) -> tuple[Plan, list[Tensor]]:
        meshes = [init_device_mesh("cpu", grid)]
        params = [nn.Parameter(place(case, meshes, k, value)) for k, value in enumerate(initial(case))]

        def mine(step: int, k: int) -> Tensor | None:
            return None if rank in (without_gradient or {}).get((step, k), ()) else place(case, meshes, k, grads(step, k))

        values, momentum, optimizer = run(case, params, mine, watch=wire.watch)
        for k, param in enumerate(params):
            same(values[k], local(place(case, meshes, k, expected[0][k])), f"rank {rank}, parameter {k}")
            same(momentum[k], local(place(case, meshes, k, expected[1][k])), f"rank {rank}, momentum {k}")
            check_state(optimizer, param)
        assert set(optimizer.state) == set(params)
        return optimizer.plan(), torch_shards(case, meshes)

    with counted() as wire:
        found = run_threads(math.prod(grid), main)
    assert len({plan.digest for plan, _ in found}) == 1
    for rank in range(math.prod(grid)):
        wire.check(rank)
    return wire, found[0][0], [shards for _, shards in found]


def check_state(optimizer: Muon, param: nn.Parameter) -> None:
    """One buffer for all experts of a parameter, laid out like it."""
    (buffer,) = optimizer.state[param].values()
    assert isinstance(buffer, DTensor)
    assert isinstance(param.data, DTensor)
    assert buffer.shape == param.shape
    assert buffer.device_mesh == param.device_mesh
    assert buffer.placements == param.placements
    assert buffer.to_local().shape == param.to_local().shape


def torch_shards(case: Case, meshes: Sequence[DeviceMesh]) -> list[Tensor]:
    """Parameter → the flat indices of the elements that torch puts on this rank."""
    indices = [torch.arange(math.prod(one.shape)).reshape(one.shape) for one in case.params]
    return [local(place(case, meshes, k, value)).flatten() for k, value in enumerate(indices)]


def elements_that_must_move(case: Case, plan: Plan, held: Shards) -> int:
    """From torch's own shards and the owners alone: what the owner lacks comes in, what others hold goes out."""
    total = 0
    for index, task in enumerate(plan.tasks):
        size = math.prod(case.params[task.param].shape[-2:])
        count = {rank: int((mine[task.param] // size == task.matrix).sum()) for rank, mine in enumerate(held)}
        holders = {rank for rank in task.sharded.holdings if count[rank]}
        assert holders == set(task.sharded.holdings), "a rank that holds nothing of an expert takes part in it"
        sends = [*plan.gather_sends(index), *plan.scatter_sends(index)]
        if task.wave == NO_WAVE:
            assert not sends
            assert all(count[rank] == size for rank in holders)
            continue
        for send in sends:
            assert {send.source, send.target} <= holders, "a piece travels to a rank that does not share the expert"
            assert task.owner in (send.source, send.target)
            assert send.piece.size == count[send.source if send.target == task.owner else send.target]
        total += size - count[task.owner] + sum(count[rank] for rank in holders - {task.owner})
    return total


def experts(shape: tuple[int, ...], *placements: Any) -> Param:
    return Param(shape, 0, placements)


def strided(factor: int) -> _StridedShard:
    return _StridedShard(0, split_factor=factor)


def layout(name: str, grid: tuple[int, ...], *params: Param, **options: Any) -> Any:
    return pytest.param(Case(params, options, STEPS), grid, id=name)


HSDP = (experts((6, 5, 7), R, S0), experts((3, 8, 4), R, S0))
COPIES = (experts((4, 5, 7), R), experts((3, 6, 6), R))
LAYOUTS = [
    layout("EP", (4,), experts((8, 6, 5), S0), experts((4, 5, 9), S0)),
    layout("EP that does not divide", (4,), experts((6, 6, 5), S0), experts((7, 5, 9), S0)),
    layout("FSDP2, even", (3,), experts((6, 6, 5), S0), experts((3, 7, 7), S0)),
    layout("FSDP2, uneven", (3,), experts((7, 6, 5), S0), experts((4, 5, 8), S0), experts((5, 3, 9), S0)),
    layout("FSDP2, fewer experts than ranks", (8,), experts((3, 6, 5), S0), experts((1, 4, 9), S0), experts((5, 4, 4), S0)),
    layout("EP x FSDP", (2, 2), experts((8, 6, 5), strided(2), S0), experts((4, 5, 9), strided(2), S0)),
    layout("EP x FSDP, uneven", (3, 2), experts((8, 6, 5), strided(2), S0), experts((10, 5, 9), strided(2), S0)),
    layout("EP x FSDP, fewer experts than ranks", (4, 2), experts((4, 10, 6), S1, S0), experts((2, 6, 9), S1, S0)),
    layout("EP x FSDP, EP does not divide", (2, 3), experts((4, 10, 6), S1, S0), experts((5, 7, 9), S1, S0)),
    layout("EP x TP by rows", (2, 3), experts((4, 6, 5), S0, S1), experts((5, 7, 8), S0, S1)),
    layout("EP x TP by columns", (2, 3), experts((4, 6, 6), S0, S2), experts((3, 5, 8), S0, S2)),
    layout("EP x TP x FSDP", (2, 2, 2), experts((4, 6, 5), S1, S0, S2), experts((8, 6, 6), strided(2), S0, S1)),
    layout("HSDP, shared", (2, 2), *HSDP, replicas="share"),
    layout("HSDP, repeated", (2, 2), *HSDP, replicas="repeat"),
    layout("HSDP with EP, shared", (2, 2, 2), experts((3, 6, 5), R, S1, S0), replicas="share"),
    layout("HSDP with EP, repeated", (2, 2, 2), experts((3, 6, 5), R, S1, S0), replicas="repeat"),
    layout("replicated, shared", (3,), *COPIES, replicas="share"),
    layout("replicated, repeated", (3,), *COPIES, replicas="repeat"),
    layout("replicated beside EP", (2, 2), experts((4, 5, 6), S0, R), experts((4, 5, 6), R, R), experts((4, 5, 6), S1, S0)),
    layout("one at a time", (2, 2), experts((5, 6, 5), S1, S0), experts((4, 6, 5), S1, S0), chunk_size=1, warmup_step=0),
    layout("little memory", (2, 2), experts((5, 6, 5), S1, S0), experts((9, 6, 5), strided(2), S0), memory_budget=1),
]


@pytest.mark.parametrize(("case", "grid"), LAYOUTS)
def test_a_layout_equals_a_loop_over_experts(case: Case, grid: tuple[int, ...]) -> None:
    wire, plan, held = on_a_mesh(case, grid, looped(case))
    moved = elements_that_must_move(case, plan, held)
    assert sum(wire.elements.values()) == case.steps * moved
    assert sum(wire.nbytes.values()) == 4 * case.steps * moved


@pytest.mark.parametrize("adjust", ["spectral", "original"])
@pytest.mark.parametrize(
    ("grid", "placements"),
    [((3,), (S0,)), ((2, 2), (S0, S2)), ((2, 2), (S1, S0)), ((2, 2), (strided(2), S0)), ((2,), (R,))],
    ids=["EP", "EP x TP", "EP x FSDP, few", "EP x FSDP", "replicated"],
)
def test_experts_as_in_out_step_as_out_in(grid: tuple[int, ...], placements: tuple[Any, ...], adjust: str) -> None:
    """Stored as (E, in, out); the loop has (out, in) parameters, so that the factor of the learning rate must be theirs."""
    params = (experts((4, 4, 9), *placements), experts((5, 8, 3), *placements))
    case = Case(params, {"expert_dims": "in_out", "adjust_lr_fn": adjust}, STEPS)
    on_a_mesh(case, grid, looped(case))


def test_the_learning_rate_of_experts_as_in_out_is_asked_for_out_and_in() -> None:
    asked: set[tuple[int, int]] = set()

    def adjust(rows: int, cols: int) -> float:
        asked.add((rows, cols))
        return 1.0 + rows / cols

    case = Case((experts((4, 5, 9), S1, S0),), {"expert_dims": "in_out", "adjust_lr_fn": adjust}, STEPS)
    expected = looped(case)
    asked.clear()
    on_a_mesh(case, (2, 2), expected)
    assert asked == {(9, 5)}


@pytest.mark.parametrize(("count", "efsdp", "ep"), [(8, 2, 2), (6, 2, 2), (8, 3, 2), (9, 2, 3), (5, 2, 1)])
def test_shards_that_fsdp_would_cut_inside_the_parts_of_ep(count: int, efsdp: int, ep: int) -> None:
    """torchtitan cuts by EP first and FSDP2 cuts what EP left; here by hand, so that nothing of distribute_tensor is trusted."""
    case = Case((experts((count, 6, 5), strided(ep), S0),), {}, STEPS)
    if not strided_shards_nest() and count % (efsdp * ep):
        pytest.skip("torch 2.9 cuts these in two ways")
    expected = looped(case)

    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (efsdp, ep), mesh_dim_names=("efsdp", "ep"))
        outer, inner = rank % ep, rank // ep

        def cut(whole: Tensor) -> Tensor:
            chunks = whole.chunk(ep)[outer].chunk(efsdp)
            return chunks[inner].clone() if inner < len(chunks) else whole[:0].clone()

        def as_dtensor(whole: Tensor) -> DTensor:
            layout = {"shape": whole.shape, "stride": whole.stride()}
            return DTensor.from_local(cut(whole), mesh, case.params[0].placements, run_check=False, **layout)

        params = [nn.Parameter(as_dtensor(initial(case)[0]))]
        values, momentum, optimizer = run(case, params, lambda step, k: as_dtensor(random_gradients(case)(step, k)))
        same(values[0], cut(expected[0][0]), f"rank {rank}, parameter")
        same(momentum[0], cut(expected[1][0]), f"rank {rank}, momentum")
        check_state(optimizer, params[0])

    with counted() as wire:
        run_threads(efsdp * ep, main)
    assert not wire.calls


# What travels.


@pytest.mark.parametrize(
    ("grid", "params"),
    [
        pytest.param((4,), [experts((7, 5, 4), S0)], id="7 on 4"),
        pytest.param((4,), [experts((6, 5, 4), S0)], id="6 on 4"),
        pytest.param((8,), [experts((3, 5, 4), S0)], id="3 on 8"),
        pytest.param((3,), [experts((8, 5, 4), S0), experts((7, 4, 6), S0), experts((1, 4, 6), S0)], id="EP 3 of 8, 7 and 1"),
        pytest.param((2, 2), [experts((8, 5, 4), strided(2), S0)], id="EP x FSDP"),
        pytest.param((3, 2), [experts((10, 5, 4), strided(2), S0)], id="EP x FSDP, uneven"),
        pytest.param((2, 3), [experts((7, 5, 4), S0, S0)], id="twice by experts"),
    ],
)
def test_nothing_travels_where_ranks_hold_whole_experts(grid: tuple[int, ...], params: list[Param]) -> None:
    case = Case(tuple(params), {}, STEPS)
    wire, plan, _ = on_a_mesh(case, grid, looped(case))
    assert not wire.calls
    assert not wire.nbytes
    assert all(task.wave == NO_WAVE for task in plan.tasks)


def test_whole_experts_stay_while_other_parameters_travel() -> None:
    case = Case((experts((7, 5, 4), S0), experts((8, 6), S0), experts((6, 9, 4), S0)), {}, STEPS)
    wire, plan, _ = on_a_mesh(case, (4,), looped(case))
    assert {task.param for task in plan.tasks if task.wave != NO_WAVE} == {1}
    assert sum(wire.elements.values()) == STEPS * 2 * (3 * 8 * 6 // 4)


@pytest.mark.parametrize(
    ("grid", "shape", "placements"),
    [
        ((4, 2), (4, 8, 6), (S1, S0)),
        ((4, 2), (4, 10, 6), (S1, S0)),
        ((3, 3), (5, 7, 4), (S1, S0)),
        ((2, 4), (3, 7, 6), (S0, S1)),
        ((2, 4), (3, 5, 9), (S0, S2)),
        ((2, 2, 3), (3, 5, 7), (S1, S0, S2)),
        ((8, 1), (2, 3, 6), (S1, S0)),
    ],
    ids=str,
)
def test_experts_travel_between_the_ranks_that_share_them_alone(
    grid: tuple[int, ...], shape: tuple[int, ...], placements: tuple[Any, ...]
) -> None:
    """Each matrix: all but its owner's piece in, and the same out. Nothing is padded."""
    case = Case((experts(shape, *placements),), {}, STEPS)
    wire, plan, held = on_a_mesh(case, grid, looped(case))
    size = math.prod(shape[1:])
    moved = sum(2 * (size - int((held[task.owner][0] // size == task.matrix).sum())) for task in plan.tasks)
    assert len(plan.tasks) == shape[0]
    assert moved > 0
    assert sum(wire.elements.values()) == STEPS * moved == STEPS * elements_that_must_move(case, plan, held)
    assert sum(wire.nbytes.values()) == STEPS * 4 * moved


# Batches. An 8 x 4 matrix needs 4 bytes times 32 (itself), 32 (scratch like it) and 5 * 16 (squares): 576 bytes. All of these are
# multiples of 64, so that a callable scheme gets whole batches.

MATRIX_BYTES = 576


def batches_of(case: Case, grid: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """Rank → the shapes of the batches of one step, in order."""
    seen: list[list[tuple[int, ...]]] = [[] for _ in range(math.prod(grid))]

    def scheme(batch: Tensor) -> Tensor:
        seen[dist.get_rank()].append(tuple(batch.shape))
        return batch / 2

    case = Case(case.params, {**case.options, "scheme": scheme}, 1)

    def main(rank: int) -> None:
        meshes = [init_device_mesh("cpu", grid)]
        params = [nn.Parameter(place(case, meshes, k, value)) for k, value in enumerate(initial(case))]
        run(case, params, lambda step, k: place(case, meshes, k, random_gradients(case)(step, k)))

    run_threads(math.prod(grid), main)
    return seen


def test_local_experts_of_one_shape_are_one_batch() -> None:
    case = Case((experts((7, 8, 4), S0), experts((4, 8, 4), S0), experts((4, 4, 8), S0)))
    assert [sorted(one) for one in batches_of(case, (4,))] == [[(1, 4, 8), (3, 8, 4)]] * 3 + [[(1, 4, 8), (2, 8, 4)]]


@pytest.mark.parametrize(
    ("budget", "lengths"),
    [
        (1, [1] * 6),
        (2 * MATRIX_BYTES, [2] * 3),
        (4 * MATRIX_BYTES, [3, 3]),
        (6 * MATRIX_BYTES - 1, [3, 3]),
        (6 * MATRIX_BYTES, [6]),
    ],
)
def test_local_batches_keep_to_the_memory_budget(budget: int, lengths: list[int]) -> None:
    case = Case((experts((8, 8, 4), S0), experts((4, 8, 4), S0)), {"memory_budget": budget})
    assert [[shape[0] for shape in one] for one in batches_of(case, (2,))] == [lengths] * 2


@pytest.mark.parametrize("budget", [1, 2 * MATRIX_BYTES, 2**20])
def test_batches_of_experts_that_travel_keep_to_the_memory_budget(budget: int) -> None:
    """4 ranks own 12 experts, 3 each; a small budget also cuts them into waves."""
    found = batches_of(Case((experts((12, 8, 4), S1, S0),), {"memory_budget": budget}), (2, 2))
    for one in found:
        assert sum(shape[0] for shape in one) == 3
        assert all(shape[0] * MATRIX_BYTES <= max(budget, MATRIX_BYTES) for shape in one)
    assert [len(one) for one in found] == [1 if budget > 1000000 else 3 if budget == 1 else 2] * 4


# Gradients that are zero or missing.


@pytest.mark.parametrize(
    ("grid", "placements"),
    [((3,), (S0,)), ((2, 2), (strided(2), S0)), ((2, 2), (S1, S0)), ((2, 2), (S0, S2)), ((2, 2), (R, S0)), ((2,), (R,))],
    ids=str,
)
def test_experts_without_tokens(grid: tuple[int, ...], placements: tuple[Any, ...]) -> None:
    """Expert 1 never meets a token, expert 2 not at first, expert 3 not after the first step."""
    case = Case((experts((5, 6, 4), *placements),), {}, 4)

    def grads(step: int, k: int) -> Tensor:
        found = random_gradients(case)(step, k)
        for expert in (1, *((2,) if step < 2 else ()), *((3,) if step else ())):
            found[expert] = 0
        return found

    expected = looped(case, grads)
    assert not expected[1][0][1].any()
    decayed = initial(case)[0][1]
    for _ in range(case.steps):
        decayed = decayed * (1 - 0.01 * 0.1)
    assert torch.equal(expected[0][0][1], decayed)  # weight decay alone
    on_a_mesh(case, grid, expected, grads=grads)


@pytest.mark.parametrize(
    ("grid", "placements", "without_gradient"),
    [
        pytest.param((3,), (S0,), {(0, 0): {0}, (2, 0): {1, 2}}, id="EP"),
        pytest.param((8,), (S0,), {(0, 0): {0, 7}, (1, 0): {6}, (2, 0): set(range(1, 8))}, id="EP, fewer experts than ranks"),
        pytest.param((2, 2), (strided(2), S0), {(0, 0): {3}, (1, 0): {0, 1, 2}, (3, 0): {0}}, id="EP x FSDP"),
        pytest.param((2, 2), (S1, S0), {(0, 0): {1}, (1, 0): {0, 2}, (3, 0): {0, 3}}, id="EP x FSDP, few"),
        pytest.param((2, 3), (S0, S2), {(1, 0): {0, 1, 2}, (2, 0): {4}}, id="EP x TP"),
        pytest.param((2, 2), (R, S0), {(0, 0): {0, 2}, (2, 0): {1, 3}}, id="HSDP, all replicas"),
    ],
)
def test_a_rank_without_gradient_counts_as_zeros(
    grid: tuple[int, ...], placements: tuple[Any, ...], without_gradient: dict[tuple[int, int], set[int]]
) -> None:
    """A rank whose experts meet no token may have no gradient at all; another parameter has its own in every step."""
    case = Case((experts((5, 6, 4), *placements), experts((4, 7, 3), *placements)), {}, 4)
    held = run_threads(math.prod(grid), lambda rank: torch_shards(case, [init_device_mesh("cpu", grid)]))

    def grads(step: int, k: int) -> Tensor:
        found = random_gradients(case)(step, k)
        for rank in without_gradient.get((step, k), ()):
            found.view(-1)[held[rank][k]] = 0
        return found

    on_a_mesh(case, grid, looped(case, grads), grads=grads, without_gradient=without_gradient)


# Any layout.

ONE_AXIS = [(1,), (2,), (3,), (5,), (8,), (12,)]
MORE_AXES = [(2, 2), (2, 3), (3, 2), (1, 4), (4, 2), (2, 5), (3, 4), (6, 2), (2, 2, 2), (3, 2, 2), (2, 1, 3)]


@st.composite
def expert_params(draw: Any, axes: int) -> Param:
    dims = st.sampled_from([0, 0, 1, 2])
    shard = st.builds(Shard, dims)
    cut = st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(2, 4))
    placements = draw(st.tuples(*[st.one_of(shard, shard, shard, st.just(R), cut)] * axes))
    shape = draw(st.tuples(st.integers(1, 8), st.integers(1, 9), st.integers(1, 9)))
    return Param(shape, 0, placements)


@st.composite
def expert_cases(draw: Any) -> tuple[Case, tuple[int, ...]]:
    grid = draw(st.sampled_from(ONE_AXIS + MORE_AXES))
    params = draw(st.lists(expert_params(len(grid)), min_size=1, max_size=2))
    options = {
        "replicas": draw(st.sampled_from(["auto", "share", "repeat"])),
        "chunk_size": draw(st.sampled_from([-1, -1, 1, 4])),
        "memory_budget": draw(st.sampled_from([2**26, 2**26, 1, 1500])),
        "expert_dims": draw(st.sampled_from(["out_in", "in_out"])),
        "adjust_lr_fn": draw(st.sampled_from(["match_rms_adamw", "spectral"])),
        "nesterov": draw(st.booleans()),
    }
    return Case(tuple(params), options, STEPS), grid


@settings(max_examples=20, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(expert_cases())
def test_random_layouts_equal_a_loop_over_experts(drawn: tuple[Case, tuple[int, ...]]) -> None:
    case, grid = drawn
    wire, plan, held = on_a_mesh(case, grid, looped(case))
    moved = elements_that_must_move(case, plan, held)
    assert sum(wire.elements.values()) == case.steps * moved
