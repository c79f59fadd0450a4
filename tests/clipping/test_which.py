"""Clipping what AdamW steps, and leaving Muon's gradients as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshmuon import ConfigError, DistMuon, Muon, clip_grad_norm_, total_grad_norm
from tests.support.reference import LR, assert_same_bits, copies, gradients, group, make_params, set_gradients
from tests.support.tensors import seeded
from tests.support.threads import run_threads

SHAPES = ((8, 6), (6, 9), (10,), (7, 4))  # the last two are AdamW's


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
    # Muon's are as they were
    assert_same_bits([param.grad for param in params[:2]], [param.grad for param in twins[:2]])


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


def test_ranks_that_choose_differently() -> None:
    def on_rank(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        params = [
            nn.Parameter(distribute_tensor(seeded(size, k), mesh, [Shard(0)], src_data_rank=None))
            for k, size in enumerate(SHAPES)
        ]
        set_gradients(params, [torch.ones_like(param) for param in params])
        with pytest.raises(Exception, match="rank") as caught:
            clip_grad_norm_(build(params), 0.1, which=("all", "adamw")[rank])
        return str(caught.value)

    first, second = run_threads(2, on_rank)
    assert first == second
