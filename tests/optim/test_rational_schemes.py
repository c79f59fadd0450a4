"""Rational schemes inside the optimizer: what the update is, what checkpoints keep, what is warned of and refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshmuon import ConfigError, Muon, RoutingWarning, halley, hybrid, orthogonalize, polar_express, zolotarev
from meshmuon.ortho import AUTO, SchemeLike


def weight(rows: int = 40, cols: int = 60) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))


def muon(param: Tensor, scheme: SchemeLike, **options: object) -> Muon:
    group = {"params": [param], "names": ["layer.weight"], "use_muon": True}
    return Muon([group], scheme=scheme, **{"lr": 0.01, "weight_decay": 0.0, "momentum": 0.0, **options})


def step(param: Tensor, optimizer: Muon) -> Tensor:
    """One step on a fixed gradient; how far it moved the parameter."""
    before = param.detach().clone()
    param.grad = weight(*param.shape).flip(0)
    optimizer.step()
    return before - param.detach()


@pytest.mark.parametrize(("name", "scheme"), [("zolotarev", zolotarev()), ("halley", halley()), ("hybrid", hybrid())])
def test_the_update_is_that_of_the_scheme(name: str, scheme: SchemeLike) -> None:
    moves = []
    for given in (name, scheme):
        param = nn.Parameter(weight())
        moves.append(step(param, muon(param, given, adjust_lr_fn=lambda rows, cols: 1.0)))
    assert torch.equal(*moves)
    assert torch.allclose(moves[0], 0.01 * orthogonalize(weight().flip(0), scheme), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "scheme",
    [zolotarev(poles=2), halley(), hybrid(), "zolotarev", "hybrid", "auto", AUTO],
    ids=lambda scheme: str(scheme)[:40],
)
def test_a_checkpoint_keeps_the_scheme(scheme: SchemeLike) -> None:
    param, copy = nn.Parameter(weight(260, 260)), nn.Parameter(weight(260, 260))
    saved, loaded = muon(param, scheme), muon(copy, "polar_express")
    step(param, saved)
    copy.data.copy_(param.data)
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(step(param, saved), step(copy, loaded))


def test_the_scheme_object_for_auto_is_stored_by_name() -> None:
    assert muon(nn.Parameter(weight()), AUTO).param_groups[0]["scheme"] == "auto"


def test_sixteen_bits_warn_and_step_with_polar_express() -> None:
    param, other = nn.Parameter(weight()), nn.Parameter(weight())
    with pytest.warns(RoutingWarning, match="polar_express instead of zolotarev: bfloat16 is too short"):
        optimizer = muon(param, "zolotarev", compute_dtype=torch.bfloat16)
    assert any("polar_express instead of zolotarev" in warning for warning in optimizer.routing_table().warnings)
    assert torch.equal(step(param, optimizer), step(other, muon(other, polar_express(), compute_dtype=torch.bfloat16)))


def test_an_unsafe_bound_is_refused_before_anything_is_written() -> None:
    param = nn.Parameter(weight())
    optimizer = muon(param, zolotarev(l=1e-4))
    with pytest.raises(ConfigError, match="not safe in float32"):
        step(param, optimizer)
    assert torch.equal(param.detach(), weight())
    assert not optimizer.state
