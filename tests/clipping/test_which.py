"""Clipping what AdamW steps, and leaving Muon's gradients as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from meshmuon import ConfigError, DistMuon, Muon, clip_grad_norm_, total_grad_norm
from tests.support.reference import LR, assert_same_bits, copies, gradients, group, make_params, set_gradients
from tests.support.tensors import like, local, same, seeded
from tests.support.threads import run_threads

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SHAPES = ((8, 6), (6, 9), (10,), (7, 4))  # the last two are AdamW's
PLACES: dict[str, tuple[tuple[int, ...], list[list[Any] | None]]] = {
    "FSDP": ((4,), [[S0]] * 4),
    "HSDP": ((2, 2), [[R, S0]] * 4),
    "TP and plain": ((2, 2), [[S0, S1], [S1, R], None, [R, S0]]),
    "only AdamW's on the mesh": ((4,), [None, None, [S0], [R]]),
}


def build(params: list[Any], **options: Any) -> Muon:
    return Muon([group(params[:2]), group(params[2:], use_muon=False, prefix="norms")], lr=LR, **options)


def prepared() -> tuple[list[nn.Parameter], Muon]:
    params = make_params(*SHAPES)
    set_gradients(params, gradients(params, 0))
    return params, build(params)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_adamw_alone_as_torch(norm_type: float) -> None:
    params, optimizer = prepared()
    twins = copies(params)
    set_gradients(twins, [param.grad for param in params])
    norm = clip_grad_norm_(optimizer, 0.1, norm_type, which="adamw")
    theirs = torch.nn.utils.clip_grad_norm_(twins[2:], 0.1, norm_type)
    torch.testing.assert_close(norm, theirs)
    torch.testing.assert_close([param.grad for param in params], [param.grad for param in twins])
    assert_same_bits([param.grad for param in params[:2]], [param.grad for param in twins[:2]])  # Muon's are as they were


def test_an_optimizer_stands_for_its_parameters() -> None:
    params, optimizer = prepared()
    twins = copies(params)
    set_gradients(twins, [param.grad for param in params])
    assert total_grad_norm(optimizer) == total_grad_norm(twins)
    assert total_grad_norm(optimizer, which="adamw") == total_grad_norm(twins[2:])
    clip_grad_norm_(optimizer, 0.1)
    clip_grad_norm_(twins, 0.1)
    assert_same_bits([param.grad for param in params], [param.grad for param in twins])
    plain = torch.optim.SGD(twins)
    assert total_grad_norm(plain) == total_grad_norm(twins)


def test_nothing_for_adamw() -> None:
    params = make_params((4, 4))
    set_gradients(params, gradients(params, 0))
    before = params[0].grad.clone()  # type: ignore[union-attr]
    assert clip_grad_norm_(Muon([group(params)]), 0.1, which="adamw") == 0
    assert clip_grad_norm_(DistMuon(params), 0.1, which="adamw") == 0
    assert torch.equal(before, params[0].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["parameters", "optimizer of torch"])
def test_refused_without_routes(given: str) -> None:
    params, _ = prepared()
    before = [param.grad.clone() for param in params if param.grad is not None]
    what: Any = params if given == "parameters" else torch.optim.SGD(params)
    with pytest.raises(ConfigError, match=r'which="adamw".*Pass the optimizer, clip_grad_norm_\(optimizer, max_norm'):
        clip_grad_norm_(what, 0.1, which="adamw")
    with pytest.raises(ConfigError, match=r"which='muon' is unknown; write one of \('all', 'adamw'\)"):
        total_grad_norm(params, which="muon")
    assert_same_bits([param.grad for param in params], before)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_on_meshes(place: str) -> None:
    """The norm of AdamW's parameters on one device; Muon's shards keep every bit. A clipped run equals one device's."""
    shape, placements = PLACES[place]

    def device(step: int, params: list[Any]) -> list[Tensor]:
        return [like(param, seeded(param.shape, 10 * step + k)) for k, param in enumerate(params)]

    whole = [nn.Parameter(seeded(size, k)) for k, size in enumerate(SHAPES)]
    single = build(whole)
    norms = []
    for step in range(2):
        set_gradients(whole, device(step, whole))
        norms.append(float(clip_grad_norm_(single, 0.1, which="adamw")))
        single.step()

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape)
        params = []
        for k, (size, where) in enumerate(zip(SHAPES, placements, strict=True)):
            value = seeded(size, k)
            placed = (
                value if where is None else torch.distributed.tensor.distribute_tensor(value, mesh, where, src_data_rank=None)
            )
            params.append(nn.Parameter(placed))
        optimizer = build(params)
        for step in range(2):
            set_gradients(params, device(step, params))
            before = [local(param.grad).clone() for param in params[:2]]
            norm = float(clip_grad_norm_(optimizer, 0.1, which="adamw"))
            assert abs(norm - norms[step]) <= 1e-6 * norms[step]
            for param, kept in zip(params[:2], before, strict=True):
                same(local(param.grad), kept, "Muon's gradient")
            optimizer.step()
        for param, expected in zip(params, whole, strict=True):
            torch.testing.assert_close(local(param), local(like(param, expected.detach())), atol=1e-6, rtol=1e-6)

    run_threads(4, on_rank)


def test_ranks_that_choose_differently() -> None:
    def on_rank(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        params = [
            nn.Parameter(torch.distributed.tensor.distribute_tensor(seeded(size, k), mesh, [S0], src_data_rank=None))
            for k, size in enumerate(SHAPES)
        ]
        set_gradients(params, [torch.ones_like(param) for param in params])
        with pytest.raises(Exception, match="rank") as caught:
            clip_grad_norm_(build(params), 0.1, which=("all", "adamw")[rank])
        return str(caught.value)

    first, second = run_threads(2, on_rank)
    assert first == second
