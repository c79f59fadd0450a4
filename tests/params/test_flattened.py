"""Weights that a wrapper has flattened are refused by name, with the way to go on; nothing is handed to AdamW
instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshmuon import ConfigError, DistMuon, MeshmuonError, Muon, UnsupportedError, get_default_muon_param_groups
from tests.support.reference import LR, group, make_params

FSDP2 = r"FSDP2.*fully_shard"


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


def fsdp1(**options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model(), device_id=torch.device("cpu"), **options)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_fsdp1(world: None, use_orig_params: bool, inside: bool) -> None:
    wrapped: nn.Module = fsdp1(use_orig_params=use_orig_params)
    if inside:
        wrapped = nn.Sequential(nn.Linear(6, 6), wrapped)
    with pytest.raises(UnsupportedError, match=rf"FSDP1 .*FullyShardedDataParallel\).*{FSDP2}"):
        get_default_muon_param_groups(wrapped)


def test_fsdp1s_flat_parameter_in_a_group(world: None) -> None:
    (param,) = fsdp1().parameters()
    with pytest.raises(UnsupportedError, match=rf"flat has shape .*FSDP1.*{FSDP2}"):
        Muon([{"params": [param], "names": ["flat"], "use_muon": True}])


def test_fsdp1_that_shards_nothing_keeps_its_matrices(world: None) -> None:
    wrapped = fsdp1(use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)
    assert sum(len(one["params"]) for one in get_default_muon_param_groups(wrapped)) == 4


def test_zero_3() -> None:
    """Its parameters are empty until a forward pass gathers them, and bear DeepSpeed's marks."""
    partitioned = model()
    for k, param in enumerate(partitioned.parameters()):
        param.ds_shape, param.ds_id = param.shape, k  # type: ignore[attr-defined]
        param.data = torch.empty(0)
    with pytest.raises(UnsupportedError, match=rf"0\.weight has shape \(0,\): DeepSpeed ZeRO-3 .*{FSDP2}"):
        get_default_muon_param_groups(partitioned)
    with pytest.raises(UnsupportedError, match=rf"DeepSpeed ZeRO-3 .*{FSDP2}"):
        Muon([group(list(partitioned.parameters()))])


class FlatParameter(nn.Parameter):
    """As fairscale has one."""


@pytest.mark.parametrize("kind", [FlatParameter, nn.Parameter])
def test_fairscale(kind: Any) -> None:
    flat = nn.Module()
    flat.register_parameter("flat_param_0", kind(torch.zeros(48)))
    with pytest.raises(UnsupportedError, match=rf"flat_param_0 has shape \(48,\): .*fairscale.*{FSDP2}"):
        get_default_muon_param_groups(flat)


def test_layers_whose_weight_is_flat() -> None:
    """Whoever did it: a Linear without rows and columns was not built so, and a user's function does not hide it."""
    flat = model()
    flat[2].weight = nn.Parameter(flat[2].weight.detach().flatten())
    for decide in (None, lambda name, param: True):
        with pytest.raises(UnsupportedError, match=rf"2\.weight of a Linear has shape \(48,\): .*{FSDP2}"):
            get_default_muon_param_groups(flat, decide)
    flat[2].weight.requires_grad_(False)  # a frozen one, quantised for example, is nobody's to train
    get_default_muon_param_groups(flat)


@pytest.mark.parametrize("kind", [Muon, DistMuon])
@pytest.mark.parametrize("count", [1, 2])
def test_zero_1_and_2_replace_the_parameters_later(count: int, kind: type[Muon]) -> None:
    """DeepSpeed puts one flat buffer into each group of an optimizer that it is given."""
    params = make_params(*[(6, 8)] * count)
    optimizer = kind([group(params)], lr=LR)
    flat = nn.Parameter(torch.cat([param.detach().flatten() for param in params]))
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones_like(flat)
    before: Tensor = flat.detach().clone()
    with pytest.raises(MeshmuonError, match=rf"ZeRO.*{FSDP2}"):
        optimizer.step()
    assert torch.equal(flat, before)


@pytest.mark.parametrize("route", ["default", "is_muon_func"])
def test_a_model_of_flat_weights_without_any_mark(route: str) -> None:
    """Neither way of routing sends it to Muon, and AdamW does not train it silently."""
    flat = nn.Module()
    flat.register_parameter("weights", nn.Parameter(torch.zeros(48)))
    chosen = {"is_muon_func": lambda name, param: True} if route == "is_muon_func" else {}
    optimizer = Muon(get_default_muon_param_groups(flat, **chosen), lr=LR)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(48)
    with pytest.raises(ConfigError, match=rf"no matrix for Muon.*flattened.*DeepSpeed ZeRO.*{FSDP2}"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Muon was given names and parameters without the model")
def test_traced_stages_of_pipelines_are_routed_by_names_only() -> None:
    traced = torch.export.unflatten(torch.export.export(nn.Sequential(model()), (torch.ones(2, 6),)))
    with pytest.raises(
        UnsupportedError, match=r"was traced by torch\.export.* Write Muon\(stage\.named_parameters\(\), lr"
    ):
        Muon(traced)
    assert Muon(traced.named_parameters(), lr=LR).routing_table().rows
