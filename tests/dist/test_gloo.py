"""Real processes over gloo: torch's own wrappers, and the bits of one device on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from . import workers
from .counting import counted
from .threads import run_threads


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return workers.run_all(tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", workers.JOBS)
def test_gloo_processes_equal_one_device(name: str, outcomes: list[dict[str, str]]) -> None:
    said = {rank: outcomes[rank][name] for rank in range(workers.JOBS[name].world)}
    assert not any(said.values()), "\n".join(f"rank {rank}: {text}" for rank, text in said.items() if text)


@pytest.mark.parametrize("name", workers.ALONE)
def test_gloo_processes_that_must_not_hang(name: str, tmp_path: Path) -> None:
    said = workers.run_alone(name, tmp_path, seconds=20)
    assert not any(said), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)


@pytest.mark.parametrize("replicas", ["share", "repeat"])
def test_hsdp_over_tp_on_eight_ranks(replicas: str) -> None:
    """2×2×2, through parallelize_module and fully_shard; eight processes are too heavy for two cores, so ranks are threads."""
    torch.set_num_threads(1)

    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))

        def wrap(net: workers.Net) -> None:
            workers.split_by_layer(net, mesh["tp"])
            fully_shard(net, mesh=mesh["replicate", "shard"])

        model, _ = workers.check_module(wrap, (5, 8, 6), wire, replicas=replicas)
        assert model.second.weight.placements == (workers.R, workers.S0, workers.S1)

    with counted() as wire:
        run_threads(8, main)
    assert sum(wire.nbytes.values()) > 0
