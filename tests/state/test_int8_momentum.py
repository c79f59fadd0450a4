"""Momentum in int8: its scales, what a step makes of both, conversion to and from floating point, and what is
refused.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshmuon import Muon, StateError
from meshmuon.execute.int8 import Int8Blocks, dequantise, quantise, scales_shape
from meshmuon.matrices import MatrixOptions, find_matrices
from meshmuon.params.momentum_blocks import momentum_blocks, scale_placements
from tests.support.reference import assert_same_bits, copies, group, make_params, muon, run
from tests.support.tensors import through_disk
from tests.support.threads import run_threads

INT8: dict[str, Any] = {"momentum_dtype": torch.int8}


def in_float(state: dict[str, Tensor]) -> Tensor:
    numbers = torch.empty(state["momentum_buffer"].shape)
    dequantise([Int8Blocks(state["momentum_buffer"], state["momentum_scale"].view(torch.int8))], [numbers])
    return numbers


def in_int8(numbers: Tensor) -> list[Tensor]:
    quanta = torch.empty(numbers.shape, dtype=torch.int8)
    scales = torch.empty(scales_shape(numbers.shape), dtype=torch.bfloat16)
    quantise([numbers], [Int8Blocks(quanta, scales.view(torch.int8))])
    return [quanta, scales]


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_step_looks_ahead_from_momentum_that_is_not_rounded_yet(nesterov: bool) -> None:
    """M ← quantise(μ·dequantise(M) + G), and what is orthogonalised has the sum before it is rounded."""
    seen: list[Tensor] = []
    (param,) = make_params((5, 300))
    optimizer = muon(
        [param], **INT8, nesterov=nesterov, momentum=0.5, scheme=lambda x: seen.append(x.clone()) or x, ns_steps=1
    )
    numbers = torch.zeros(5, 300)
    for step in range(3):
        param.grad = grad = torch.randn(5, 300, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        numbers = numbers * 0.5 + grad
        wanted = grad + 0.5 * numbers if nesterov else numbers
        assert torch.allclose(seen[-1].reshape(5, 300) / seen[-1].norm(), wanted / wanted.norm(), rtol=0, atol=1e-6)
        state = optimizer.state[param]
        assert_same_bits([state["momentum_buffer"], state["momentum_scale"]], in_int8(numbers))
        numbers = in_float(state)


SHAPES: dict[str, tuple[tuple[int, ...], MatrixOptions, tuple[int, ...]]] = {
    "matrix": ((4, 300), MatrixOptions(), (4, 3)),
    "experts": ((3, 4, 300), MatrixOptions(("w",)), (3, 4, 3)),
    "filter": ((4, 30, 3, 3), MatrixOptions(conv="flatten"), (4, 3, 1, 1)),
    "rows of a fused weight": ((6, 300), MatrixOptions(split=(2, 4)), (6, 3)),
    "no columns": ((4, 0), MatrixOptions(), (4, 0)),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_the_shape_of_the_scales(kind: str) -> None:
    shape, options, wanted = SHAPES[kind]
    assert momentum_blocks(torch.empty(shape), find_matrices("w", shape, options)).shape == wanted


PLACEMENTS: dict[str, tuple[tuple[int, int], int, Any, Any]] = {
    "rows": ((7, 300), 4, Shard(0), Shard(0)),
    "columns at multiples of 128": ((7, 512), 4, Shard(1), Shard(1)),
    "a short last shard": ((7, 510), 4, Shard(1), Shard(1)),
    "empty shards": ((7, 200), 4, Shard(1), Replicate()),
    "cut blocks": ((7, 300), 4, Shard(1), Replicate()),
    "replicas": ((7, 300), 2, Replicate(), Replicate()),
}


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_scales_are_replicated_where_a_block_is_cut(kind: str) -> None:
    shape, ranks, placement, wanted = PLACEMENTS[kind]

    def main(rank: int) -> tuple[Any, ...]:
        mesh = init_device_mesh("cpu", (ranks,))
        param = distribute_tensor(torch.zeros(shape), mesh, [placement], src_data_rank=None)
        return scale_placements(param, momentum_blocks(param, find_matrices("w", shape, MatrixOptions())))

    assert run_threads(ranks, main) == [(wanted,)] * ranks


def test_float_momentum_is_converted_at_loading_and_back_after_the_option_is_set() -> None:
    params = make_params((6, 300), (4, 5))
    optimizer = muon(params)
    run(optimizer, params, range(3))
    saved = through_disk(optimizer.state_dict())
    own = copies(params)
    fresh = muon(own, **INT8)
    fresh.load_state_dict(saved)
    for param, old in zip(own, params, strict=True):
        state = fresh.state[param]
        assert_same_bits(
            [state["momentum_buffer"], state["momentum_scale"]], in_int8(optimizer.state[old]["momentum_buffer"])
        )
    numbers = [in_float(fresh.state[param]) for param in own]
    fresh.param_groups[0]["momentum_dtype"] = torch.float32
    saved = through_disk(fresh.state_dict())
    assert_same_bits([entry["momentum_buffer"] for entry in saved["state"].values()], numbers)
    assert all("momentum_scale" not in entry for entry in saved["state"].values())
    run(fresh, own, range(3, 5))
    fresh.param_groups[0]["momentum_dtype"] = torch.int8  # from the next step on
    run(fresh, own, range(5, 6))
    assert all(fresh.state[param]["momentum_buffer"].dtype == torch.int8 for param in own)


def test_copies_step_alike() -> None:
    params = make_params((6, 300))
    optimizer = muon(params, **INT8)
    run(optimizer, params, range(2))
    other = copy.deepcopy(optimizer)
    own = other.param_groups[0]["params"]
    for each, tensors in ((optimizer, params), (other, own)):
        run(each, tensors, range(2, 4))
    assert_same_bits(own, params)


def test_offloaded_and_added_groups_step_alike() -> None:
    (params, own), extra = (make_params((6, 300)), make_params((6, 300))), [make_params((4, 140)) for _ in range(2)]
    optimizers = [muon(params, **INT8), muon(own, **INT8)]
    optimizers[1].turn_on_cpu_offload()
    for optimizer, first, more in zip(optimizers, (params, own), extra, strict=True):
        run(optimizer, first, range(2))
        optimizer.add_param_group({**group(more, prefix="more"), "momentum_dtype": torch.int8})
        run(optimizer, [*first, *more], range(2, 4))
    assert_same_bits([*own, *extra[1]], [*params, *extra[0]])


Damage = tuple[Any, str]
DAMAGE: dict[str, Damage] = {
    "no scales": (lambda entry: entry.pop("momentum_scale"), r"needs \['momentum_buffer', 'momentum_scale'\]"),
    "scales in float32": (
        lambda entry: entry.update(momentum_scale=entry["momentum_scale"].float()),
        r"its saved momentum_scale is a tensor of shape \(6, 3\) in torch.float32, it must be .* in bfloat16",
    ),
    "other scales": (
        lambda entry: entry.update(momentum_scale=entry["momentum_scale"][:, :2]),
        r"\(6, 2\) instead of \(6, 3\)",
    ),
    "without scales in float": (
        lambda entry: entry.update(momentum_buffer=entry["momentum_buffer"].float()),
        "was saved with momentum_dtype=int8, but its momentum_buffer is in float32: dcp.load has copied it",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_scales_are_refused_with_the_name_of_the_parameter(kind: str) -> None:
    damage, message = DAMAGE[kind]
    params = make_params((6, 300))
    optimizer = muon(params, **INT8)
    run(optimizer, params, range(1))
    saved = through_disk(optimizer.state_dict())
    damage(saved["state"][0])
    before = [tensor.clone() for tensor in optimizer.state[params[0]].values()]
    with pytest.raises(StateError, match=f"weight.*{message}|param0.*{message}|.*{message}"):
        optimizer.load_state_dict(saved)
    assert_same_bits(optimizer.state[params[0]].values(), before)


def test_int8_in_the_state_of_an_optimizer_that_was_saved_in_float_is_refused() -> None:
    params = make_params((6, 300))
    optimizer = muon(params, **INT8)
    run(optimizer, params, range(1))
    saved = through_disk(optimizer.state_dict())
    saved["param_groups"][0]["momentum_dtype"] = None
    with pytest.raises(StateError, match="saved with momentum_dtype=None, but its momentum_buffer is in int8"):
        optimizer.load_state_dict(saved)


def test_scales_that_were_lost_or_replaced_are_refused_by_a_step() -> None:
    params = make_params((6, 300))
    optimizer = muon(params, **INT8)
    run(optimizer, params, range(1))
    state = optimizer.state[params[0]]
    scales = state.pop("momentum_scale")
    with pytest.raises(
        StateError, match=r"its momentum_scale is a NoneType, it must be a tensor of shape \(6, 3\) in bfloat16"
    ):
        run(optimizer, params, range(1, 2))
    state["momentum_scale"] = scales[:, :1].clone()
    with pytest.raises(StateError, match="momentum_scale"):
        run(optimizer, params, range(1, 2))


def test_momentum_is_not_converted_where_ranks_share_blocks() -> None:
    """The scales would need a reduction, which loading must not make."""

    def main(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.randn(6, 300), mesh, [Shard(1)], src_data_rank=None))
        groups = [{"params": [weight], "names": ["w"], "use_muon": True}]
        optimizer = Muon(groups)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        saved = optimizer.state_dict()
        with pytest.raises(StateError) as raised:
            Muon(groups, momentum_dtype=torch.int8).load_state_dict(saved)
        return str(raised.value)

    for message in run_threads(2, main):
        assert message.startswith(
            "w: its momentum cannot be converted to int8 on cpu [S(1)] on 2, where ranks share blocks of 128"
        )
