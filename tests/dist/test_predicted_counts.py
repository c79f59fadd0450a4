"""What plans predict and what steps do: bytes counted at the process group, buffers where they are allocated, on
every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import DistMuon, Muon
from meshmuon.execute import Executor
from tests.support.counting import buffer_bytes, bytes_sent, counted
from tests.support.tensors import seeded
from tests.support.threads import run_threads

WORLD = 4
MATRICES = [(24, 16), (16, 24), (20, 16), (7, 30), (24, 16), (24, 16)]
EXPERTS = [(6, 12, 8), (6, 8, 12)]
BUFFERS = {"shards", "gathered", "results", "sent", "received", "averages"}
LAYOUTS: dict[str, tuple[Sequence[tuple[int, ...]], tuple[int, ...], tuple[Any, ...]]] = {
    "FSDP2": (MATRICES, (4,), (Shard(0),)),
    "HSDP": (MATRICES, (2, 2), (Replicate(), Shard(0))),
    "TP×FSDP": (MATRICES, (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "EP×FSDP": (EXPERTS, (2, 2), (Shard(1), Shard(0))),
    "replicated": (MATRICES, (4,), (Replicate(),)),
}


def weights_of(layout: str) -> list[nn.Parameter]:
    shapes, mesh_shape, placements = LAYOUTS[layout]
    mesh = dist.init_device_mesh("cpu", mesh_shape)  # type: ignore[attr-defined]
    values = [
        distribute_tensor(seeded(shape, k), mesh, placements, src_data_rank=None) for k, shape in enumerate(shapes)
    ]
    return [nn.Parameter(value) for value in values]


def held(optimizer: Muon) -> int:
    assert isinstance(optimizer._executor, Executor)
    flat = optimizer._executor._workspace._flat
    return sum(
        memory.numel() * memory.element_size() for (name, _, _), memory in flat.items() if name.split()[0] in BUFFERS
    )


@pytest.mark.parametrize("nodes", ["", "2", "1,3"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "DistMuon"])
def test_bytes_and_buffers_are_those_of_the_plan(layout: str, nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMUON_RANKS_PER_NODE", nodes)
    averages = layout == "DistMuon"

    def main(rank: int) -> tuple[int, int, int]:
        params = (
            [nn.Parameter(seeded(shape, k)) for k, shape in enumerate(MATRICES)] if averages else weights_of(layout)
        )
        names = [f"layers.{k}.experts.weight" for k in range(len(params))]
        groups = [{"params": params, "names": names, "use_muon": True, "expert_keys": ["experts"]}]
        optimizer = DistMuon(groups) if averages else Muon(groups, replicas="share", memory_budget=4000)
        for _ in range(3):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        plan = optimizer.plan()
        assert held(optimizer) == buffer_bytes(plan, averages=averages)[rank]
        return 3 * bytes_sent(plan, averages=averages)[rank], held(optimizer), len(plan.wave_lanes)

    with counted() as wire:
        results = run_threads(WORLD, main)
    assert [wire.nbytes.get(rank, 0) for rank in range(WORLD)] == [sent for sent, _, _ in results]
    assert any(buffers for _, buffers, _ in results)
    assert all(waves > 0 for _, _, waves in results)
