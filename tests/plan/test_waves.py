"""Waves keep all exchange buffers of a rank within the memory budget."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings

from meshmuon.layout import Layout, Mesh, Replicated, Sharded
from meshmuon.plan import (
    NO_WAVE,
    CostModel,
    Plan,
    PlannedParam,
    PlanOptions,
    cost_model_for,
    make_plan,
    routes_of,
    wave_sizes,
)
from meshmuon.plan.waves import Footprint
from tests.support.plans import entry, options_for, random_entries, random_options, seeds

MIB = 2**20
DEFAULT_BOUND = 3 * 6 * 64 * MIB


def promised(plan: Plan, options: PlanOptions) -> int:
    """Three times the budget for each wave in flight; if that is more, what the largest matrix of every owner needs."""
    needs: dict[int, int] = Counter()
    for rank in plan.ranks:
        largest: dict[tuple[object, object], int] = {}
        for task in plan.tasks:
            piece, one = task.sharded.piece_of(rank), plan.params[task.param]
            if task.wave == NO_WAVE or piece is None:
                continue
            sizes: dict[object, int] = {task.owner: piece.size}
            if task.owner == rank:
                sizes["theirs"] = task.sharded.size - piece.size
                sizes["results"] = (
                    task.sharded.size * task.sharded.replicas - piece.size if task.sharded.replicas > 1 else 0
                )
            for name, size in sizes.items():
                largest[one.lane, name] = max(largest.get((one.lane, name), 0), size * one.itemsize)
        needs[rank] = sum(largest.values())
    return max(3 * options.budget * options.in_flight, max(needs.values(), default=0))


def shared_matrices(replicas: int, shards: int, count: int, side: int) -> list[PlannedParam]:
    mesh = Mesh((replicas, shards), tuple(range(replicas * shards)))
    layouts = (Layout((side, side), mesh, (Replicated(), Sharded(0))),)
    return [PlannedParam(f"layers.{k}.weight", layouts, 0, "bf16", 2, 30 * side**3, share=True) for k in range(count)]


def random_case(seed: int) -> tuple[list[PlannedParam], PlanOptions]:
    """Many matrices and budgets of their size, so that they rarely fit at once."""
    rng = random.Random(seed)
    entries = [
        replace(one, name=f"{one.name}.{k}") for one in random_entries(rng) for k in range(rng.choice([1, 3, 10]))
    ]
    budget = rng.choice([1, 30, 100, 300, 1000, 3000])
    return entries, replace(random_options(rng), chunk_size=-1, budget=budget, cost=cost_model_for("cpu"))


@settings(max_examples=300)
@given(seeds)
@example(1110)  # where more waves let one owner gather more than fewer do
def test_buffers_keep_to_the_budget(seed: int) -> None:
    entries, options = random_case(seed)
    plan = make_plan(entries, options)
    assert max(map(plan.buffer_bytes, plan.ranks), default=0) <= promised(plan, options)
    assert 1 <= plan.options.in_flight <= options.in_flight
    assert replace(plan.options, in_flight=options.in_flight) == options
    gathered: dict[tuple[int, int], list[int]] = {}
    for task in plan.tasks:
        if task.wave != NO_WAVE:
            gathered.setdefault((task.wave, task.owner), []).append(
                task.sharded.size * plan.params[task.param].itemsize
            )
    assert all(len(sizes) == 1 or sum(sizes) <= options.budget for sizes in gathered.values())


def test_random_cases_come_to_all_ends() -> None:
    """Fewer waves in flight, one of them, and plans that the bound leaves alone are all among the random cases."""
    found: Counter[str | int] = Counter()
    for seed in range(200):
        entries, options = random_case(seed)
        plan = make_plan(entries, options)
        found["as many" if plan.options.in_flight == options.in_flight else min(plan.options.in_flight, 3)] += 1
    assert min(found["as many"], found[1], found[2], found[3]) >= 2, found


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_what_fits_is_cut_as_without_a_bound(seed: int) -> None:
    entries, options = random_case(seed)
    plan = make_plan(entries, options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Footprint, "bytes_by_rank", lambda self, waves, in_flight: {})
        unbound = make_plan(entries, options)
    assert unbound.options == options
    if max(map(unbound.buffer_bytes, plan.ranks), default=0) <= 3 * options.budget * options.in_flight:
        assert plan == unbound
        assert plan.digest == unbound.digest
    assert plan.bytes_sent == unbound.bytes_sent


@pytest.mark.parametrize(
    ("replicas", "shards", "count", "before"), [(8, 64, 2048, 2172), (8, 512, 60_000, 7700)], ids=["8×64", "8×512"]
)
def test_replicas_that_share_keep_to_the_budget(replicas: int, shards: int, count: int, before: int) -> None:
    """4096×4096 in bfloat16 are 32 MiB, and 8 copies go back: ``before`` is what buffers took when only gathers
    counted.
    """
    entries = shared_matrices(replicas, shards, count, 4096)
    plan = make_plan(entries, PlanOptions(cost_model_for("cuda")))
    largest = max(map(plan.buffer_bytes, plan.ranks))
    assert largest <= DEFAULT_BOUND < before * MIB
    # All owners may work at the same time, and while half of them compute, the others gather.
    assert plan.options.in_flight == 2
    assert {task.owner for task in plan.tasks if task.wave < 2} == set(plan.ranks)


def test_waves_are_as_many_as_the_budget_needs() -> None:
    """16 matrices for each of 4 ranks; a wave with one of them per owner takes 2 × 96 bytes less what stays."""
    # by which six waves are best
    entries, cost = [entry(f"p{k}", flops=10**9) for k in range(64)], CostModel(1e3, 2600.0)
    waves, most = {}, {}
    for budget in (96 * 16, 96 * 3, 96 * 2, 96):
        plan = make_plan(entries, options_for(budget=budget, cost=cost))
        waves[budget], most[budget] = len(plan.wave_lanes), plan.options.in_flight
    assert (waves[96 * 16], most[96 * 16]) == (6, 6)
    assert waves[96 * 16] <= waves[96 * 3] < waves[96 * 2] < waves[96] == 16
    assert all(most[budget] >= 4 for budget in most)


def test_an_owner_has_its_matrices_in_one_slot_where_halves_take_turns() -> None:
    plan = make_plan(shared_matrices(8, 16, 128 * 3, 64), options_for(budget=64 * 64 * 2 * 4 // 3))
    assert plan.options.in_flight == 2
    for rank in plan.ranks:
        slots = {task.wave % 2 for task in plan.tasks if task.owner == rank}
        assert len(slots) == 1
        assert sum(wave_sizes(routes).results > 0 for routes in routes_of(plan, rank)) == 3


def test_one_matrix_of_every_owner_is_the_last_resort() -> None:
    """The budget is far too small for any matrix: one wave at a time, in which all four ranks may work nevertheless."""
    entries = [entry(f"p{k}", placements=(Replicated(),), share=True) for k in range(8)]
    options = options_for(budget=1)
    plan = make_plan(entries, options)
    assert plan.options.in_flight == 1
    assert Counter((task.wave, task.owner) for task in plan.tasks) == {
        (wave, rank): 1 for wave in (0, 1) for rank in range(4)
    }
    matrix = 8 * 6 * 2
    assert max(map(plan.buffer_bytes, plan.ranks)) == promised(plan, options) == 4 * matrix + 3 * matrix


def test_an_explicit_chunk_size_stands() -> None:
    plan = make_plan([entry(f"p{k}") for k in range(8)], options_for(budget=1, chunk_size=4, in_flight=3))
    assert (len(plan.wave_lanes), plan.options.in_flight) == (2, 3)


def test_the_bound_is_found_in_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try looks at every matrix."""
    tries, count = [], Footprint.bytes_by_rank

    def counted(self: Footprint, waves: Sequence[int], in_flight: int) -> dict[int, int]:
        tries.append(in_flight)
        return count(self, waves, in_flight)

    monkeypatch.setattr(Footprint, "bytes_by_rank", counted)
    make_plan([entry(f"p{k}") for k in range(100)], options_for())
    assert len(tries) == 1
    for budget in (8 * 6 * 2, 8 * 6 * 4, 1):
        tries.clear()
        make_plan(shared_matrices(4, 16, 4000, 16), options_for(budget=budget))
        assert 1 < len(tries) < 40


def test_two_waves_in_flight_before_halves_take_turns() -> None:
    """Three matrices per owner, 72 bytes to gather and 96 of shards: 360 bytes are enough for two waves, not for
    three.
    """
    plan = make_plan([entry(f"p{k}") for k in range(12)], options_for(budget=20))
    assert 3 * 20 * 6 == 360
    assert (len(plan.wave_lanes), plan.options.in_flight) == (3, 2)
    assert max(map(plan.buffer_bytes, plan.ranks)) == 2 * (72 + 96)


def test_the_most_expensive_come_first() -> None:
    entries = [entry(f"p{k}", flops=10**9 * (1 + k // 4)) for k in range(24)]
    plan = make_plan(entries, options_for(cost=CostModel(1e3, 1.0)))
    for rank in plan.ranks:
        own = sorted((task.wave, -task.cost) for task in plan.tasks if task.owner == rank)
        assert [cost for _, cost in own] == sorted(cost for _, cost in own)
    assert len(plan.wave_lanes) > 1
