"""What surrounds the arithmetic of a step: groups, what is freed, modes; test_torch_generic.py has what torch tests
as well.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon import DistMuon, Muon, get_default_muon_param_groups
from tests.support.reference import (
    LR,
    assert_same_bits,
    copies,
    gradients,
    group,
    make_params,
    muon,
    run,
    set_gradients,
)


def mixed(**options: Any) -> tuple[list[nn.Parameter], Muon]:
    """Two matrices in Muon, two vectors in AdamW."""
    params = make_params((6, 8), (8, 6), (5,), (7,))
    return params, Muon([group(params[:2]), group(params[2:], use_muon=False, prefix="norms")], lr=LR, **options)


def test_none_grad_frees_the_gradients_of_matrices() -> None:
    """Read at every step; AdamW's are the user's."""
    params, optimizer = mixed()
    for none_grad in (True, False):
        optimizer.param_groups[0]["none_grad"] = none_grad
        run(optimizer, params, [0])
        assert [param.grad is None for param in params] == [none_grad, none_grad, False, False]


def test_freed_gradients_free_their_memory_within_the_step() -> None:
    """While a matrix is worked on, its gradient is gone and those of later batches are still there."""
    params = make_params((6, 8), (6, 8))
    alive: list[list[bool]] = []

    def watch(batch: Tensor) -> Tensor:
        alive.append([reference() is not None for reference in references])
        return batch

    optimizer = muon(params, scheme=watch, chunk_size=1)
    set_gradients(params, gradients(params, 0))
    references = [weakref.ref(param.grad) for param in params if param.grad is not None]
    optimizer.step()
    assert alive == [[False, True], [False, False]]
    assert [param.grad for param in params] == [None, None]


def test_step_under_no_grad_and_leaves_no_graph() -> None:
    params, optimizer = mixed()
    run(optimizer, params, [0])
    assert all(param.is_leaf and param.grad_fn is None for param in params)
    assert not any(value.requires_grad for state in optimizer.state.values() for value in state.values())
    assert torch.is_grad_enabled()


def test_add_param_group_fills_in_defaults_and_keeps_the_users_dict() -> None:
    params = make_params((6, 8), (8, 6))
    optimizer = Muon([group(params[:1])], lr=LR, momentum=0.7, scheme="keller")
    added = group(params[1:], prefix="late")
    optimizer.add_param_group(added)
    assert set(added) == {"params", "names", "use_muon"}
    assert optimizer.param_groups[1]["momentum"] == 0.7
    assert optimizer.param_groups[1]["scheme"] == "keller"
    assert optimizer.param_groups[1]["param_names"] == ["late.0.weight"]


@pytest.mark.parametrize(
    "form", ["names", "param_names", "pairs", "tensor", "nothing", "generator", "generator of groups"]
)
def test_ways_to_write_a_group(form: str) -> None:
    (param,) = make_params((4, 6))
    written: dict[str, Any] = {
        "names": {"params": [param], "names": ["w"]},
        "param_names": {"params": [param], "param_names": ["w"]},
        "pairs": {"params": [("w", param)]},
        "tensor": {"params": param, "names": ["w"]},
        "nothing": {"params": [param]},
        "generator": {"params": (p for p in [param]), "names": (n for n in ["w"])},
    }.get(form, {"params": [param], "names": ["w"]})
    groups = [{**written, "use_muon": True}]
    optimizer = Muon(iter(groups) if form == "generator of groups" else groups, lr=LR)
    assert optimizer.param_groups[0]["params"] == [param]
    assert optimizer.param_groups[0]["param_names"] == ["group0.param0" if form == "nothing" else "w"]


def test_unknown_keys_are_kept() -> None:
    params = make_params((4, 6), (5,))
    extra = {"fused": True, "foreach": None, "capturable": False, "initial_lr": 0.1, "my_note": "kept"}
    optimizer = Muon([group(params[:1], **extra), group(params[1:], use_muon=False, **extra)], lr=LR)
    run(optimizer, params, [0])
    for own in (*optimizer.param_groups, *optimizer.state_dict()["param_groups"]):
        assert {key: own[key] for key in extra} == extra


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4)], ids=str)
@pytest.mark.parametrize("rule", ["match_rms_adamw", "original", "spectral"])
def test_empty_parameters(shape: tuple[int, ...], rule: str) -> None:
    """An expert-parallel rank may hold none; a step beside it still works."""
    params = make_params((4, 6), shape)
    alone = copies(params[:1])
    for own in (params, alone):
        run(Muon([group(own, prefix="experts")], lr=LR, adjust_lr_fn=rule, expert_keys=["experts"]), own, range(2))
    assert_same_bits(params[:1], alone)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("scheme", ["polar_express", "zolotarev", "hybrid", "halley"])
def test_steps_inside_inference_mode_leave_usable_buffers(scheme: str, deterministic: bool) -> None:
    """A first step makes the buffers of a scheme, those of inverses among them, and all later steps write them."""

    def train(*inference: bool) -> list[nn.Parameter]:
        params = make_params((40, 48))
        optimizer = Muon([group(params)], lr=LR, scheme=scheme, deterministic=deterministic)
        for step, inside in enumerate(inference):
            set_gradients(params, gradients(params, step))
            with torch.inference_mode(inside):
                optimizer.step()
        return params

    expected = train(False, False, False)
    for inference in ((True, False, True), (False, True, False)):
        assert_same_bits(train(*inference), expected)


def test_planning_anew_inside_inference_mode_and_with_another_default_device() -> None:
    params = make_params((4, 6))
    optimizer = Muon([group(params)])
    for steps, inference, device in ((5, False, "cpu"), (4, True, "cpu"), (4, False, "meta")):
        optimizer.param_groups[0]["ns_steps"] = steps
        set_gradients(params, gradients(params, steps))
        with torch.inference_mode(inference), torch.device(device):
            optimizer.step()
    assert params[0].isfinite().all()


@pytest.mark.parametrize("kind", [Muon, DistMuon])
def test_a_model_stands_for_its_default_groups(kind: type[Muon]) -> None:
    """Also one that is iterable, and with the options that say what is in it."""
    model = nn.Sequential(nn.Embedding(8, 6), nn.Conv2d(6, 4, 3), nn.Linear(6, 6))
    groups = get_default_muon_param_groups(model, conv="flatten")
    written = kind(groups, lr=LR, conv="flatten").param_groups
    short = kind(model, lr=LR, conv="flatten").param_groups
    assert len(short) == 3
    assert [group["params"] for group in short] == [group["params"] for group in written]
    assert short == written
