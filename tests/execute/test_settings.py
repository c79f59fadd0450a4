"""The executor's options, and who replays what where."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from meshmuon import ConfigError
from meshmuon.device import CudaReplay, replay_for
from meshmuon.execute import DEFAULT_MEMORY_BUDGET, ExecutorSettings


def test_defaults() -> None:
    assert dataclasses.asdict(ExecutorSettings()) == {
        "chunk_size": -1,
        "memory_budget": 64 * 2**20,
        "form": "auto",
        "deterministic": False,
        "compile": False,
        "cuda_graphs": False,
        "kernels": "auto",
    }
    assert DEFAULT_MEMORY_BUDGET == 64 * 2**20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"chunk_size": -5}, "chunk_size=-5"),
        ({"memory_budget": 0}, "memory_budget=0"),
        ({"memory_budget": -1}, "memory_budget=-1"),
        ({"form": "fast"}, "form='fast' is unknown"),
        ({"compile": "inductor", "cuda_graphs": True}, "exclude each other"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExecutorSettings(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_size": 1},
        {"chunk_size": -1, "memory_budget": 1},
        {"form": "gram"},
        {"compile": True},
        {"cuda_graphs": True, "deterministic": True},
    ],
    ids=str,
)
def test_accepted(options: dict[str, Any]) -> None:
    settings = ExecutorSettings(**options)
    assert all(getattr(settings, key) == value for key, value in options.items())


def test_replaying_on_cpu_is_calling() -> None:
    calls: list[int] = []
    for graphs in (False, True):
        replay = replay_for(torch.device("cpu"), lambda: calls.append(1), graphs=graphs)
        replay()
        replay()
    assert len(calls) == 4


def test_graphs_are_for_cuda_and_only_if_asked() -> None:
    device = torch.device("cuda", 0)
    assert isinstance(replay_for(device, lambda: None, graphs=True), CudaReplay)
    assert not isinstance(replay_for(device, lambda: None, graphs=False), CudaReplay)
