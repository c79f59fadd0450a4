"""Exchanges in two hops, on ranks that pretend to be on several nodes: the bits of direct ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshmuon import DistMuon, Muon
from meshmuon.agree.node_view import RANKS_PER_NODE
from tests.support.counting import counted
from tests.support.processes import results_of, run_ranks
from tests.support.reference import engine_muon
from tests.support.tensors import local, seeded
from tests.support.threads import run_threads

SHAPES = ((8, 6), (12, 5), (7, 9), (6, 8), (5, 5), (16, 3))


def sharded(world: int) -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (world,))
    return [nn.Parameter(distribute_tensor(seeded(s, k), mesh, [Shard(k % 2)], src_data_rank=None)) for k, s in enumerate(SHAPES)]


def replicated(world: int) -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (2, world // 2))
    placements = [Replicate(), Shard(0)]
    return [nn.Parameter(distribute_tensor(seeded(s, k), mesh, placements, src_data_rank=None)) for k, s in enumerate(SHAPES)]


def trained(params: list[nn.Parameter], optimizer: Muon) -> tuple[list[Tensor], Any]:
    for step in range(3):
        for k, param in enumerate(params):
            grad = seeded(tuple(param.shape), 100 * step + k)
            if hasattr(param, "placements"):
                grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
            param.grad = grad
        optimizer.step()
    return [local(param) for param in params], optimizer.plan()


def muon(world: int, make: Callable[[int], list[nn.Parameter]], **options: Any) -> tuple[list[Tensor], Any]:
    params = make(world)
    names = [f"layers.{k}.weight" for k in range(len(params))]
    groups = [{"params": params, "names": names, "use_muon": True}]
    return trained(params, engine_muon(groups, lr=0.01, none_grad=False, **options))


CASES = {
    "shards": (sharded, {"chunk_size": 2}),
    "replicas share": (replicated, {"replicas": "share", "chunk_size": 1, "waves_ahead": 1}),
    "rule state": (sharded, {"rule": "normuon"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("world", "per_node"), [(4, "2"), (8, "2"), (6, "1,2,3")])
def test_the_bits_of_direct_exchanges(case: str, world: int, per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = CASES[case]
    monkeypatch.setenv(RANKS_PER_NODE, per_node)
    direct = run_threads(world, lambda rank: muon(world, make, **options))
    with counted() as wire:
        relayed = run_threads(world, lambda rank: muon(world, make, max_peers=1, **options))
    for (expected, plan), (found, relayed_plan) in zip(direct, relayed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert plan.options.max_peers is None
        assert relayed_plan.options.max_peers == 1
    plan = relayed[0][1]
    extra = plan.bytes_relayed
    if case != "rule state":  # whose numbers the plan does not count
        assert wire.nbytes == {rank: 3 * (plan.bytes_sent[rank] + extra[rank]) for rank in range(world)}
    assert sum(extra.values()) > 0


def test_dist_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_PER_NODE, "2")

    def main(rank: int, **options: Any) -> list[Tensor]:
        params = [nn.Parameter(seeded(shape, k)) for k, shape in enumerate(SHAPES)]
        return trained(params, engine_muon(params, DistMuon, **options))[0]

    direct = run_threads(4, main)
    relayed = run_threads(4, lambda rank: main(rank, max_peers=1))
    for expected, found in zip(direct, relayed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def gloo_rank(rank: int, folder: Path) -> bool:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(RANKS_PER_NODE, "2")
        expected, _ = muon(4, sharded, chunk_size=2)
        found, plan = muon(4, sharded, chunk_size=2, max_peers=1)
        dist.barrier()
        return plan.options.max_peers == 1 and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_gloo_processes(tmp_path: Path) -> None:
    assert results_of(run_ranks(4, gloo_rank, tmp_path)) == [True] * 4
