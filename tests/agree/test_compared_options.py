"""Which options ranks compare: what the table says of each option is what happens when one rank has another value."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshmuon import CostModel, Muon, PlanMismatchError
from meshmuon.params.option_table import OPTIONS, Compared
from tests.support.threads import run_threads

LR = 0.01  # usual for every rule of learning rates, so that none warns

# Of each option, a value other than its default.
OTHER: dict[str, Any] = {
    "lr": 2e-3,
    "momentum": 0.9,
    "nesterov": False,
    "ns_steps": 3,
    "weight_decay": 0.2,
    "adamw_betas": (0.9, 0.99),
    "adamw_eps": 1e-7,
    "none_grad": False,
    "debug": True,
    "clip_config": {"head_dim": 2, "threshold": 100},
    "warmup_step": 0,
    "chunk_size": 1,
    "use_distributed_muon": True,
    "expert_keys": ["one"],
    "scheme": "keller",
    "adjust_lr_fn": "spectral",
    "maximize": True,
    "conv": "flatten",
    "split": 2,
    "matrices": {"one": {"dims": "in_out"}},
    "compute_dtype": torch.float64,
    "momentum_dtype": torch.float64,
    "memory_budget": 1000,
    "deterministic": True,
    "cuda_graphs": True,
    "comm_dtype": torch.bfloat16,
    "replicas": "repeat",
    "nonfinite": "skip",
    "rule": "normuon",
    "cautious_weight_decay": True,
    "rounding": "stochastic",
    "cost_model": CostModel(1.0, 1.0),
    "metrics": 3,
    "allow_inactive": True,
}
NOT_HERE = {
    "adamw_lr",  # ranks compare the lr of each group, into which it is written
    "replica_group",  # of plain tensors only: see test_cases.py
    "conv",  # of convolution filters only
}
EXPERTS: dict[str, dict[str, Any]] = {  # what all ranks are given beside it, so that there are experts
    "expert_keys": {"conv": "flatten"},
}


def test_every_option_is_here() -> None:
    assert {option.name for option in OPTIONS} == {*OTHER, *NOT_HERE}


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.name not in NOT_HERE], ids=lambda o: o.name)
def test_one_rank_has_another_value(option: Any) -> None:
    on_all_ranks = EXPERTS.get(option.name, {})
    shapes = {"one": (4, 6, 4), "two": (2, 4, 8)} if on_all_ranks else {"one": (8, 4), "two": (6, 6)}
    routes = {"one": True, "two": option.name not in ("adamw_betas", "adamw_eps")}

    def main(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        groups = []
        for name, shape in shapes.items():
            ones = torch.ones(shape, dtype=torch.bfloat16 if option.name == "rounding" else torch.float32)
            param = nn.Parameter(distribute_tensor(ones, mesh, [Shard(1)], src_data_rank=None))
            param.grad = torch.ones_like(param)
            groups.append({"params": [param], "names": [name], "use_muon": routes[name]})
        on_this_rank = {option.name: OTHER[option.name]} if rank == 1 else {}
        optimizer = Muon(groups, **{"lr": LR, **on_all_ranks, **on_this_rank})
        try:
            optimizer.step()
        except PlanMismatchError as error:
            return str(error)
        return ""

    first, second = run_threads(2, main)
    assert first == second
    assert bool(first) is (option.compared is not Compared.NEVER), first
    assert not first or "rank 1" in first


def test_one_rank_has_other_kernels_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    built = threading.Barrier(2)

    def main(rank: int) -> str:
        param = nn.Parameter(distribute_tensor(torch.ones(8, 4), init_device_mesh("cpu", (2,)), [Shard(1)]))
        param.grad = torch.ones_like(param)
        if rank == 1:
            built.wait(60)
            monkeypatch.setenv("MESHMUON_KERNELS", "torch")
        optimizer = Muon([{"params": [param], "names": ["one"], "use_muon": True}], lr=LR)
        if rank == 0:
            built.wait(60)
        with pytest.raises(PlanMismatchError) as refusal:
            optimizer.step()
        return str(refusal.value)

    first, second = run_threads(2, main)
    assert first == second
    assert "kernels='torch'" in first
