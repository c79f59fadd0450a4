"""A plan that is written and read is the same plan."""

from __future__ import annotations

import json

import pytest

from meshmuon import ConfigError
from meshmuon.plan import routes_of
from meshmuon.tools.predict.saved_plan import read_plan
from tests.support.plans import random_plan


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_survives_its_file(seed: int) -> None:
    plan = random_plan(seed)
    read = read_plan(plan.to_json())
    assert read.digest == plan.digest
    assert read.params == plan.params
    assert read.options == plan.options
    assert read.wave_lanes == plan.wave_lanes
    assert read.loads == plan.loads
    assert read.bytes_sent == plan.bytes_sent
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
        content for content in (json.loads(random_plan(seed).to_json()) for seed in range(50)) if len(content["waves"]) > 1
    )
    content["options"]["budget"] += 1
    with pytest.raises(ConfigError, match="The file was changed"):
        read_plan(json.dumps(content))
