"""Lightning and Fabric with Muon: single process, DDP and FSDP2 in real gloo processes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from meshmuon import ConfigError, Muon, get_default_muon_param_groups

from ..support.optional import need
from ..support.processes import JobRanks, job_ranks

need("lightning")

from lightning.pytorch.loggers.logger import DummyLogger

from meshmuon.integrations.lightning import MuonMonitor, metrics_of

from .lightning_cases import Module, fit, jobs

CASES = list(jobs())


ranks = job_ranks(jobs, CASES)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("example")])
def test_equal_to_a_plain_loop(ranks: JobRanks, case: str) -> None:
    ranks.check(case)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("example")])
def test_example_runs(ranks: JobRanks, case: str) -> None:
    ranks.check(case)


def test_metrics_of_several_groups() -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    groups = [
        {**group, "names": [f"{k}.{name}" for name in group["names"]]}
        for k in (0, 1)
        for group in get_default_muon_param_groups(model[k])
    ]
    optimizer = Muon([{**group, "lr": 10.0 ** -(2 + k)} for k, group in enumerate(groups)], nonfinite="skip")
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.nan)
    optimizer.step()
    assert metrics_of(optimizer) == {
        "muon/lr": 1e-2,
        "muon/lr_adamw": 1e-3,
        "muon/lr/2": 1e-4,
        "muon/lr_adamw/2": 1e-5,
        "muon/skipped_steps": 1.0,
    }


class WithoutMuon(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_monitor_without_muon_is_refused() -> None:
    with pytest.raises(ConfigError, match="finds no Muon to monitor: configure_optimizers returned SGD"):
        fit(WithoutMuon("single"), callbacks=[MuonMonitor()])


@pytest.mark.parametrize("every", [0, -1, 1.5, "2"])
def test_a_monitor_that_never_logs_is_refused(every: object) -> None:
    with pytest.raises(ConfigError, match="every_n_steps="):
        MuonMonitor(every_n_steps=every)  # type: ignore[arg-type]


def test_the_monitor_logs_every_n_steps() -> None:
    with mock.patch.object(DummyLogger, "log_metrics") as logged:
        fit(Module("single"), logger=DummyLogger(), callbacks=[MuonMonitor(every_n_steps=4)])
    assert [call.kwargs["step"] for call in logged.call_args_list if call.args and "muon/lr" in call.args[0]] == [3, 7]
