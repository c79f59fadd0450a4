"""State that is not what its names say is refused before anything is overwritten; and what loading leaves as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshmuon import MeshmuonError, Muon, StateError, get_default_muon_param_groups
from meshmuon.checkpoint import convert_torch_state
from meshmuon.dropped import SAVED
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
from tests.support.threads import run_threads

SHAPES = ((8, 6), (6, 8), (5,), (7, 2))
WRONG = [torch.int64, torch.complex64, torch.bool, torch.float8_e4m3fn]
CONVERT = r"torch\.optim\.Muon, which keeps momentum as a mean .*meshmuon\.checkpoint\.convert_torch_state"


def build(params: list[nn.Parameter], **options: Any) -> Muon:
    return Muon([group(params[:2]), group(params[2:], use_muon=False, prefix="norms")], **{"lr": LR, **options})


def content(optimizer: Muon) -> list[Tensor]:
    return [value.clone() for entry in optimizer.state.values() for value in entry.values()]


# torch's own Muon


def of_torch(params: list[nn.Parameter]) -> torch.optim.Muon:
    named = [(f"layers.{k}.weight", param) for k, param in enumerate(params)]
    optimizer = torch.optim.Muon(named, lr=0.02)
    run(optimizer, params, range(3))
    return optimizer


def test_torchs_muon_is_refused_and_the_way_told() -> None:
    """Its state has our names, but its momentum is a mean: the next update would be 1/(1 − momentum) times too
    small or large.
    """
    params = make_params((8, 6), (6, 8))
    theirs = of_torch(copies(params))
    optimizer = muon(params)
    run(optimizer, params, [0])
    before, kept = content(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(StateError, match=f"group 0 of the state_dict is from {CONVERT}"):
        optimizer.load_state_dict(theirs.state_dict())
    assert_same_bits(content(optimizer), before)
    assert optimizer.state_dict()["param_groups"] == kept
    optimizer.load_state_dict(convert_torch_state(optimizer, theirs.state_dict(), None))
    for param, entry in zip(params, theirs.state.values(), strict=True):
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], entry["momentum_buffer"] / 0.05)


def test_torchs_muon_is_told_first() -> None:
    """Where torch needs two optimizers, the number of groups is not what is wrong; nor are keys that are names, as
    DCP's.
    """
    params = make_params(*SHAPES)
    with pytest.raises(StateError, match=CONVERT):
        build(params).load_state_dict(of_torch(copies(params[:2])).state_dict())
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False))
    theirs = torch.optim.Muon(model.parameters(), lr=0.02)
    run(theirs, list(model.parameters()), range(2))
    optimizer = Muon([{"params": list(model.named_parameters()), "use_muon": True}], lr=LR)
    with pytest.raises(StateError, match=CONVERT):
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, theirs))


# Dtypes


@pytest.mark.parametrize("dtype", WRONG, ids=str)
@pytest.mark.parametrize(
    ("place", "key"), [(1, "momentum_buffer"), (0, "rule_memory"), (2, "exp_avg"), (3, "exp_avg_sq")]
)
def test_state_of_a_wrong_dtype(place: int, key: str, dtype: torch.dtype) -> None:
    """Refused at load before anything is overwritten, and before a step writes where it was put in by hand."""
    params = make_params(*SHAPES)
    optimizer = build(params, rule="normuon")
    run(optimizer, params, [0])
    name = ["layers.0.weight", "layers.1.weight", "norms.0.weight", "norms.1.weight"][place]
    foreign = copy.deepcopy(optimizer.state_dict())
    foreign["state"][place][key] = foreign["state"][place][key].to(dtype)
    before = content(optimizer)
    with pytest.raises(
        StateError, match=rf"{name}: its saved {key} is a tensor of shape .* in {dtype}, it must be .* float32"
    ):
        optimizer.load_state_dict(foreign)
    assert_same_bits(content(optimizer), before)

    entry = optimizer.state[params[place]]
    entry[key] = entry[key].to(dtype)
    kept = copies(params)
    set_gradients(params, gradients(params, 1))
    with pytest.raises(StateError, match=rf"{name}: its {key} is a tensor of shape .* in {dtype}"):
        optimizer.step()
    assert_same_bits(params, kept)


def test_a_wrong_dtype_on_one_rank_is_told_on_all() -> None:
    start, world = [param.detach() for param in make_params((8, 6), (6, 8))], 3

    def rank_main(rank: int) -> tuple[str, list[Tensor]]:
        mesh = init_device_mesh("cpu", (world,))

        def cut(value: Tensor) -> Tensor:
            return distribute_tensor(value.clone(), mesh, [Shard(0)], src_data_rank=None)

        params = [nn.Parameter(cut(value)) for value in start]

        def give(step: int) -> None:
            for param, grad in zip(params, gradients(start, step), strict=True):
                param.grad = cut(grad)

        optimizer = Muon([group(params)], lr=LR, scheme="keller")
        give(0)
        optimizer.step()
        entry = optimizer.state[params[0]]
        good = entry["momentum_buffer"]
        if rank == 1:
            entry["momentum_buffer"] = good.to(torch.int64)
        before = [param.to_local().clone() for param in params]
        give(1)
        with pytest.raises(MeshmuonError) as caught:
            optimizer.step()
        assert_same_bits([param.to_local() for param in params], before)
        entry["momentum_buffer"] = good
        optimizer.step()
        return f"{type(caught.value).__name__}: {caught.value}", [param.full_tensor().detach() for param in params]

    ended = run_threads(world, rank_main)
    assert len({text for text, _ in ended}) == 1
    assert ended[0][0].startswith("StateError: rank 1: layers.0.weight: its momentum_buffer is a tensor")
    whole = [nn.Parameter(value.clone()) for value in start]
    run(muon(whole), whole, range(2))
    assert_same_bits(ended[0][1], whole)


# What loading leaves as it was


def all_keys(optimizer: Muon) -> list[set[str]]:
    return [set(one) for one in optimizer.param_groups]


@pytest.mark.parametrize("way", ["load_state_dict", "deepcopy", "dcp"])
def test_loading_adds_no_option(way: str) -> None:
    """torch's ``__setstate__`` puts ``differentiable`` among the defaults; no group may get it, now or later."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    optimizer = Muon(get_default_muon_param_groups(model), lr=LR)
    run(optimizer, list(model.parameters()), [0])
    keys, defaults = all_keys(optimizer), set(optimizer.defaults)
    for _ in range(2):  # a second time, what the first has left behind would show
        if way == "load_state_dict":
            optimizer.load_state_dict(optimizer.state_dict())
        elif way == "deepcopy":
            optimizer = copy.deepcopy(optimizer)
        else:
            set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
        assert all_keys(optimizer) == keys
        assert set(optimizer.defaults) == defaults
        assert [set(one) for one in optimizer.state_dict()["param_groups"]] == [{*one, *SAVED} for one in keys]
    optimizer.add_param_group(group(make_params((3, 4)), prefix="late"))
    assert "differentiable" not in optimizer.param_groups[-1]


