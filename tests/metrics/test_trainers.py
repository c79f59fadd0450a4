"""Measurements reach the logs of trainers: the callback of Transformers and the container of torchtitan, without a
training.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshmuon import Muon
from meshmuon.metrics import flat


def trained(metrics: int | None) -> Muon:
    weight = nn.Parameter(torch.randn(6, 4))
    optimizer = Muon([{"params": [weight], "names": ["layers.0.w"], "use_muon": True}], metrics=metrics)
    weight.grad = torch.randn(6, 4)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("wrapped", [False, True])
def test_callback_of_transformers(wrapped: bool) -> None:
    hf: Any = pytest.importorskip("meshmuon.integrations.hf")
    optimizer = trained(1)
    logs: dict[str, Any] = {"loss": 1.0}
    state = SimpleNamespace(log_history=[{"step": 1}], is_world_process_zero=True)
    given = SimpleNamespace(optimizer=optimizer) if wrapped else optimizer
    hf.MuonMetrics().on_log(None, state, None, logs=logs, optimizer=given)
    assert logs == {"loss": 1.0, **flat(optimizer.metrics())}
    assert state.log_history[-1]["muon/group/0/lr"] == logs["muon/group/0/lr"]


def test_callback_of_transformers_leaves_others_alone() -> None:
    hf: Any = pytest.importorskip("meshmuon.integrations.hf")
    for optimizer in (trained(None), torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1), None):
        logs: dict[str, Any] = {"loss": 1.0}
        hf.MuonMetrics().on_log(None, SimpleNamespace(log_history=[]), None, logs=logs, optimizer=optimizer)
        assert logs == {"loss": 1.0}


def test_container_of_torchtitan() -> None:
    titan: Any = pytest.importorskip("meshmuon.integrations.torchtitan")
    optimizer = trained(1)
    metrics = titan.MuonContainer.metrics
    assert metrics(SimpleNamespace(optimizers=[optimizer, trained(None)])) == flat(optimizer.metrics())
    parts = metrics(SimpleNamespace(optimizers=[optimizer, trained(1)]))
    assert parts["muon/part 0/group/0/lr"] == optimizer.metrics()["groups"]["0"]["lr"]


def test_monitor_of_lightning() -> None:
    lightning: Any = pytest.importorskip("meshmuon.integrations.lightning")
    optimizer, logged = trained(1), list[dict[str, float]]()
    logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.append(metrics))
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=1, loggers=[logger])
    lightning.MuonMonitor().on_before_optimizer_step(trainer, None, optimizer)
    assert logged[0].items() >= flat(optimizer.metrics()).items() - {("muon/skipped_steps", 0.0)}
    assert logged[0]["muon/lr"] == 1e-3
