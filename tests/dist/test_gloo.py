"""Real processes over gloo: torch's own wrappers, and the bits of one device on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support import nets
from tests.support.counting import counted
from tests.support.processes import JobRanks, results_of, run_ranks
from tests.support.threads import run_threads

from . import gloo_cases


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobRanks]:
    started = JobRanks(gloo_cases.jobs, tuple(gloo_cases.CASES), tmp_path_factory.mktemp("gloo"))
    yield started
    started.stop()


@pytest.mark.parametrize("name", gloo_cases.CASES)
def test_gloo_processes_equal_one_device(name: str, ranks: JobRanks) -> None:
    ranks.check(name)


@pytest.mark.parametrize("name", gloo_cases.ALONE)
def test_gloo_processes_that_must_not_hang(name: str, tmp_path: Path) -> None:
    results_of(run_ranks(gloo_cases.ALONE[name][0], gloo_cases.run_alone, tmp_path, name))


@pytest.mark.parametrize("replicas", ["share", "repeat"])
def test_hsdp_over_tp_on_eight_ranks(replicas: str) -> None:
    """2×2×2, through parallelize_module and fully_shard; eight processes are too heavy for two cores, so ranks are threads."""

    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))

        def wrap(net: nets.Net) -> None:
            nets.split_by_layer(net, mesh["tp"])
            fully_shard(net, mesh=mesh["replicate", "shard"])

        model, _ = nets.check_module(wrap, (5, 8, 6), wire, replicas=replicas)
        assert model.second.weight.placements == (gloo_cases.R, gloo_cases.S0, gloo_cases.S1)

    with counted() as wire:
        run_threads(8, main)
    assert sum(wire.nbytes.values()) > 0