# Names


def unnamed(params: list[nn.Parameter], **options: Any) -> Muon:
    return Muon([{"params": params, "use_muon": True, **options}], lr=LR)


NUMBERED, NAMED = (["group0.param0", "group0.param1"], ["layers.0.weight", "layers.1.weight"])


@pytest.mark.parametrize("names", [NAMED, None, ["layers.0.weight"], [1, 2], "ab", 5])
def test_names_of_a_checkpoint_fill_what_has_none(names: Any) -> None:
    """If they are as many as there are parameters."""
    params = make_params((8, 6), (6, 8))
    optimizer = unnamed(params)
    run(optimizer, params, [0])
    saved = optimizer.state_dict()
    saved["param_groups"][0]["param_names"] = names
    if names is None:
        del saved["param_groups"][0]["param_names"]
    fresh = unnamed(copies(params))
    assert fresh.param_groups[0]["param_names"] == NUMBERED
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["param_names"] == (NAMED if names is NAMED else NUMBERED)
    assert [row.name for row in fresh.routing_table().rows] == fresh.param_groups[0]["param_names"]
    run(fresh, fresh.param_groups[0]["params"], [1])


def test_names_that_were_given_stay() -> None:
    params = make_params((8, 6), (6, 8))
    optimizer = muon(params)
    run(optimizer, params, [0])
    saved, renamed = optimizer.state_dict(), Muon([group(copies(params), prefix="blocks")], lr=LR)
    with pytest.raises(StateError, match=r"lacks blocks\.0\.weight, blocks\.1\.weight; the optimizer lacks layers\.0"):
        renamed.load_state_dict(saved)
    saved["param_groups"][0]["param_names"] = ["blocks.0.weight", "blocks.1.weight"]  # as the error says
    renamed.load_state_dict(saved)
    assert renamed.param_groups[0]["param_names"] == ["blocks.0.weight", "blocks.1.weight"]
    named = muon(copies(params))
    named.load_state_dict(unnamed(copies(params)).state_dict())
    assert named.param_groups[0]["param_names"] == ["layers.0.weight", "layers.1.weight"]


