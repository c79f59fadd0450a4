"""Weights in host memory: what is copied to the device and back counts in balances."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from meshmuon.errors import ConfigError
from meshmuon.plan import CostModel, cost_model_for, make_plan
from tests.support.plans import entry, options_for, random_entries, random_options, seeds

COST = CostModel(0.0, 1.0, host_flops_per_byte=10.0)


def test_each_holder_copies_what_it_holds_twice() -> None:
    """(6, 5) over four ranks: 2, 2, 2 and 0 rows of 2-byte elements."""
    plan = make_plan([entry("p", (6, 5), staged=True)], options_for(cost=COST))
    assert plan.bytes_copied == {0: 40, 1: 40, 2: 40, 3: 0}
    owner = plan.tasks[0].owner
    assert plan.loads == {
        rank: 10.0 * copied + (1000 if rank == owner else 0) for rank, copied in plan.bytes_copied.items()
    }
    assert not any(make_plan([entry("p", (6, 5))], options_for(cost=COST)).bytes_copied.values())


def test_ranks_that_copy_less_own_more() -> None:
    """The (6, 4) weight in host memory leaves rank 3 without rows; the four others are sharded evenly."""
    params = [entry("host", (6, 4), staged=True), *(entry(f"p{k}", (8, 6), flops=1000) for k in range(4))]
    free = replace(COST, host_flops_per_byte=0.0)
    assert make_plan(params, options_for(cost=free)).computed[3] == 1
    dear = replace(COST, host_flops_per_byte=1e4)
    assert make_plan(params, options_for(cost=dear)).computed[3] == 4
    assert make_plan([replace(params[0], staged=False), *params[1:]], options_for(cost=dear)).computed == {
        0: 2,
        1: 1,
        2: 1,
        3: 1,
    }


def test_local_matrices_are_copied_as_well() -> None:
    plan = make_plan([entry("experts", (4, 5, 3), stack_dims=1, staged=True)], options_for(cost=COST))
    assert {task.wave for task in plan.tasks} == {-1}
    assert plan.bytes_copied == dict.fromkeys(range(4), 2 * 15 * 2)


@settings(max_examples=50, deadline=None)
@given(seed=seeds)
def test_copies_do_not_depend_on_the_plan(seed: int) -> None:
    """What ranks hold is copied, whoever owns it, and however replicas divide the work."""
    rng = random.Random(seed)
    params = [replace(param, staged=rng.random() < 0.5) for param in random_entries(rng)]
    options = random_options(rng)
    copied = [make_plan(params, replace(options, replicas=replicas)).bytes_copied for replicas in ("share", "repeat")]
    assert copied[0] == copied[1]
    held = sum(
        2 * param.itemsize * sum(piece.size * len(piece.holders) for piece in sharded.pieces)
        for param in params
        if param.staged
        for layout in param.layouts
        for sharded in param.sharded_matrices(layout)
    )
    assert sum(copied[0].values()) == held


def test_models() -> None:
    assert cost_model_for("cuda").per_byte_of_host > cost_model_for("cuda").flops_per_byte
    assert "host_flops_per_byte=10.0" in repr(COST)
    with pytest.raises(ConfigError, match=r"host_flops_per_byte=-1\.0 must be a number"):
        CostModel(1.0, 1.0, host_flops_per_byte=-1.0)
