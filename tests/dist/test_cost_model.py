"""``cost_model``: owners, waves and ``replicas="auto"`` follow it; ranks that were given different ones raise alike."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshmuon import ConfigError, CostModel, DistMuon, Muon, Plan, PlanMismatchError
from meshmuon.plan import NO_WAVE, cost_model_for
from meshmuon.tools.predict.calibration import LinkRate
from tests.support.tensors import seeded
from tests.support.threads import run_threads
from tests.tools.predict.test_calibration import MEASURED

SLOW_LINK, FAST_LINK = CostModel(1e9, 1e15), CostModel(1.0, 1.0)


def muon_on(mesh: DeviceMesh, **options: Any) -> Muon:
    """Eight sharded and four replicated matrices, with gradients."""
    params = []
    for k in range(12):
        whole, placement = seeded((24, 16), k), Shard(0) if k < 8 else Replicate()
        params.append(nn.Parameter(distribute_tensor(whole, mesh, [placement], src_data_rank=None)))
        params[-1].grad = torch.ones_like(params[-1])
    return Muon([{"params": params, "use_muon": True}], **options)


def plan_of(**options: Any) -> Plan:
    """The plan of rank 0."""

    def main(rank: int) -> Plan:
        optimizer = muon_on(init_device_mesh("cpu", (4,)), **options)
        optimizer.step()
        return optimizer.plan()

    return run_threads(4, main)[0]


def test_plans_follow_the_cost_model() -> None:
    slow, fast = plan_of(cost_model=SLOW_LINK), plan_of(cost_model=FAST_LINK)
    assert {task.param for task in slow.tasks if task.wave == NO_WAVE} == {8, 9, 10, 11}, (
        "sending costs more than computing"
    )
    assert not [task for task in fast.tasks if task.wave == NO_WAVE], "sending costs next to nothing"
    assert len(slow.wave_lanes) == 1, "an exchange costs more than all the work"
    assert len(fast.wave_lanes) > 1, "an exchange costs nothing"
    assert slow.options.cost == SLOW_LINK


def test_without_it_nothing_changes() -> None:
    assert plan_of().digest == plan_of(cost_model=cost_model_for("cpu")).digest
    assert plan_of().digest != plan_of(cost_model=FAST_LINK).digest


def write(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(replace(MEASURED, **changes).to_json()))
    return path


def test_ranks_that_load_different_files_raise_alike(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.json"), write(tmp_path / "b.json", inside=LinkRate(1e6, 1e-2))]

    def main(rank: int) -> tuple[str, bool]:
        optimizer = muon_on(init_device_mesh("cpu", (4,)), cost_model=files[rank == 2])
        params = optimizer.param_groups[0]["params"]
        before = [param.detach().to_local().clone() for param in params]
        with pytest.raises(PlanMismatchError) as caught:
            optimizer.step()
        return str(caught.value), all(map(torch.equal, before, (param.detach().to_local() for param in params)))

    texts, untouched = zip(*run_threads(4, main), strict=True)
    assert all(untouched)
    assert len(set(texts)) == 1
    assert "rank 2 was given cost=CostModel(flops_per_byte=40000.0" in texts[0]
    assert "replicas" not in texts[0], "what is the same on all ranks"


def test_copies_keep_it() -> None:
    def main(rank: int) -> bool:
        optimizer = muon_on(init_device_mesh("cpu", (4,)), cost_model=SLOW_LINK)
        return copy.copy(optimizer).__getstate__()["_cost_model"] == SLOW_LINK

    assert all(run_threads(4, main))


def test_dist_muon_plans_with_it() -> None:
    def main(rank: int) -> int:
        params = [nn.Parameter(seeded((8, 6), k)) for k in range(6)]
        for param in params:
            param.grad = torch.ones_like(param)
        waves = []
        for costs in ({"cost_model": FAST_LINK}, {"cost_model": SLOW_LINK}):
            optimizer = DistMuon(params, group=dist.group.WORLD, none_grad=False, **costs)
            optimizer.step()
            waves.append(len(optimizer.plan().wave_lanes))
        return waves[0] - waves[1]

    assert all(more > 0 for more in run_threads(2, main))


def test_a_missing_file_is_refused_when_the_optimizer_is_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cost_model='.*none.json': it cannot be read"):
        Muon([{"params": [nn.Parameter(torch.ones(2, 3))], "use_muon": True}], cost_model=tmp_path / "none.json")
