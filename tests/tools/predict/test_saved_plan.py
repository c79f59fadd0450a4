"""A plan that is written and read is the same plan."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from meshmuon import ConfigError
from meshmuon.layout import Mesh, Replicated
from meshmuon.matrices import StridedRange, Window
from meshmuon.plan import CostModel, Plan, PlannedParam, PlanOptions, make_plan, routes_of
from meshmuon.tools.predict.saved_plan import read_plan
from tests.support.plans import entry, random_entries, random_nodes, random_options, random_plan, ranks_of

SEEDS = range(40)


def drawn_plan(seed: int) -> Plan:
    """A plan in which every field of parameters and options may have any value."""
    rng = random.Random(seed)
    params = [
        replace(
            param,
            window=window_of(param, rng),
            staged=rng.random() < 0.3,
            how=rng.choice(["", "keller, 5 steps"]),
            compute_dtype=rng.choice(["", "float16"]),
        )
        for param in random_entries(rng)
    ]
    back = rng.choice([None, 1, 4])  # the same in a lane
    params = [replace(param, itemsize_back=back) for param in params]
    if rng.random() < 0.3:
        params.append(entry("plain", (4, 6), Mesh((1,), (0,)), (Replicated(),), private=True, lane=("cpu", 4)))
    options = replace(
        random_options(rng),
        nodes=rng.choice([None, random_nodes(rng, ranks_of(params))]),
        cost=CostModel(*(rng.choice([1.0, 2.5]) for _ in range(2)), *(rng.choice([None, 3.0]) for _ in range(4))),
    )
    return make_plan(params, options)


def window_of(param: PlannedParam, rng: random.Random) -> Window | None:
    """Half of the rows, or every other one; None for what has too few of them, and for filters."""
    shape = param.layouts[0].shape
    if len(shape) != 2 + param.stack_dims or shape[-2] < 2 or not shape[-1] or rng.random() < 0.5:
        return None
    half = shape[-2] // 2
    return rng.choice([StridedRange(half, half), StridedRange(0, 1, half, 2)]), StridedRange(0, shape[-1])


def test_every_field_is_drawn() -> None:
    plans = [drawn_plan(seed) for seed in SEEDS]

    def unvaried(records: Sequence[PlannedParam | PlanOptions | CostModel]) -> list[str]:
        return [f.name for f in fields(records[0]) if len({getattr(record, f.name) for record in records}) < 2]

    assert not unvaried([param for plan in plans for param in plan.params])
    assert not unvaried([plan.options for plan in plans])
    assert not unvaried([plan.options.cost for plan in plans])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_survives_its_file(seed: int) -> None:
    plan = drawn_plan(seed)
    read = read_plan(plan.to_json())
    assert read.digest == plan.digest
    assert read.params == plan.params
    assert read.options == plan.options
    assert read.wave_lanes == plan.wave_lanes
    assert read.loads == plan.loads
    assert read.bytes_sent == plan.bytes_sent
    assert read.bytes_copied == plan.bytes_copied
    rank = plan.ranks[-1]
    assert routes_of(read, rank) == routes_of(plan, rank)


def test_what_is_not_a_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="not JSON"):
        read_plan("{")
    with pytest.raises(ConfigError, match=r"no plan: write one with optimizer\.plan\(\)\.to_json\(\)"):
        read_plan("{}")
    content = json.loads(random_plan(1).to_json())
    with pytest.raises(ConfigError, match="version 0"):
        read_plan(json.dumps({**content, "version": 0}))
    with pytest.raises(ConfigError, match="damaged"):
        read_plan(json.dumps({**content, "layouts": []}))


def test_a_changed_plan_is_refused() -> None:
    content = next(
        content
        for content in (json.loads(random_plan(seed).to_json()) for seed in range(50))
        if len(content["waves"]) > 1
    )
    content["options"]["budget"] += 1
    with pytest.raises(ConfigError, match="The file was changed"):
        read_plan(json.dumps(content))
