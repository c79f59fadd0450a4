"""Plans on several nodes: fewer bytes between nodes at no higher load, replicas and waves by the links, one node as
before.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmuon.errors import ConfigError
from meshmuon.layout import Mesh, Replicated, Sharded
from meshmuon.plan import CostModel, Nodes, Plan, Task, cost_model_for, make_plan
from meshmuon.plan.nodes import Crossings
from meshmuon.plan.owners import assign_owners
from tests.support.plans import entry, line, options_for, random_entries, random_nodes, random_options, ranks_of, seeds

thorough = settings(max_examples=150)


def counted_between(plan: Plan, nodes: Nodes) -> dict[int, int]:
    """Bytes that each rank sends to other nodes, transfer by transfer."""
    sent = dict.fromkeys(plan.ranks, 0)
    for index in range(len(plan.tasks)):
        itemsize = plan.params[plan.tasks[index].param].itemsize
        for transfer in (*plan.gather_sends(index), *plan.scatter_sends(index)):
            if nodes.node_of(transfer.source) != nodes.node_of(transfer.target):
                sent[transfer.source] += itemsize * transfer.piece.size
    return sent


@thorough
@given(seeds)
def test_bytes_between_nodes_are_those_of_the_transfers(seed: int) -> None:
    rng = random.Random(seed)
    params, options = random_entries(rng), random_options(rng)
    nodes = random_nodes(rng, ranks_of(params))
    plan = make_plan(params, replace(options, nodes=nodes))
    assert plan.bytes_between == counted_between(plan, nodes)
    assert all(between <= plan.bytes_sent[rank] for rank, between in plan.bytes_between.items())


@thorough
@given(seeds)
def test_owners_send_no_more_between_nodes_and_no_rank_does_more(seed: int) -> None:
    """Beside the owners that are chosen without regard to nodes, from the same tasks."""
    rng = random.Random(seed)
    params = random_entries(rng)
    ranks = ranks_of(params)
    nodes = random_nodes(rng, ranks)
    crossings = Crossings(nodes)
    costs = rng.choice([[1.0], [1.0, 2.0], [0.1, 0.3, 0.7], [0.0, 1e9]])
    tasks, itemsizes = list[Task](), list[int]()
    for k, param in enumerate(params):
        for sharded in param.sharded_matrices(param.layouts[0]):
            if sharded.size:
                tasks.append(Task(k, 0, sharded, rng.choice(costs)))
                itemsizes.append(param.itemsize)
    loads = {rank: rng.choice([0.0, 0.0, 1.0]) for rank in ranks}
    apart, together = dict(loads), dict(loads)
    before = assign_owners(tasks, apart)
    after = assign_owners(tasks, together, crossings, itemsizes)

    def between(owners: list[int]) -> int:
        moves = zip(tasks, owners, itemsizes, strict=True)
        return sum(itemsize * crossings.of(task.sharded, owner) for task, owner, itemsize in moves)

    assert between(after) <= between(before)
    assert max(together.values()) <= max(apart.values())
    assert all(owner in task.sharded.holdings for task, owner in zip(tasks, after, strict=True))
    for rank in ranks:
        added = sum(task.cost for task, owner in zip(tasks, after, strict=True) if owner == rank)
        assert together[rank] == pytest.approx(loads[rank] + added)


@settings(max_examples=60)
@given(seeds, st.sampled_from(["share", "repeat"]))
def test_whole_plans_send_no_more_between_nodes(seed: int, replicas: str) -> None:
    """Where bytes cost the same everywhere, the loads are the same numbers with and without nodes."""
    rng = random.Random(seed)
    params, options = random_entries(rng), replace(random_options(rng, replicas), cost=CostModel(0.0, 1.0))
    nodes = random_nodes(rng, ranks_of(params))
    before, after = make_plan(params, options), make_plan(params, replace(options, nodes=nodes))
    assert sum(after.bytes_between.values()) <= sum(counted_between(before, nodes).values())
    assert max(after.loads.values(), default=0.0) <= max(before.loads.values(), default=0.0)


@thorough
@given(seeds)
def test_one_node_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    params, options = random_entries(rng), random_options(rng)
    everyone = Nodes.of(dict.fromkeys(range(300), "one"))
    before, after = make_plan(params, options), make_plan(params, replace(options, nodes=everyone))
    assert (before, before.digest, repr(before.options)) == (after, after.digest, repr(after.options))
    assert "nodes" not in repr(before.options)
    assert not any(before.bytes_between.values())


def test_nodes_that_this_plan_does_not_reach_change_nothing() -> None:
    """A stage of a pipeline inside one node of many."""
    options = options_for(cost=CostModel(100.0, 5e7, 1e9, 1e12))
    alone = make_plan([entry("p")], options)
    assert make_plan([entry("p")], replace(options, nodes=Nodes.in_order(range(64), [8] * 8))).digest == alone.digest


def test_digests_tell_nodes_apart() -> None:
    params = [entry(f"p{k}") for k in range(4)]
    digests = [
        make_plan(params, options_for(nodes=nodes)).digest
        for nodes in (None, Nodes.in_order(range(4), [2, 2]), Nodes.in_order(range(4), [1, 3]), Nodes(((0, 2), (1, 3))))
    ]
    assert len(set(digests)) == 4


def test_equal_loads_go_to_the_node_that_holds_most() -> None:
    """18 rows over 8 ranks: six hold 3 rows. On nodes of 2 and 6, four holders are on the second node."""
    params = [entry(f"p{k}", (18, 4), line(8)) for k in range(4)]
    nodes = Nodes.in_order(range(8), [2, 6])
    before, after = make_plan(params, options_for()), make_plan(params, options_for(nodes=nodes))
    assert [task.owner for task in before.tasks] == [0, 1, 2, 3]
    assert sorted(task.owner for task in after.tasks) == [2, 3, 4, 5]
    assert max(after.flops.values()) == max(before.flops.values())
    # matrices · (gather, scatter) · bytes · rows · columns
    assert sum(after.bytes_between.values()) == 4 * 2 * 2 * 6 * 4
    assert sum(counted_between(before, nodes).values()) == (2 * 12 + 2 * 6) * 2 * 2 * 4


@pytest.mark.parametrize(("across", "shared"), [("replicate", False), ("shard", True)])
def test_replicas_share_by_what_lies_between_nodes(across: str, shared: bool) -> None:
    """Two replicas of four shards, on two nodes; 8 matrices. Work is cheap, links inside a node are free, those between
    are slow.

    With a replica on each node, sharing would send the result to the other node, so each computes for itself. With both
    replicas of a shard on one node, computing twice would gather twice between nodes.
    """
    mesh = Mesh((2, 4), (0, 1, 2, 3, 4, 5, 6, 7) if across == "replicate" else (0, 2, 4, 6, 1, 3, 5, 7))
    params = [entry(f"p{k}", (8, 8), mesh, (Replicated(), Sharded(0)), flops=1) for k in range(8)]
    nodes = Nodes.in_order(range(8), [4, 4])
    plan = make_plan(params, options_for(cost=CostModel(0.0, 1.0, 1e3), nodes=nodes))
    assert {task.sharded.replicas == 2 for task in plan.tasks} == {shared}
    others = [make_plan(params, options_for(replicas=way, nodes=nodes)) for way in ("share", "repeat")]
    assert sum(plan.bytes_between.values()) == min(sum(other.bytes_between.values()) for other in others)


def test_slow_exchanges_between_nodes_make_fewer_waves() -> None:
    params = [entry(f"p{k}", (64, 64), flops=10**9) for k in range(64)]
    cost = CostModel(1e4, 1e6, 1e4, 2e7)
    inside = make_plan(params, options_for(cost=cost))
    between = make_plan(params, options_for(cost=cost, nodes=Nodes.in_order(range(4), [2, 2])))
    assert (len(inside.wave_lanes), len(between.wave_lanes)) == (8, 2)


def test_bytes_between_nodes_have_their_own_price() -> None:
    """(8, 6) in four pieces on nodes of two: half of it comes from the other node and goes back."""
    model, nodes = CostModel(3.0, 1.0, 10.0), Nodes.in_order(range(4), [2, 2])
    assert make_plan([entry()], options_for(cost=model)).tasks[0].cost == 1000 + 3 * 2 * 48 * 2
    assert make_plan([entry()], options_for(cost=model, nodes=nodes)).tasks[0].cost == 1000 + 2 * (3 * 48 + 10 * 48)
    # Whole on four nodes, of which one computes for all: of 5 · 48 elements, 3 · 48 go to the other nodes.
    apart = options_for(cost=model, nodes=Nodes.in_order(range(4), [1] * 4), replicas="share")
    assert make_plan([entry(placements=(Replicated(),))], apart).tasks[0].cost == 1000 + 2 * (3 * 2 * 48 + 10 * 3 * 48)


def test_models_of_one_tier_read_as_before() -> None:
    assert repr(CostModel(1.0, 2.0)) == "CostModel(flops_per_byte=1.0, flops_per_exchange=2.0)"
    assert (
        repr(CostModel(1.0, 2.0, 3.0))
        == "CostModel(flops_per_byte=1.0, flops_per_exchange=2.0, between_flops_per_byte=3.0)"
    )
    assert cost_model_for("cuda").per_byte_between > cost_model_for("cuda").flops_per_byte
    assert cost_model_for("cpu").per_byte_between == cost_model_for("cpu").flops_per_byte


@pytest.mark.parametrize("changes", [{"between_flops_per_byte": -1.0}, {"between_flops_per_exchange": 0.0}])
def test_links_between_nodes_that_no_plan_could_use(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"CostModel: {next(iter(changes))}="):
        CostModel(1.0, 1.0, **changes)


def test_the_same_division_is_the_same_value() -> None:
    nodes = Nodes(((5, 4), (), (0, 1)))
    assert nodes == Nodes.of({0: "b", 1: "b", 4: "a", 5: "a"})
    assert [nodes.node_of(rank) for rank in (0, 1, 4, 5)] == [0, 0, 1, 1]
    assert repr(nodes) == "Nodes(((0, 1), (4, 5)))"
    assert repr(Nodes.in_order(range(6), [2, 2, 2])) == "Nodes(3 of 2 ranks)"
    with pytest.raises(ConfigError, match="a rank is on two nodes"):
        Nodes(((0, 1), (1,)))
    with pytest.raises(ConfigError, match=r"which nodes ranks \[2\] are"):
        nodes.among((0, 2))


def test_reports_show_what_leaves_a_node() -> None:
    plan = make_plan([entry("p")], options_for(nodes=Nodes.in_order(range(4), [2, 2])))
    # The owner, rank 0, gets half of 96 bytes from the other node and sends it back; ranks 2 and 3 send a quarter each.
    assert "between 2 nodes: 48 B at most, 24 B on average, 66.7% of all" in plan.describe()
    assert [plan.bytes_between[rank] for rank in plan.ranks] == [48, 0, 24, 24]
    alone = make_plan([entry("p")], options_for())
    assert "nodes" not in alone.describe()
