"""Plans that are chosen by their predicted step: never slower than the usual one, within memory, the same on every
rank.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given

from meshmuon.layout import Mesh, Replicated, Sharded
from meshmuon.plan import Calibration, Nodes, Plan, PlannedParam, PlanOptions, choose_plan, make_plan
from meshmuon.plan.calibration import rate_at
from meshmuon.plan.machines import Machine, machine_like, machine_names
from meshmuon.plan.prediction import step_timeline
from tests.support.plans import entry, random_entries, random_nodes, random_options, ranks_of, seeds


def h100() -> Machine:
    machine = machine_like("NVIDIA H100 80GB HBM3")
    assert machine is not None
    return machine


def rates(*, several_nodes: bool = False) -> Calibration:
    return h100().rates_for("bfloat16", several_nodes=several_nodes, weight=2)


def seconds(plan: Plan, by: Calibration) -> float:
    return step_timeline(plan, by).seconds


def layers(count: int, size: int, mesh: Mesh, placements: tuple[Sharded | Replicated, ...]) -> list[PlannedParam]:
    return [entry(f"layers.{k}", (size, size), mesh, placements, flops=30 * size**3) for k in range(count)]


NODES_RATES = rates(several_nodes=True)
REPLICAS = Mesh((2, 8), tuple(range(16)))
SHARDED_IN_REPLICAS = Replicated(), Sharded(0)


@given(seeds)
def test_the_choice_is_never_slower_and_the_same_for_everyone(seed: int) -> None:
    rng = random.Random(seed)
    params = random_entries(rng)
    nodes = random_nodes(rng, ranks_of(params)) if rng.random() < 0.5 else None
    options = replace(random_options(rng), nodes=nodes)
    by = rates(several_nodes=nodes is not None)
    usual, chosen = make_plan(params, options), choose_plan(params, options, by)
    assert seconds(chosen, by) <= seconds(usual, by)
    assert choose_plan(list(params), replace(options), replace(by)).digest == chosen.digest
    assert chosen.options.replicas == options.replicas
    assert chosen.options.budget == options.budget  # the user's
    assert chosen.options.in_flight <= options.in_flight
    settled = [(param.share, planned.share) for param, planned in zip(params, chosen.params, strict=True)]
    assert all(given in (None, planned) for given, planned in settled)


@pytest.mark.parametrize(("bytes_per_second", "shared"), [(1e12, True), (1e9, False)])
def test_replicas_share_unless_the_link_between_them_is_slow(bytes_per_second: float, shared: bool) -> None:
    link = replace(NODES_RATES.between, bytes_per_second=bytes_per_second)
    by = replace(NODES_RATES, between=link)
    options = PlanOptions(by.cost_model(), nodes=Nodes.in_order(range(16), (8, 8)))
    params = layers(64, 2048, REPLICAS, SHARDED_IN_REPLICAS)
    plan = choose_plan(params, options, by)
    assert {task.sharded.replicas > 1 for task in plan.tasks} == {shared}
    both = [make_plan(params, replace(options, replicas=replicas)) for replicas in ("share", "repeat")]
    assert seconds(plan, by) <= min(seconds(other, by) for other in both)


def test_memory_that_the_user_left_open_is_used_where_it_helps() -> None:
    nodes, by = Nodes.in_order(range(16), (8, 8)), NODES_RATES
    params = layers(64, 4096, Mesh((16,), tuple(range(16))), (Sharded(0),))
    options = PlanOptions(by.cost_model(), budget=2**24, nodes=nodes)
    usual, within = make_plan(params, options), choose_plan(params, options, by)
    free = choose_plan(params, options, by, most_buffer_bytes=2**30)
    assert seconds(free, by) < seconds(within, by) <= seconds(usual, by)
    assert buffers(within) < buffers(free) <= 2**30
    generous = replace(options, budget=2**30)
    assert (
        buffers(choose_plan(params, generous, by, most_buffer_bytes=2 * 10**8))
        <= 2 * 10**8
        < buffers(make_plan(params, generous))
    )


def buffers(plan: Plan) -> int:
    return max(map(plan.buffer_bytes, plan.ranks))


def test_a_plan_of_nothing_can_be_chosen() -> None:
    assert not choose_plan([], PlanOptions(rates().cost_model()), rates()).tasks


def test_a_chunk_size_decides_alone() -> None:
    params, by = layers(8, 512, Mesh((4,), tuple(range(4))), (Sharded(0),)), rates()
    options = PlanOptions(by.cost_model(), chunk_size=2)
    assert choose_plan(params, options, by).digest == make_plan(params, options).digest


def test_devices_find_their_machine_by_name() -> None:
    assert h100().name == "h100"
    for name in machine_names():
        machine = machine_like(f"Some {name.upper()} with 80GB")
        assert machine is not None
        assert machine.name == name
    assert machine_like("an unknown device") is None


def test_rates_do_not_depend_on_the_last_bit_of_a_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    log = math.log
    expected = [rate_at(size, [(64, 1e10), (8192, 7e14)]) for size in range(64, 8192, 97)]
    monkeypatch.setattr(math, "log", lambda value: math.nextafter(log(value), math.inf))
    assert expected == [rate_at(size, [(64, 1e10), (8192, 7e14)]) for size in range(64, 8192, 97)]
