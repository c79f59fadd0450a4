"""Balance: how far the heaviest rank is from what any assignment of whole matrices must take."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmuon.layout import Layout, Piece, Sharded, ShardedMatrix
from meshmuon.ortho import expected_flops, resolve_scheme
from meshmuon.plan import Plan, PlannedParam, PlanOptions, Task, cost_model_for, make_plan
from meshmuon.plan.owners import assign_owners, lightest_possible
from tests.support.plans import entry, line, options_for

Shapes = list[tuple[int, int]]
_DEEPSEEK: Shapes = [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)]
MODELS: dict[str, Shapes] = {
    "GPT-2 small": [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12,
    "Llama-3 8B": [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    * 32,
    "Qwen3-30B-A3B, dense part": [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128, 2048)] * 48,
    "DeepSeek-V3, dense part": _DEEPSEEK * 61
    + [(18432, 7168), (18432, 7168), (7168, 18432)] * 3
    + [(2048, 7168), (2048, 7168), (7168, 2048)] * 58,
}
RANKS = (8, 64, 128, 512, 2048)
# Some matrices are so large that no whole number of them on each rank is near the mean; ``lightest_possible`` proves
# it.
IMPOSSIBLE = {("Qwen3-30B-A3B, dense part", 64), ("DeepSeek-V3, dense part", 64)}


@lru_cache
def flops(rows: int, cols: int) -> int:
    return expected_flops(rows, cols, resolve_scheme("polar_express", 5), "auto", torch.bfloat16)


def fsdp(shapes: Shapes, ranks: int) -> Plan:
    mesh = line(ranks)
    entries = [
        PlannedParam(f"p{k}", (Layout(shape, mesh, (Sharded(0),)),), 0, "bf16", 2, flops(*shape))
        for k, shape in enumerate(shapes)
    ]
    return make_plan(entries, PlanOptions(cost_model_for("cuda")))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", MODELS)
def test_balance_of_models(model: str, ranks: int) -> None:
    plan = fsdp(MODELS[model], ranks)
    costs = [task.cost for task in plan.tasks]
    assert len(costs) == len(MODELS[model])
    heaviest, simple = max(plan.loads.values()), max(sum(costs) / ranks, *costs)
    assert plan.bound >= simple * (1 - 1e-12)
    assert heaviest >= plan.bound * (1 - 1e-12)
    assert heaviest <= 1.05 * plan.bound
    assert (plan.bound / simple > 1.05) == ((model, ranks) in IMPOSSIBLE)
    if (model, ranks) not in IMPOSSIBLE:
        assert heaviest <= 1.05 * simple


def best_possible(costs: list[float], ranks: int) -> float:
    """Over all assignments."""
    return min(
        max(sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks))
        for owners in product(range(ranks), repeat=len(costs))
    )


@settings(max_examples=60)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=7), st.integers(1, 3))
def test_no_assignment_beats_the_bound(costs: list[int], ranks: int) -> None:
    bound = lightest_possible([float(cost) for cost in costs], ranks)
    assert bound <= best_possible([float(cost) for cost in costs], ranks) + 1e-9
    assert bound >= max(sum(costs) / ranks, *costs) - 1e-9


@pytest.mark.parametrize(
    ("costs", "ranks", "bound"),
    [
        ([3.0], 4, 3.0),
        ([1.0] * 8, 4, 2.0),
        ([5.0, 5.0, 5.0], 2, 10.0),  # two of three on one rank
        ([5.0, 4.0, 3.0, 1.0, 1.0], 3, 5.0),
        ([2.0, 2.0, 1.0, 1.0, 1.0], 2, 3.5),  # the mean
        ([7.0] * 5, 2, 21.0),  # three of five
        ([9.0, 5.0, 5.0, 5.0], 2, 12.0),
    ],
)
def test_bounds(costs: list[float], ranks: int, bound: float) -> None:
    assert lightest_possible(costs, ranks) == pytest.approx(bound)
    assert lightest_possible(costs[::-1], ranks) == pytest.approx(bound)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 3))
def test_longest_first_is_near_the_best(costs: list[int], ranks: int) -> None:
    """Graham: at most 4/3 − 1/(3W) of the optimum when every rank may own every matrix."""
    everyone = spread_on(*range(ranks))
    loads = dict.fromkeys(range(ranks), 0.0)
    owners = assign_owners([Task(0, 0, everyone, float(cost)) for cost in costs], loads)
    for rank in range(ranks):
        assert loads[rank] == sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank)
    best = best_possible([float(cost) for cost in costs], ranks)
    assert max(loads.values()) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def spread_on(*ranks: int) -> ShardedMatrix:
    """A matrix with one row on each of ``ranks``."""
    return ShardedMatrix(
        len(ranks), 2, tuple(Piece(((k, k + 1),), ((0, 2),), (rank,)) for k, rank in enumerate(ranks)), 1
    )


@pytest.mark.parametrize(
    ("loads", "jobs", "owners"),
    [
        # Ties go to the earlier job and the lower rank.
        ({2: 0, 5: 0, 9: 0}, [((9, 2, 5), 1)] * 4, [2, 5, 9, 2]),
        # The most expensive first.
        ({0: 0, 1: 0}, [((0, 1), 1), ((0, 1), 1), ((0, 1), 2)], [1, 1, 0]),
        # The cheap job that only ranks 0 and 1 can do is there before the expensive one chooses.
        ({0: 0, 1: 8, 2: 3}, [((0, 1, 2), 10), ((0, 1), 9)], [2, 0]),
        # Loads that are there already count.
        ({0: 100, 1: 50, 2: 0}, [((0, 1, 2), 40), ((0, 1, 2), 30), ((0, 1, 2), 20)], [2, 2, 1]),
        # Only holders are candidates; different sets of holders that overlap share loads.
        ({0: 0, 1: 0, 2: 0, 3: 0}, [((0, 1), 4), ((1, 2), 3), ((2, 3), 2), ((0, 1), 1)], [0, 1, 2, 1]),
    ],
    ids=["ties", "most expensive", "least choice", "loads", "holders"],
)
def test_who_owns_what(loads: dict[int, float], jobs: list[tuple[tuple[int, ...], int]], owners: list[int]) -> None:
    matrices = {ranks: spread_on(*ranks) for ranks, _ in jobs}
    found = dict(loads)
    assert assign_owners([Task(0, 0, matrices[ranks], float(cost)) for ranks, cost in jobs], found) == owners
    for owner, (_, cost) in zip(owners, jobs, strict=True):
        loads = {**loads, owner: loads[owner] + cost}
    assert found == loads


def test_experts_weigh_on_the_ranks_that_hold_them() -> None:
    """Experts that stay on ranks 0 and 1 keep the dense matrices away from these."""
    experts = entry("experts", (2, 8, 6), line(2), (Sharded(0),), stack_dims=1, flops=10**9)
    dense = [entry(f"dense {k}", flops=10**8) for k in range(4)]
    plan = make_plan([experts, *dense], options_for())
    owners = [task.owner for task in plan.tasks if plan.params[task.param].name != "experts"]
    assert sorted(owners) == [2, 2, 3, 3]
    assert math.isclose(plan.loads[0], 10**9)
