"""The simulated plan is the plan of a real optimizer: equal digests on torch's fake process group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshmuon import TransportError, get_default_muon_param_groups
from meshmuon.layout import Sharded
from meshmuon.plan import Plan
from meshmuon.tools.predict.machines import Machine
from meshmuon.tools.simulate.description import ModelDescription
from meshmuon.tools.simulate.inputs import load_machine
from meshmuon.tools.simulate.modules import describe_hf
from meshmuon.tools.simulate.sharding import MeshAxes, split_into_stages, tp_placement
from meshmuon.tools.simulate.simulation import MuonOptions, plan_cluster
from tests.support.optional import need
from tests.support.reference import engine_muon

transformers = need("transformers")

DENSE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 40}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
UNEVEN = {"hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "vocab_size": 41}


def config(**changes: Any) -> Any:
    kind = "qwen3_moe" if "num_experts" in changes else "qwen3"
    return transformers.CONFIG_MAPPING[kind](**{**DENSE, **HEADS, **changes})


def real_plan(model: nn.Module, **options: Any) -> Plan:
    """The plan of a step; gradients are zeros."""
    optimizer = engine_muon(get_default_muon_param_groups(model), **options)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with suppress(TransportError):  # the fake group refuses an exchange in which this rank only receives
        optimizer.step()
    return optimizer.plan()


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    """One group for all tests: torch keeps meshes of a group that is gone."""
    dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    yield
    dist.destroy_process_group()


def mesh_of(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape), mesh_dim_names=names)


def nodes_of(ranks: int) -> Machine:
    return replace(load_machine("cpu"), ranks_per_node=ranks)


def simulated(description: ModelDescription, axes: MeshAxes, ranks_per_node: int | None = None, **options: Any) -> Plan:
    (stage,) = plan_cluster(description, axes, MuonOptions(**options), nodes_of(ranks_per_node or 1024))
    return stage.plan


def cut_by_tp(model: nn.Module, description: ModelDescription, mesh: DeviceMesh) -> None:
    """Makes every parameter a DTensor on ``mesh``, as the plan of the description says."""
    styles = {param.name: tp_placement(param, mesh.size()) for param in description.params}
    for name, module in model.named_modules():
        for key, param in list(module.named_parameters(recurse=False)):
            style = styles[f"{name}.{key}" if name else key]
            placement = Shard(style.dim) if isinstance(style, Sharded) else Replicate()
            module.register_parameter(
                key, nn.Parameter(distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None))
            )


def shard_experts(model: nn.Module, mesh: DeviceMesh, dim: int) -> None:
    """Expert parallelism, then FSDP2 along ``dim``."""
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for key, param in list(experts.named_parameters()):
            shard = distribute_tensor(param.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
            experts.register_parameter(key, nn.Parameter(shard))
        names = tuple(name for name in mesh.mesh_dim_names if name != "ep")
        fully_shard(
            experts, mesh=mesh[names] if len(names) > 1 else mesh[names[0]], shard_placement_fn=lambda _: Shard(dim)
        )


def shard_layers(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def build(cfg: Any) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(cfg)


@pytest.mark.parametrize("changes", [{}, UNEVEN, MOE], ids=["even", "uneven", "experts"])
def test_fsdp2(changes: dict[str, Any]) -> None:
    cfg = config(**changes)
    real = real_plan(shard_layers(build(cfg), mesh_of((8,), "fsdp")))
    assert simulated(describe_hf(cfg, "tiny"), MeshAxes.parse("dp_shard=4,cp=2")).digest == real.digest


@pytest.mark.parametrize("replicas", ["share", "repeat", "auto"])
def test_hsdp(replicas: str) -> None:
    cfg = config()
    real = real_plan(shard_layers(build(cfg), mesh_of((2, 4), "dp_replicate", "fsdp")), replicas=replicas)
    assert (
        simulated(describe_hf(cfg, "tiny"), MeshAxes.parse("dp_replicate=2,dp_shard=4"), replicas=replicas).digest
        == real.digest
    )


def test_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMUON_RANKS_PER_NODE", "4")
    cfg = config()
    real = real_plan(shard_layers(build(cfg), mesh_of((2, 8), "dp_replicate", "fsdp")))
    plan = simulated(describe_hf(cfg, "tiny"), MeshAxes.parse("dp_replicate=2,dp_shard=8"), 4)
    assert plan.options.nodes is not None
    assert plan.digest == real.digest
    assert plan.digest != simulated(describe_hf(cfg, "tiny"), MeshAxes.parse("dp_replicate=2,dp_shard=8")).digest


@pytest.mark.parametrize("budget", [1000, 2**20])
def test_tensor_parallel_and_fsdp2(budget: int) -> None:
    cfg, mesh = config(), mesh_of((4, 2), "fsdp", "tp")
    description, model = describe_hf(cfg, "tiny"), build(cfg)
    cut_by_tp(model, description, mesh["tp"])
    real = real_plan(shard_layers(model, mesh["fsdp"]), memory_budget=budget)
    assert simulated(description, MeshAxes.parse("dp_shard=4,tp=2"), memory_budget=budget).digest == real.digest


@pytest.mark.parametrize(
    ("axes", "shape", "names", "dim"),
    [
        ("dp_shard=8,ep=2", (4, 2), ("efsdp", "ep"), 0),  # as many shards as experts: cut along the experts twice
        ("dp_shard=16,ep=4", (4, 4), ("efsdp", "ep"), 1),  # more shards than experts: cut along the rows
        ("dp_replicate=2,dp_shard=8,ep=4", (2, 2, 4), ("dp_replicate", "efsdp", "ep"), 0),
    ],
)
def test_expert_parallel_and_fsdp2(axes: str, shape: tuple[int, ...], names: tuple[str, ...], dim: int) -> None:
    cfg, parsed = config(**MOE), MeshAxes.parse(axes)
    dense = mesh_of(parsed.meshes(0)[0].shape, *("dp_replicate", "fsdp")[-len(parsed.meshes(0)[0].shape) :])
    model = build(cfg)
    shard_experts(model, mesh_of(shape, *names), dim)
    real, plan = real_plan(shard_layers(model, dense)), simulated(describe_hf(cfg, "tiny"), parsed)
    assert {str(param.layouts[0]) for param in plan.params} == {str(param.layouts[0]) for param in real.params}
    assert plan.digest == real.digest


def test_pipeline_stages_plan_alone() -> None:
    """Every layer is in one stage, and a stage's plan is that of a model of these layers on its ranks."""
    cfg = config(num_hidden_layers=6)
    description = describe_hf(cfg, "tiny")
    stages = plan_cluster(description, MeshAxes.parse("pp=3,dp_shard=2"), MuonOptions(), nodes_of(1024))
    assert [stage.plan.ranks for stage in stages] == [(0, 1), (2, 3), (4, 5)]
    names = [param.name for part in split_into_stages(description, 3) for param in part]
    assert sorted(names) == sorted(param.name for param in description.params)
    layers = [
        sorted({param.layer for param in part if param.layer is not None}) for part in split_into_stages(description, 3)
    ]
    assert list(chain.from_iterable(layers)) == list(range(6))
    assert all(stage.plan.params for stage in stages)