def test_experts_and_clipping_work_with_loaded_names() -> None:
    """What goes by name goes on as in the optimizer that was saved."""
    shapes = ((3, 4, 6), (8, 6), (8, 6))
    params, config = make_params(*shapes), {"head_dim": 4, "threshold": 1.0}

    def build_with(params: list[nn.Parameter], names: list[str] | None, **options: Any) -> Muon:
        written: dict[str, Any] = {"params": params, "use_muon": True, **options}
        return Muon([written if names is None else {**written, "names": names}], lr=LR, clip_config=config)

    names = ["layers.0.experts.w1", "layers.0.q_proj.weight", "layers.0.k_proj.weight"]
    optimizer = build_with(params, names, expert_keys=["experts"])
    run(optimizer, params, [0])
    twins = copies(params)
    fresh = build_with(twins, None, conv="flatten")
    with pytest.warns(UserWarning, match="expert_keys"):
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    logits = {0: torch.tensor([4.0, 0.5])}
    for one, some in ((optimizer, params), (fresh, twins)):
        set_gradients(some, gradients(some, 1))
        one.step(qk_logits=logits)
    assert_same_bits(twins, params)
    assert fresh.routing_table().rows[0].matrices == 3


# Which matrices


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "split": ({"split": (4, 4)}, {}),
    "split of another size": ({"split": [4, 4]}, {"split": (2, 6)}),
    "a function": ({"split": (4, 4)}, {"split": lambda name, shape: 4}),
    "matrices": ({"matrices": {"layers.0.weight": {"dims": "in_out"}}}, {}),
    "conv": ({"conv": "flatten"}, {}),
    "rule": ({"rule": "normuon"}, {}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_checkpoint_that_changes_the_matrices_is_told(name: str) -> None:
    saved, built = CHANGES[name]
    key = next(iter(saved))
    params = make_params((8, 6))
    optimizer = muon(params, **saved)
    run(optimizer, params, [0])
    fresh = muon(copies(params), **built)
    with pytest.warns(UserWarning, match=rf"layers\.0\.weight, …: the checkpoint was saved with {key}=.*built with"):
        fresh.load_state_dict(optimizer.state_dict())
    value = saved[key]
    assert fresh.param_groups[0][key] == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    "options", [{"split": [4, 4]}, {"split": lambda name, shape: 4}, {"expert_keys": ["experts"]}, {"rule": "normuon"}]
)
def test_a_checkpoint_that_changes_nothing_is_silent(options: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    params = make_params((8, 6))
    optimizer = muon(params, **options)
    run(optimizer, params, [0])
    muon(copies(params), **options).load_state_dict(optimizer.state_dict())
    assert not [str(one.message) for one in recwarn if "checkpoint" in str(one.message)]
