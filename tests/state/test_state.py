"""State as a user's asset: saving, loading, copying, and refusing what belongs to something else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from meshmuon import Interleaved, Muon, StateError, keller
from tests.support.reference import KELLER, LR, assert_same_bits, copies, group, make_params, muon, run, run_alike
from tests.support.tensors import put, through_disk

SHAPES = ((8, 12), (12, 8), (8, 12), (3, 6, 4), (5,), (7, 2))


def build(params: Sequence[Tensor], **options: Any) -> Muon:
    """Matrices and experts in Muon, the last two parameters in AdamW."""
    written = [
        group(params[:4], prefix="experts", expert_keys=["experts"]),
        group(params[4:], use_muon=False, prefix="norms"),
    ]
    return Muon(written, **{"lr": LR, **options})


OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum_dtype": torch.bfloat16},
    {"momentum_dtype": torch.float64, "compute_dtype": torch.float64},
    {"scheme": keller(3), "ns_steps": 3, "nesterov": False, "adjust_lr_fn": "spectral", "maximize": True},
    {"scheme": [(3.0, -3.2, 1.3), (1.9, -1.3, 0.4)], "ns_steps": 2, "lr": torch.tensor(2.0**-8)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["defaults", "bfloat16", "float64", "keller", "triples"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(options: dict[str, Any]) -> None:
    whole = make_params(*SHAPES)
    uninterrupted = build(whole, **options)
    run(uninterrupted, whole, range(6))
    params = make_params(*SHAPES)
    optimizer = build(params, **options)
    run(optimizer, params, range(3))
    saved = through_disk(optimizer.state_dict())
    resumed = copies(params)
    fresh = build(resumed)  # all options come back with the state
    fresh.load_state_dict(saved)
    run(fresh, resumed, range(3, 6))
    assert_same_bits(resumed, whole)
    for a, b in zip(resumed, whole, strict=True):
        assert list(fresh.state[a]) == list(uninterrupted.state[b])
        assert_same_bits(fresh.state[a].values(), uninterrupted.state[b].values())


def test_a_scheme_given_to_a_group_is_stored_as_plain_numbers() -> None:
    optimizer = Muon([group(make_params((8, 12)), scheme=keller(3), ns_steps=3)])
    assert through_disk(optimizer.state_dict())["param_groups"][0]["scheme"] == (KELLER,) * 3


def test_an_interleaved_split_is_stored_as_plain_numbers() -> None:
    """Also one that was set in a group by hand; the next steps are those of an uninterrupted run."""
    split = Interleaved((1, 1), 7)
    params, twins = make_params((3, 5, 14)), make_params((3, 5, 14))
    options: dict[str, Any] = {
        "expert_keys": ["experts"],
        "rule": "normuon",
        "matrices": {"experts.0.weight": {"dims": "in_out"}},
    }
    first, second = (Muon([group(own, prefix="experts", split=split)], lr=LR, **options) for own in (params, twins))
    run(first, params, range(1))
    twins[0].data.copy_(params[0])
    second.load_state_dict(through_disk(first.state_dict()))
    assert second.param_groups[0]["split"] == ((1, 1), 7)
    second.param_groups[0]["split"] = split
    assert second.state_dict()["param_groups"][0]["split"] == ((1, 1), 7)
    run_alike((first, params), (second, twins), steps=range(1, 3))
    assert_same_bits(twins, params)


def test_options_unknown_to_the_saving_version_stay() -> None:
    params = make_params((8, 12))
    optimizer = muon(params, momentum=0.7)
    run(optimizer, params, [0])
    saved = optimizer.state_dict()
    for key in ("conv", "split", "momentum_dtype", "maximize", "use_muon", "param_names"):
        del saved["param_groups"][0][key]
    fresh = muon(copies(params), maximize=True, split=(3, 5))
    fresh.load_state_dict(saved)
    loaded = fresh.param_groups[0]
    expected = {"momentum": 0.7, "maximize": True, "conv": None, "split": (3, 5), "param_names": ["layers.0.weight"]}
    assert {key: loaded[key] for key in expected} == expected


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_are_independent_and_go_on_alike(way: str) -> None:
    params = make_params(*SHAPES)
    optimizer = build(params, chunk_size=2, scheme=keller(4), ns_steps=4, deterministic=True)
    run(optimizer, params, range(2))
    twin: Muon = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    twins = [param for written in twin.param_groups for param in written["params"]]
    assert_same_bits(twins, params)
    run(twin, twins, range(2, 4))
    moved = copies(twins)
    run(optimizer, params, range(2, 4))
    assert_same_bits(params, moved)
    assert_same_bits(twins, moved)
    assert twin.workspace_bytes() == optimizer.workspace_bytes() > 0
    assert str(twin.routing_table()) == str(optimizer.routing_table())


def test_loading_hooks_may_adapt_a_foreign_state() -> None:
    """As in torch: a pre-hook sees the state first, so what it repairs is not refused."""
    params = make_params((8, 12))
    optimizer = muon(params, momentum_dtype=torch.float32)
    run(optimizer, params, [0])
    foreign = copy.deepcopy(optimizer.state_dict())
    foreign["state"] = {0: {"buf": foreign["state"][0]["momentum_buffer"]}}
    fresh = muon(copies(params))

    def rename(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {
            **state_dict,
            "state": {key: {"momentum_buffer": entry["buf"]} for key, entry in state_dict["state"].items()},
        }

    fresh.register_load_state_dict_pre_hook(rename)
    fresh.load_state_dict(foreign)
    (state,) = fresh.state.values()
    assert_same_bits([state["momentum_buffer"]], [foreign["state"][0]["buf"]])


def test_a_refused_state_leaves_no_hook_behind() -> None:
    """The check runs as the last hook of one loading; a second loading is checked afresh, once."""
    params = make_params((8, 12))
    optimizer = muon(params)
    run(optimizer, params, [0])
    good = copy.deepcopy(optimizer.state_dict())
    bad = {**good, "param_groups": []}
    for _ in range(2):
        with pytest.raises(StateError, match=r"It lacks layers\.0\.weight"):
            optimizer.load_state_dict(bad)
        assert not optimizer._optimizer_load_state_dict_pre_hooks
        optimizer.load_state_dict(good)
        assert not optimizer._optimizer_load_state_dict_pre_hooks


def only(*keys: str) -> Any:
    """The state of every parameter as if it had been optimized by an optimizer with these keys that does not say so."""

    def edit(state_dict: dict[str, Any]) -> dict[str, Any]:
        for saved in state_dict["param_groups"]:
            saved.pop("use_muon")
        for key, entry in state_dict["state"].items():
            shape = next(value.shape for value in entry.values() if value.dim())
            state_dict["state"][key] = {name: torch.ones(() if name == "step" else shape) for name in keys}
        return state_dict

    return edit


WRONG_SHAPE = torch.zeros(3, 3)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            only("step", "exp_avg", "exp_avg_sq"),
            r"experts\.0\.weight is optimized by Muon and needs \['momentum_buffer'\], but its saved state has "
            r"\['exp_avg'",
        ),
        (
            only("momentum_buffer"),
            r"norms\.0\.weight is optimized by AdamW and needs .*'exp_avg_sq'\], but .* \['momentum_buffer'\]",
        ),
        (
            put("state", 1, "momentum_buffer", value=WRONG_SHAPE),
            r"experts\.1\.weight has shape \(12, 8\), but its saved momentum_buffer has \(3, 3\)",
        ),
        (
            put("state", 5, "exp_avg_sq", value=WRONG_SHAPE),
            r"norms\.1\.weight has shape \(7, 2\), but its saved exp_avg_sq has \(3, 3\)",
        ),
        (
            put("state", 4, "exp_avg_sq"),
            r"norms\.0\.weight is optimized by AdamW .* but its saved state has \['exp_avg', 'step'\]",
        ),
        (
            put("param_groups", 1),
            r"It lacks norms\.0\.weight, norms\.1\.weight; the optimizer lacks none\. .*strict=False",
        ),
        (
            put("param_groups", 0, "params", value=[0, 1]),
            r"the optimizer have \[4, 2\] parameters, those of the state_dict \[2, 2\]: it was saved from another",
        ),
        (
            put("param_groups", 0, "params", value=[0, 1, 2, 4]),
            r"group 1 of the state_dict lists a parameter that is listed before",
        ),
        (
            put("param_groups", 0, "use_muon", value=False),
            r"experts\.0\.weight.* use_muon=True, the state_dict's has False",
        ),
    ],
)
def test_state_of_something_else_is_refused(edit: Any, message: str) -> None:
    """Refused before anything is overwritten, with the first parameter that does not fit."""
    params = make_params(*SHAPES)
    optimizer = build(params)
    run(optimizer, params, [0])
    foreign = edit(copy.deepcopy(optimizer.state_dict()))
    for saved in foreign["param_groups"]:
        saved["lr"] = 123.0
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StateError, match=message):
        optimizer.load_state_dict(foreign)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, entry in before["state"].items():
        assert_same_bits(after["state"][key].values(), entry.values())


def test_state_of_torch_adamw_is_refused_for_matrices() -> None:
    params = make_params((8, 12))
    adam = torch.optim.AdamW(copies(params))
    run(adam, adam.param_groups[0]["params"], [0])
    with pytest.raises(StateError, match=r"that of AdamW or Adam, .*docs/migrate\.md#adamw"):
        muon(params).load_state_dict(adam.state_dict())


def test_step_counts_come_back_as_the_step_needs_them() -> None:
    """Saved as a number, or in another dtype or shape; a matrix of Muon has none, and what it is given is not
    looked at.
    """
    params = make_params(*SHAPES)
    optimizer = build(params)
    run(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for key, entry in saved["state"].items():
        if "step" in entry:
            entry["step"] = (2, torch.tensor([2], dtype=torch.int64))[key % 2]
        else:
            entry["step"] = "of another optimizer"
    twins = copies(params)
    fresh = build(twins)
    fresh.load_state_dict(saved)
    for twin in twins[4:]:
        step = fresh.state[twin]["step"]
        assert isinstance(step, Tensor)
        assert (step.dtype, tuple(step.shape), float(step)) == (torch.float32, (), 2.0)
    run(fresh, twins, range(2, 4))
    run(optimizer, params, range(2, 4))
    assert_same_bits(twins, params)
