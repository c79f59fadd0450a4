"""What plans weigh on a GPU: the rates of GPUs, and the memory of this one; a simulation of it plans the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshmuon.agree.local_planner import LocalPlanner, PlanSettings, Topology
from meshmuon.layout import Mesh, Replicated, Sharded
from meshmuon.matrices import MatrixOptions
from meshmuon.ortho import resolve_scheme
from meshmuon.params.option_table import ParamGroup
from meshmuon.params.param_record import GroupRecipe, ParamLocation, ParamRecord
from meshmuon.plan import CostModel, Plan, PlanOptions, cost_model_for

GPU = torch.device("cuda", 0)
MESH = Mesh((4, 8), tuple(range(32)))
GPUS = cost_model_for("cuda")


def records() -> tuple[ParamRecord, ...]:
    recipe = GroupRecipe(scheme=resolve_scheme("auto", 5), matrix_options=MatrixOptions())
    place = ParamLocation((512, 2048), MESH, (Replicated(), Sharded(0)), GPU, GPU)
    weights = [torch.empty(4096, 2048, device="meta", dtype=torch.bfloat16) for _ in range(48)]
    return tuple(
        ParamRecord.of(f"layers.{k}", weight, 0, cast(ParamGroup, {}), recipe, None, place)
        for k, weight in enumerate(weights)
    )


@pytest.fixture(autouse=True)
def of_80_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=85 * 10**9))


def plan_with(**settings: Any) -> Plan:
    params = records()
    planner = LocalPlanner(
        params,
        PlanSettings(PlanOptions(cost_model_for("cpu")), "auto", "", **settings),
        Topology.around(0, params, None),
    )
    return planner.plan(frozenset(range(len(params)))).plan


def test_a_job_plans_as_the_simulation_of_its_machine() -> None:
    plan = plan_with()
    assert plan.options.cost == GPUS
    assert plan.options.budget == 2**29
    assert plan.digest == plan_with(device_memory=85 * 10**9).digest
    assert plan_with(device_memory=40 * 10**9).options.budget == 2**28


def test_what_the_user_sets_is_kept() -> None:
    assert plan_with(memory_budget=2**27).options.budget == 2**27
    assert plan_with(cost_model=CostModel(1.0, 1.0)).options.cost == CostModel(1.0, 1.0)


def test_exchange_buffers_keep_to_their_bound() -> None:
    for budget in (2**24, 2**27, 2**29):
        assert max(plan_with(memory_budget=budget).buffers(6).values()) <= 18 * budget
