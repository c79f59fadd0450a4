"""Ranks plan with the machine file that fits the name of their GPU, as ``meshmuon plan`` does, and say so if there
is none.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshmuon.agree.local_planner import LocalPlanner, PlanSettings, Topology, _tell_of_guess
from meshmuon.layout import Mesh, Replicated, Sharded
from meshmuon.matrices import MatrixOptions
from meshmuon.ortho import resolve_scheme
from meshmuon.params.option_table import ParamGroup
from meshmuon.params.param_record import GroupRecipe, ParamLocation, ParamRecord
from meshmuon.plan import CostModel, Machine, Plan, PlanOptions, cost_model_for, machine_like

GPU = torch.device("cuda", 0)
MESH = Mesh((4, 8), tuple(range(32)))
GUESS = cost_model_for("cuda")


def records() -> tuple[ParamRecord, ...]:
    recipe = GroupRecipe(scheme=resolve_scheme("auto", 5), matrix_options=MatrixOptions())
    place = ParamLocation((512, 2048), MESH, (Replicated(), Sharded(0)), GPU, GPU)
    weights = [torch.empty(4096, 2048, device="meta", dtype=torch.bfloat16) for _ in range(48)]
    return tuple(
        ParamRecord.of(f"layers.{k}", weight, 0, cast(ParamGroup, {}), recipe, None, place)
        for k, weight in enumerate(weights)
    )


def plan_on(name: str, monkeypatch: pytest.MonkeyPatch, machine: Machine | None = None, **settings: Any) -> Plan:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=85 * 10**9))
    params = records()
    topology = Topology.around(0, params, None)
    planner = LocalPlanner(params, PlanSettings(PlanOptions(GUESS), "auto", "", machine=machine, **settings), topology)
    return planner.plan(frozenset(range(len(params)))).plan


def test_a_job_plans_as_the_simulation_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_like("h100")
    plan = plan_on("NVIDIA H100 80GB HBM3", monkeypatch)
    assert machine is not None
    assert plan.digest == plan_on("", monkeypatch, machine).digest
    assert plan.options.cost == machine.rates_for("bfloat16", several_nodes=False, weight=2).cost_model() != GUESS


def test_an_unknown_device_is_guessed_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _tell_of_guess.cache_clear()
    with caplog.at_level(logging.WARNING, "meshmuon"):
        plans = [plan_on("Imaginary 9000", monkeypatch) for _ in range(2)]
        plan_on("NVIDIA H100 80GB HBM3", monkeypatch)
        plan_on("Imaginary 9001", monkeypatch, cost_model=CostModel(1.0, 1.0))
    assert {plan.options.cost for plan in plans} == {GUESS}
    assert len(caplog.messages) == 1
    assert "does not know how fast Imaginary 9000 is" in caplog.messages[0]


def test_memory_that_the_user_sets_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NVIDIA H100 80GB HBM3"
    assert plan_on(name, monkeypatch, memory_budget=2**27).options.budget == 2**27
    assert max(plan_on(name, monkeypatch).buffers(6).values()) <= 18 * 2**29
