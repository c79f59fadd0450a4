"""torch.compile around a step: the step itself is not traced, and its results are those of eager code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.optim.lr_scheduler import CosineAnnealingLR

from meshmuon import Muon, clip_grad_norm_, get_default_muon_param_groups
from tests.support.reference import assert_same_bits

STEPS = 4


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def train(run: Callable[[nn.Module, Muon, Tensor], None], **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = Muon(get_default_muon_param_groups(model), lr=0.005, **options)
    scheduler = CosineAnnealingLR(optimizer, 10)
    for _ in range(STEPS):
        run(model, optimizer, torch.randn(4, 8))
        scheduler.step()
    return [param.detach() for param in model.parameters()]


def iteration(model: nn.Module, optimizer: Muon, batch: Tensor) -> None:
    model(batch).square().mean().backward()
    clip_grad_norm_(optimizer, 0.5)
    optimizer.step()
    optimizer.zero_grad()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of dynamo, but for the one that it does not record profiler ranges, which every optimizer's step has."""
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [text for text in texts if "Profiler" not in text]


@pytest.mark.filterwarnings("error")
def test_a_compiled_step(caplog: pytest.LogCaptureFixture) -> None:
    graphs = CompileCounter()
    compiled: dict[int, Any] = {}

    def with_compiled_step(model: nn.Module, optimizer: Muon, batch: Tensor) -> None:
        model(batch).square().mean().backward()
        clip_grad_norm_(optimizer, 0.5)
        compiled.setdefault(id(optimizer), torch.compile(optimizer.step, backend=graphs))()
        optimizer.zero_grad()

    assert_same_bits(train(with_compiled_step), train(iteration))
    assert graphs.frame_count == graphs.op_count == 0  # nothing of it was traced
    assert sum(counters["graph_break"].values()) <= 8
    assert not warned(caplog)


@pytest.mark.filterwarnings("error")
def test_a_compiled_iteration(caplog: pytest.LogCaptureFixture) -> None:
    graphs = CompileCounter()
    compiled = torch.compile(iteration, backend=graphs)
    results, model_alone = train(compiled), CompileCounter()
    breaks = sum(counters["graph_break"].values())

    def forward_compiled(model: nn.Module, optimizer: Muon, batch: Tensor) -> None:
        loss = torch.compile(lambda model, batch: model(batch).square().mean(), backend=model_alone)(model, batch)
        loss.backward()
        clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    assert_same_bits(results, train(forward_compiled))
    assert_same_bits(results, train(iteration))
    assert graphs.op_count <= model_alone.op_count  # the model's own graph, and nothing of the optimizer
    assert breaks <= 12  # as many for any number of steps
    assert not warned(caplog)
