"""Fused weights: a parameter that is split equals its parts as parameters of their own, on every layout, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import ConfigError, Muon, RoutingWarning
from tests.support.clear_cuts import clearly_cut
from tests.support.tensors import same, seeded
from tests.support.threads import run_threads

STEPS = 3
R, S0, S1 = Replicate(), Shard(0), Shard(1)

# Shape, split, the dim that it cuts, and the sizes of the parts. None of the cuts is where a mesh below cuts the rows.
FUSED = {
    "qkv": ((18, 6), (8, 4, 6), 0, (8, 4, 6)),
    "heads": ((16, 5), 4, 0, (4,) * 4),
    "gate and up of experts": ((3, 10, 7), (3, 7), 1, (3, 7)),
    "experts as (E, in, out)": ((4, 6, 12), (5, 7), 2, (5, 7)),
    "by a function": ((14, 5), lambda name, shape: [5, 9], 0, (5, 9)),
}
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = {
    "FSDP2": ((2,), (S0,), {}),
    "FSDP2, 3 ranks": ((3,), (S0,), {}),
    "TP by columns": ((2,), (S1,), {}),
    "replicated, shared": ((2,), (R,), {"replicas": "share"}),
    "HSDP": ((2, 2), (R, S0), {"chunk_size": 1}),
    "TP × FSDP2": ((2, 2), (_StridedShard(0, split_factor=2), S0), {}),
    "TP by columns × FSDP2": ((2, 2), (S0, S1), {"warmup_step": 0}),
}


def options_of(dim: int, **more: Any) -> dict[str, Any]:
    return {"lr": 0.01, "expert_keys": ["experts"], "expert_dims": "in_out" if dim == 2 else "out_in", **more}


def as_separate_parameters(shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> Tensor:
    parts = [nn.Parameter(part.clone()) for part in seeded(shape, 0).split(list(sizes), dim)]
    names = [f"experts.{k}" for k in range(len(parts))]
    optimizer = Muon([{"params": parts, "names": names, "use_muon": True}], **options_of(dim))
    for step in range(STEPS):
        for part, grad in zip(parts, seeded(shape, step + 1).split(list(sizes), dim), strict=True):
            part.grad = grad.clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts], dim)


def as_one_parameter(shape: tuple[int, ...], split: Any, dim: int, place: Any, **options: Any) -> tuple[Tensor, Muon]:
    param = nn.Parameter(place(seeded(shape, 0)))
    group = {"params": [param], "names": ["experts.fused"], "use_muon": True, "split": split}
    optimizer = Muon([group], **options_of(dim, **options))
    for step in range(STEPS):
        param.grad = place(seeded(shape, step + 1))
        optimizer.step()
        assert param.grad is None
    return param.detach(), optimizer


@pytest.mark.parametrize("name", FUSED)
def test_on_one_device(name: str) -> None:
    shape, split, dim, sizes = FUSED[name]
    expected = as_separate_parameters(shape, dim, sizes)
    found, optimizer = as_one_parameter(shape, split, dim, torch.clone)
    same(found, expected, name)
    assert optimizer.routing_table().rows[0].matrices == len(sizes) * (shape[0] if len(shape) == 3 else 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUSED)
def test_on_a_mesh(name: str, layout: str) -> None:
    shape, split, dim, sizes = FUSED[name]
    grid, placements, options = LAYOUTS[layout]
    expected = as_separate_parameters(shape, dim, sizes)

    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", grid)

        def place(value: Tensor) -> Tensor:
            return distribute_tensor(value.clone(), mesh, clearly_cut(value.shape, grid, placements), src_data_rank=None)

        found, _ = as_one_parameter(shape, split, dim, place, **options)
        same(found.to_local(), place(expected).to_local(), name)

    run_threads(math.prod(grid), main)


def test_the_reference_path_on_one_device() -> None:
    for shape, split, dim, sizes in FUSED.values():
        found, _ = as_one_parameter(shape, split, dim, torch.clone, use_distributed_muon=True)
        same(found, as_separate_parameters(shape, dim, sizes), "reference")


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_the_reference_path_with_weights_of_16_bits(name: str, maximize: bool) -> None:
    """The updates of such weights are multiplied by the rate in place, which with ``maximize`` is negative.

    That must not reach the parts of the update that are still to be orthogonalised.
    """
    shape, split, dim, _ = FUSED[name]
    expected, _ = as_one_parameter(shape, split, dim, Tensor.bfloat16, maximize=maximize)
    found, _ = as_one_parameter(shape, split, dim, Tensor.bfloat16, maximize=maximize, reference_path=True)
    same(found, expected, name)


def test_a_fused_weight_is_warned_of_until_it_is_split() -> None:
    param = nn.Parameter(torch.randn(12, 4))
    group = {"params": [param], "names": ["layers.0.qkv.weight"], "use_muon": True}
    with pytest.warns(RoutingWarning, match=r"several projections fused into one weight.*split=\(\.\.\.\)"):
        Muon([group])
    Muon([{**group, "split": [4, 4, 4]}])


def test_sizes_that_do_not_fit_are_refused_with_the_name() -> None:
    param = nn.Parameter(torch.randn(12, 4))
    with pytest.raises(ConfigError, match=r"layers\.0\.qkv\.weight: split=\(4, 4\) adds up to 8, but it has 12 outputs"):
        Muon([{"params": [param], "names": ["layers.0.qkv.weight"], "use_muon": True, "split": [4, 4]}])


@pytest.mark.parametrize("rows", [2, 6])  # smaller matrices travel before the fused one's part, larger ones after it
@pytest.mark.parametrize("position", [0, 5])
@pytest.mark.parametrize("warmup_step", [0, 1, 2, 3, 5])
def test_parts_that_stay_and_parts_that_travel_share_one_momentum(warmup_step: int, position: int, rows: int) -> None:
    """Momentum is taken once per parameter, by whichever comes first: a wave, or the matrices that need no exchange."""
    shapes = [(rows, 5)] * 5
    shapes.insert(position, (12, 5))
    names = ["fused" if shape[0] == 12 else f"plain.{k}" for k, shape in enumerate(shapes)]

    def train(place: Any, **options: Any) -> list[Tensor]:
        params = [nn.Parameter(place(seeded(shape, k))) for k, shape in enumerate(shapes)]
        cut = lambda name, shape: (4, 4, 4) if name == "fused" else None  # noqa: E731
        optimizer = Muon([{"params": params, "names": names, "use_muon": True}], lr=0.01, split=cut, chunk_size=1, **options)
        for step in range(STEPS):
            for k, param in enumerate(params):
                param.grad = place(seeded(shapes[k], 100 * (step + 1) + k))
            optimizer.step()
        return [param.detach() for param in params]

    expected = train(lambda value: value.clone())

    def main(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        found = train(lambda value: distribute_tensor(value, mesh, [S0]), warmup_step=warmup_step)
        return [one.full_tensor() for one in found]  # type: ignore[attr-defined]

    for found in run_threads(2, main):
        assert all(map(torch.equal, found, expected))
