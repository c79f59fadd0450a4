"""Whether replicas share an owner where they are free to: the rank with most to do decides."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given

from meshmuon.layout import Mesh, Replicated, Sharded
from meshmuon.plan import CostModel, Nodes, Plan, PlannedParam, PlanOptions, make_plan
from tests.support.plans import entry, options_for, seeds

GPUS = CostModel(1.3e3, 4e9, 1e4, 1e10)
SHARDED_IN_REPLICAS = Replicated(), Sharded(0)


def layers(count: int, size: int, mesh: Mesh) -> list[PlannedParam]:
    return [entry(f"layers.{k}", (size, size), mesh, SHARDED_IN_REPLICAS, flops=30 * size**3) for k in range(count)]


def shared(plan: Plan) -> bool:
    (all_alike,) = {task.sharded.replicas > 1 for task in plan.tasks}
    return all_alike


@pytest.mark.parametrize(("price", "pays"), [(1e2, True), (1e4, True), (1e7, False)])
def test_replicas_share_unless_the_link_between_them_is_slow(price: float, pays: bool) -> None:
    options = options_for(cost=replace(GPUS, between_flops_per_byte=price), nodes=Nodes.in_order(range(16), (8, 8)))
    assert shared(make_plan(layers(64, 2048, Mesh((2, 8), tuple(range(16)))), options)) is pays


def test_few_matrices_on_many_ranks_are_repeated() -> None:
    """Of 96 matrices, an owner has one if 512 ranks share them, and sends it eight times; two if 64 ranks repeat
    them.
    """
    mesh, nodes = Mesh((8, 64), tuple(range(512))), Nodes.in_order(range(512), (8,) * 64)
    for count, pays in ((96, False), (4096, True)):
        assert shared(make_plan(layers(count, 2048, mesh), options_for(cost=GPUS, nodes=nodes))) is pays


@given(seeds)
def test_the_heaviest_rank_has_hardly_more_than_with_the_better_of_both(seed: int) -> None:
    rng = random.Random(seed)
    replicas, shards = rng.choice([(2, 2), (4, 1), (3, 4), (8, 2)])
    mesh = Mesh((replicas, shards), tuple(range(replicas * shards)))
    sizes = [rng.choice([4, 8, 24]) for _ in range(rng.randrange(1, 40))]
    placements = Replicated(), rng.choice([Replicated(), Sharded(0)])
    params = [entry(f"p{k}", (n, n), mesh, placements, flops=30 * n**3) for k, n in enumerate(sizes)]
    cost = CostModel(rng.choice([0.0, 1.0, 100.0]), rng.choice([1.0, 1e4]))

    def heaviest(way: str) -> float:
        plan = make_plan(params, PlanOptions(cost, way))
        return max(plan.loads.values()) + 2 * cost.flops_per_exchange * bool(plan.wave_lanes)

    # Owners have at most 4/3 of the bound by which it is decided.
    assert (
        heaviest("auto") <= 4 / 3 * max(1e-9, min(heaviest("share"), heaviest("repeat"))) + 2 * cost.flops_per_exchange
    )


def test_meshes_decide_for_themselves() -> None:
    """Expensive matrices of one mesh are shared; those of another, which take longer to send, are not."""
    one, other = Mesh((4, 1), (0, 1, 2, 3)), Mesh((2, 2), (0, 1, 2, 3))
    expensive = [entry(f"a{k}", (8, 8), one, SHARDED_IN_REPLICAS, flops=10**6) for k in range(8)]
    cheap = [entry(f"b{k}", (8, 8), other, (Replicated(), Replicated()), flops=1) for k in range(8)]
    plan = make_plan([*expensive, *cheap], options_for(cost=CostModel(1.0, 1.0)))
    travelling = {plan.params[task.param].name[0] for task in plan.tasks if task.wave >= 0}
    assert travelling == {"a"}
