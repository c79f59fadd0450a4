"""Experts beyond what ``test_cases.py`` draws: shards cut by hand, batches, and the shape that scales the learning
rate.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.support.cases import Case, Param, check, gradient, initial, place, run, single
from tests.support.threads import run_threads

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
STEPS = 3


def experts(shape: tuple[int, ...], *placements: Any) -> Param:
    return Param(shape, 0, placements)


def test_the_learning_rate_of_experts_as_in_out_is_asked_for_out_and_in() -> None:
    asked: set[tuple[int, int]] = set()

    def adjust(rows: int, cols: int) -> float:
        asked.add((rows, cols))
        return 1.0 + rows / cols

    case = Case((Param((4, 5, 9), 0, (S1, S0), flipped=True),), {"adjust_lr_fn": adjust}, STEPS)
    expected = single(case)
    run_threads(4, lambda rank: check(case, [init_device_mesh("cpu", (2, 2))], expected))
    assert asked == {(9, 5)}


# Batches. An 8 x 4 matrix needs 4 bytes times 32 (itself), 32 (scratch like it) and 5 * 16 (squares): 576 bytes. All of
# these are multiples of 64, so that a callable scheme gets whole batches.

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
    assert [sorted(batches) for batches in batches_of(case, (4,))] == [[(1, 4, 8), (3, 8, 4)]] * 3 + [
        [(1, 4, 8), (2, 8, 4)]
    ]


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
