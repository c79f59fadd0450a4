"""Fused weights whose parts take turns: the update is that of separate parameters, bit for bit, on every layout."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import DistMuon, Interleaved, Muon
from tests.support.cases import Case, Param, check, single
from tests.support.clear_cuts import clearly_cut
from tests.support.random_layouts import Layouts, cases, splits
from tests.support.tensors import same, seeded
from tests.support.threads import run_threads

STEPS = 3
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)

# Shape, split and the dim that it cuts.
FUSED: dict[str, tuple[tuple[int, ...], Interleaved, int]] = {
    "gate and up by rows": ((14, 5), Interleaved((1, 1), 7), 0),
    "heads": ((24, 6), Interleaved((2, 2, 2), 4), 0),
    "groups of heads": ((30, 4), Interleaved((6, 2, 2), 3), 0),
    "experts": ((3, 15, 4), Interleaved((2, 3), 3), 1),
    "experts as (E, in, out)": ((3, 5, 14), Interleaved((1, 1), 7), 2),
    "blocks of experts as (E, in, out)": ((4, 3, 18), Interleaved((2, 4), 3), 2),
    "filters": ((12, 2, 3, 3), Interleaved((1, 3), 3), 0),
    "one copy": ((9, 5), Interleaved((4, 5), 1), 0),
    "one part": ((9, 5), Interleaved((3,), 3), 0),
}
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = {
    "FSDP2": ((2,), (S0,), {}),
    "5 ranks": ((5,), (S0,), {}),
    "more ranks than rows": ((16,), (S0,), {"chunk_size": 1}),
    "second dim": ((3,), (S1,), {}),
    "last dim": ((4,), (Shard(-1),), {}),
    "replicated, shared": ((2,), (R,), {"replicas": "share"}),
    "HSDP": ((2, 2), (R, S0), {"replicas": "repeat"}),
    "TP × FSDP2": ((2, 2), (_StridedShard(0, split_factor=2), S0), {}),
    "strided second dim": ((2, 2), (_StridedShard(1, split_factor=2), S1), {}),
    "two dims": ((2, 3), (S0, S1), {"warmup_step": 0}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normuon": {"rule": "normuon"},
    "cautious, without nesterov": {"cautious_weight_decay": True, "nesterov": False},
}


def part_views(whole: Tensor, split: Interleaved, dim: int) -> list[Tensor]:
    """The parts as views (…, copies, size of the block, …), by torch alone."""
    copies = whole.unflatten(dim, (split.repeats, sum(split.sizes)))
    return list(copies.split(list(split.sizes), dim + 1))


def options_of(dim: int, **more: Any) -> dict[str, Any]:
    dims = "in_out" if dim == 2 else "out_in"
    return {"lr": 0.01, "expert_keys": ["experts"], "conv": "flatten", "expert_dims": dims, **more}


def train(optimizer: Muon, params: list[Tensor], gradients: Any, steps: range = range(STEPS)) -> None:
    for step in steps:
        for param, gradient in zip(params, gradients(step), strict=True):
            param.grad = gradient
        optimizer.step()


def as_separate_parameters(
    shape: tuple[int, ...], split: Interleaved, dim: int, dtype: torch.dtype = torch.float32, **options: Any
) -> Tensor:
    """The whole weight after training, put together from parts that are parameters of their own."""

    def parts(seed: int) -> list[Tensor]:
        return [part.flatten(dim, dim + 1).clone() for part in part_views(seeded(shape, seed).to(dtype), split, dim)]

    params: list[Tensor] = [nn.Parameter(part) for part in parts(0)]
    group = {"params": params, "names": [f"experts.{k}" for k in range(len(params))], "use_muon": True}
    train(Muon([group], **options_of(dim, **options)), params, lambda step: parts(step + 1))
    whole = torch.zeros(shape, dtype=dtype)
    for view, param in zip(part_views(whole, split, dim), params, strict=True):
        view.copy_(param.detach().view(view.shape))
    return whole


def as_one_parameter(
    shape: tuple[int, ...], split: Any, dim: int, place: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Tensor, Muon]:
    param = nn.Parameter(place(seeded(shape, 0).to(dtype)))
    group = {"params": [param], "names": ["experts.fused"], "use_muon": True, "split": split}
    optimizer = Muon([group], **options_of(dim, **options))
    train(optimizer, [param], lambda step: [place(seeded(shape, step + 1).to(dtype))])
    return param.detach(), optimizer


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_on_one_device(name: str, dtype: torch.dtype, how: str) -> None:
    shape, split, dim = FUSED[name]
    expected = as_separate_parameters(shape, split, dim, dtype, **OPTIONS[how])
    found, optimizer = as_one_parameter(shape, split, dim, torch.clone, dtype, **OPTIONS[how])
    same(found, expected, name)
    rows = optimizer.routing_table().rows
    assert rows[0].matrices == len(split.sizes) * (shape[0] if len(shape) == 3 else 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUSED)
def test_on_a_mesh(name: str, layout: str) -> None:
    shape, split, dim = FUSED[name]
    grid, placements, options = LAYOUTS[layout]
    options = {**options, **OPTIONS["normuon"]}
    expected = as_separate_parameters(shape, split, dim, **OPTIONS["normuon"])
    fixed = [Shard(len(shape) - 1) if place == Shard(-1) else place for place in placements]

    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", grid)

        def place(value: Tensor) -> Tensor:
            return distribute_tensor(value.clone(), mesh, clearly_cut(value.shape, grid, tuple(fixed)), src_data_rank=None)

        found, _ = as_one_parameter(shape, split, dim, place, **options)
        same(found.to_local(), place(expected).to_local(), name)

    run_threads(math.prod(grid), main)


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("name", FUSED)
def test_the_reference_path_on_one_device(name: str, how: str) -> None:
    shape, split, dim = FUSED[name]
    found, _ = as_one_parameter(shape, split, dim, torch.clone, use_distributed_muon=True, **OPTIONS[how])
    same(found, as_separate_parameters(shape, split, dim, **OPTIONS[how]), name)


INTERLEAVED = [
    Param((14, 5), 0, (S0,), split=Interleaved((1, 1), 7)),
    Param((24, 6), 0, (S0,), split=Interleaved((2, 3, 1), 4), unused=(1,)),
    Param((30, 4), 0, (S1,), split=Interleaved((6, 2, 2), 3)),
    Param((4, 5, 12), 0, (S1,), split=Interleaved((1, 1), 6), flipped=True),
    Param((4, 3, 18), 0, (S2,), split=Interleaved((2, 4), 3), flipped=True),
    Param((3, 15, 4), 0, (S1,), split=Interleaved((2, 3), 3), unused=(0, 2)),
    Param((9, 4), 0, (R,), split=Interleaved((2, 1), 3)),
    Param((12, 4), None, split=Interleaved((2, 1), 4)),
]


def run_case(case: Case, layouts: Layouts, **options: Any) -> None:
    expected = single(case)
    run_threads(layouts.world, lambda rank: check(case, layouts.build(), expected, **options))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 1, "rule": "normuon"}, {"use_distributed_muon": True}], ids=str)
def test_bfloat16_weights_and_gradients_that_come_and_go(rounding: str, options: dict[str, Any]) -> None:
    params = tuple(replace(param, dtype=torch.bfloat16) for param in INTERLEAVED)
    run_case(Case(params, {"rounding": rounding, **options}), Layouts((4,)))


@settings(max_examples=15, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(cases(), st.data())
def test_random_layouts_with_a_rule_that_remembers(drawn: tuple[Case, Layouts, bool], data: Any) -> None:
    """Every matrix that Muon has is interleaved, where its outputs allow it."""
    case, layouts, replica_group = drawn

    def interleaved(param: Param) -> Param:
        outputs = param.shape[-1] if param.flipped else param.shape[-2]
        return replace(param, split=data.draw(splits(outputs)))

    params = tuple(interleaved(param) if param.muon else param for param in case.params)
    options = {"replica_group": dist.group.WORLD} if replica_group else {}
    run_case(replace(case, params=params, options={**case.options, "rule": "normuon"}), layouts, **options)


@settings(max_examples=40)
@given(st.data())
def test_random_splits_equal_separate_parameters(data: Any) -> None:
    flipped, experts = data.draw(st.booleans()), data.draw(st.booleans())
    sizes = st.integers(1, 20)
    shape = (
        (data.draw(st.integers(1, 3)), data.draw(sizes), data.draw(sizes)) if experts else (data.draw(sizes), data.draw(sizes))
    )
    dim = 2 if experts and flipped else len(shape) - 2
    drawn = data.draw(splits(shape[dim]))
    split = drawn if isinstance(drawn, Interleaved) else Interleaved(drawn, 1)
    found, _ = as_one_parameter(shape, split, dim, torch.clone, rule="normuon")
    same(found, as_separate_parameters(shape, split, dim, rule="normuon"), str((shape, split)))


@pytest.mark.parametrize("name", FUSED)
def test_dist_muon_averages_and_consolidates(name: str) -> None:
    """Gradients that are equal on all ranks: the result is that of one process, and so is the consolidated state."""
    shape, split, dim = FUSED[name]

    def build() -> tuple[nn.Parameter, DistMuon]:
        param = nn.Parameter(seeded(shape, 0))
        group = {"params": [param], "names": ["experts.fused"], "use_muon": True, "split": split}
        return param, DistMuon([group], **options_of(dim, rule="normuon"))

    def main(rank: int) -> dict[str, Tensor]:
        param, optimizer = build()
        train(optimizer, [param], lambda step: [seeded(shape, step + 1)])
        optimizer.consolidate()
        return {"param": param.detach(), **optimizer.state_dict()["state"][0]}

    alone, optimizer = build()
    train(optimizer, [alone], lambda step: [seeded(shape, step + 1)])
    expected = {"param": alone.detach(), **optimizer.state_dict()["state"][0]}
    for found in run_threads(4, main):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if isinstance(value, Tensor):
                same(found[key], value, key)


def test_a_checkpoint_is_plain_data_and_the_next_steps_are_the_same() -> None:
    shape, split, dim = FUSED["experts as (E, in, out)"]
    expected, _ = as_one_parameter(shape, split, dim, torch.clone, rule="normuon")

    def build() -> tuple[nn.Parameter, Muon]:
        param = nn.Parameter(seeded(shape, 0))
        group = {"params": [param], "names": ["experts.fused"], "use_muon": True, "split": split}
        return param, Muon([group], **options_of(dim, rule="normuon"))

    param, optimizer = build()
    train(optimizer, [param], lambda step: [seeded(shape, step + 1)], range(1))
    file = io.BytesIO()
    torch.save({"param": param.detach(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    resumed, other = build()
    resumed.data.copy_(loaded["param"])
    other.load_state_dict(loaded["optimizer"])
    assert other.param_groups[0]["split"] == ((1, 1), 7)
    other.param_groups[0]["split"] = split
    assert other.state_dict()["param_groups"][0]["split"] == ((1, 1), 7)
    train(other, [resumed], lambda step: [seeded(shape, step + 1)], range(1, STEPS))
    same(resumed.detach(), expected, "resumed")
