"""What experts send and how they are batched: nothing where ranks hold whole ones, else only the pieces that must move."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon.plan import NO_WAVE, Plan
from tests.support.cases import Case, Param, as_parameter, check, gradient, initial, place, run, single
from tests.support.counting import Wire, counted
from tests.support.tensors import local, same
from tests.support.threads import run_threads

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
STEPS = 3
Gradients = Callable[[int, int], Tensor | None]
Shards = list[list[Tensor]]  # rank → parameter → the flat indices of what torch puts there


def on_a_mesh(case: Case, grid: tuple[int, ...]) -> tuple[Wire, Plan, Shards]:
    """Every rank ends with the bits of one device and sends what the plan says."""
    expected = single(case)

    def main(rank: int) -> tuple[Plan, list[Tensor]]:
        meshes = [init_device_mesh("cpu", grid)]
        return check(case, meshes, expected, watch=wire.watch).plan(), torch_shards(case, meshes)

    with counted() as wire:
        ranks = run_threads(math.prod(grid), main)
    for rank in range(math.prod(grid)):
        wire.check(rank)
    return wire, ranks[0][0], [shards for _, shards in ranks]


def torch_shards(case: Case, meshes: Sequence[DeviceMesh]) -> list[Tensor]:
    """Parameter → the flat indices of the elements that torch puts on this rank."""
    indices = [torch.arange(math.prod(param.shape)).reshape(param.shape) for param in case.params]
    return [local(place(case, meshes, k, value)).flatten() for k, value in enumerate(indices)]


def elements_that_must_move(case: Case, plan: Plan, held: Shards) -> int:
    """From torch's own shards and the owners alone: what the owner lacks comes in, what others hold goes out."""
    total = 0
    for index, task in enumerate(plan.tasks):
        size = math.prod(case.params[task.param].shape[-2:])
        count = {rank: int((shards[task.param] // size == task.matrix).sum()) for rank, shards in enumerate(held)}
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
    layout("EP that does not divide", (4,), experts((6, 6, 5), S0), experts((7, 5, 9), S0)),
    layout("FSDP2, fewer experts than ranks", (8,), experts((3, 6, 5), S0), experts((1, 4, 9), S0), experts((5, 4, 4), S0)),
    layout("EP x FSDP, uneven", (3, 2), experts((8, 6, 5), strided(2), S0), experts((10, 5, 9), strided(2), S0)),
    layout("EP x FSDP, fewer experts than ranks", (4, 2), experts((4, 10, 6), S1, S0), experts((2, 6, 9), S1, S0)),
    layout("EP x TP by columns", (2, 3), experts((4, 6, 6), S0, S2), experts((3, 5, 8), S0, S2)),
    layout("EP x TP x FSDP", (2, 2, 2), experts((4, 6, 5), S1, S0, S2), experts((8, 6, 6), strided(2), S0, S1)),
    layout("HSDP, shared", (2, 2), *HSDP, replicas="share"),
    layout("HSDP, repeated", (2, 2), *HSDP, replicas="repeat"),
    layout("replicated, shared", (3,), *COPIES, replicas="share"),
    layout("replicated beside EP", (2, 2), experts((4, 5, 6), S0, R), experts((4, 5, 6), R, R), experts((4, 5, 6), S1, S0)),
]


@pytest.mark.parametrize(("case", "grid"), LAYOUTS)
def test_only_what_must_move_travels(case: Case, grid: tuple[int, ...]) -> None:
    """Between the ranks that share an expert alone, and without padding."""
    wire, plan, held = on_a_mesh(case, grid)
    moved = elements_that_must_move(case, plan, held)
    assert sum(wire.elements.values()) == case.steps * moved
    assert sum(wire.nbytes.values()) == 4 * case.steps * moved


def test_the_learning_rate_of_experts_as_in_out_is_asked_for_out_and_in() -> None:
    asked: set[tuple[int, int]] = set()

    def adjust(rows: int, cols: int) -> float:
        asked.add((rows, cols))
        return 1.0 + rows / cols

    on_a_mesh(Case((experts((4, 5, 9), S1, S0),), {"expert_dims": "in_out", "adjust_lr_fn": adjust}, STEPS), (2, 2))
    assert asked == {(9, 5)}


@pytest.mark.parametrize(("count", "efsdp", "ep"), [(8, 2, 2), (6, 2, 2), (8, 3, 2), (9, 2, 3), (5, 2, 1)])
def test_shards_that_fsdp_would_cut_inside_the_parts_of_ep(count: int, efsdp: int, ep: int) -> None:
    """torchtitan cuts by EP first and FSDP2 cuts what EP left; here by hand, so that nothing of distribute_tensor is trusted."""
    case = Case((experts((count, 6, 5), strided(ep), S0),), {}, STEPS)
    expected, _ = single(case)

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
        values, _, _ = run(case, params, lambda step, k: as_dtensor(gradient(case, step, k)))  # type: ignore[arg-type]
        same(values[0], cut(expected[0]), f"rank {rank}, parameter")

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
    wire, plan, _ = on_a_mesh(case, grid)
    assert not wire.calls
    assert not wire.nbytes
    assert all(task.wave == NO_WAVE for task in plan.tasks)


def test_whole_experts_stay_while_other_parameters_travel() -> None:
    case = Case((experts((7, 5, 4), S0), experts((8, 6), S0), experts((6, 9, 4), S0)), {}, STEPS)
    wire, plan, _ = on_a_mesh(case, (4,))
    assert {task.param for task in plan.tasks if task.wave != NO_WAVE} == {1}
    assert sum(wire.elements.values()) == STEPS * 2 * (3 * 8 * 6 // 4)


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
        run(case, params, lambda step, k: place(case, meshes, k, gradient(case, step, k)))  # type: ignore[arg-type]

    run_threads(math.prod(grid), main)
    return seen


def test_local_experts_of_one_shape_are_one_batch() -> None:
    case = Case((experts((7, 8, 4), S0), experts((4, 8, 4), S0), experts((4, 4, 8), S0)))
    assert [sorted(batches) for batches in batches_of(case, (4,))] == [[(1, 4, 8), (3, 8, 4)]] * 3 + [[(1, 4, 8), (2, 8, 4)]]


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
    assert [[shape[0] for shape in batches] for batches in batches_of(case, (2,))] == [lengths] * 2


@pytest.mark.parametrize("budget", [1, 2 * MATRIX_BYTES, 2**20])
def test_batches_of_experts_that_travel_keep_to_the_memory_budget(budget: int) -> None:
    """4 ranks own 12 experts, 3 each; a small budget also cuts them into waves."""
    found = batches_of(Case((experts((12, 8, 4), S1, S0),), {"memory_budget": budget}), (2, 2))
    for one in found:
        assert sum(shape[0] for shape in one) == 3
        assert all(shape[0] * MATRIX_BYTES <= max(budget, MATRIX_BYTES) for shape in one)
    assert [len(one) for one in found] == [1 if budget > 1000000 else 3 if budget == 1 else 2] * 4


# Gradients that are zero or missing.


def step_with(
    case: Case, grid: tuple[int, ...], grads: Gradients, without_gradient: Mapping[tuple[int, int], set[int]]
) -> list[Tensor]:
    """What one device makes of ``grads``; ranks too, of which some have no gradient at (step, parameter)."""
    expected, _, _ = run(case, [nn.Parameter(value) for value in initial(case)], grads)

    def main(rank: int) -> None:
        meshes = [init_device_mesh("cpu", grid)]

        def own(step: int, k: int) -> Tensor | None:
            whole = grads(step, k)
            return None if whole is None or rank in without_gradient.get((step, k), ()) else place(case, meshes, k, whole)

        params = [as_parameter(place(case, meshes, k, value), True) for k, value in enumerate(initial(case))]
        values, _, _ = run(case, params, own)
        for k, value in enumerate(values):
            same(value, local(place(case, meshes, k, expected[k])), f"rank {rank}, parameter {k}")

    run_threads(math.prod(grid), main)
    return expected


@pytest.mark.parametrize(("grid", "placements"), [((3,), (S0,)), ((2, 2), (S1, S0)), ((2, 2), (R, S0))], ids=str)
def test_an_expert_without_tokens_only_decays(grid: tuple[int, ...], placements: tuple[Any, ...]) -> None:
    """Expert 1 never meets a token, expert 2 not at first, expert 3 not after the first step."""
    case = Case((experts((5, 6, 4), *placements),), {}, 4)

    def grads(step: int, k: int) -> Tensor | None:
        whole = gradient(case, step, k)
        assert whole is not None
        whole[[1, *((2,) if step < 2 else ()), *((3,) if step else ())]] = 0
        return whole

    (expected,) = step_with(case, grid, grads, {})
    decayed = initial(case)[0][1]
    for _ in range(case.steps):
        decayed = decayed * (1 - 0.01 * 0.1)
    assert torch.equal(expected[1], decayed)


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

    def grads(step: int, k: int) -> Tensor | None:
        whole = gradient(case, step, k)
        assert whole is not None
        for rank in without_gradient.get((step, k), ()):
            whole.view(-1)[held[rank][k]] = 0
        return whole

    step_with(case, grid, grads, without_gradient)
