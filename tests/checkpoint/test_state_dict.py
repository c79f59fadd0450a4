"""What a state_dict holds: complete, storable everywhere, and refused whole where it does not belong."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from meshmuon import Muon, StateError, keller
from tests.support.reference import LR, assert_same_bits, copies, gradients, group, make_params, run, set_gradients

SHAPES = ((8, 12), (12, 8), (6, 4), (5,), (7, 2))
LATE, FROZEN = (1, 4), 2


def build(params: list[nn.Parameter], muon: Any = None, **options: Any) -> Muon:
    groups = [group(params[:3], **(muon or {})), group(params[3:], use_muon=False, prefix="norms")]
    return Muon(groups, **{"lr": LR, **options})


def make(*, frozen: bool = True) -> list[nn.Parameter]:
    params = make_params(*SHAPES)
    params[FROZEN].requires_grad_(not frozen)
    return params


def copied(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad) for param in params]


def steps(optimizer: Muon, params: list[nn.Parameter], which: range) -> None:
    """The late ones have their first gradient in step 4, the frozen one never."""
    for step in which:
        grads: list[Tensor | None] = list(gradients(params, step))
        for k in range(len(params)):
            if not params[k].requires_grad or (k in LATE and step < 4):
                grads[k] = None
        set_gradients(params, grads)
        optimizer.step()


def content(optimizer: Muon) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [value for param in params for _, value in sorted(optimizer.state.get(param, {}).items())]


def test_parameters_without_a_gradient_appear_with_zeros() -> None:
    params = make()
    optimizer = build(params)
    assert optimizer.state_dict()["state"] == {}, "nothing is created before the first step"
    steps(optimizer, params, range(3))
    saved = optimizer.state_dict()
    assert sorted(saved["state"]) == [0, 1, 3, 4], "the frozen one has no state, as in torch"
    assert not saved["state"][1]["momentum_buffer"].any()
    assert sorted(saved["state"][4]) == ["exp_avg", "exp_avg_sq", "step"]
    assert all(not value.any() for value in saved["state"][4].values())


def rule(rows: int, cols: int) -> float:
    return 0.1 * rows


class Callable:
    def __call__(self, name: str, shape: tuple[int, ...]) -> None:
        return None


RICH = {
    "momentum_dtype": torch.bfloat16,
    "compute_dtype": torch.float64,
    "adjust_lr_fn": rule,
    "split": Callable(),
    "scheme": keller(3),
    "ns_steps": 3,
}


def is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def test_groups_hold_only_what_can_be_stored() -> None:
    params = make()
    optimizer = build(params, muon={**RICH, "mine": {1}, "note": {"a": (1, 2)}})
    steps(optimizer, params, range(1))
    saved = optimizer.state_dict()["param_groups"][0]
    assert all(is_plain(value) for key, value in saved.items() if key not in ("note",)), saved
    assert (saved["momentum_dtype"], saved["compute_dtype"]) == ("torch.bfloat16", "torch.float64")
    assert saved["adjust_lr_fn"] == f"<not stored: {__name__}.rule>"
    assert saved["split"] == f"<not stored: {__name__}.Callable>"
    assert saved["note"] == {"a": (1, 2)}
    assert optimizer.param_groups[0]["adjust_lr_fn"] is rule, "the optimizer keeps its own"
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    twins = copied(params)
    fresh = build(twins, muon={"adjust_lr_fn": rule, "split": RICH["split"], "mine": {2}})
    fresh.load_state_dict(torch.load(file, weights_only=True))
    loaded = fresh.param_groups[0]
    assert (loaded["momentum_dtype"], loaded["compute_dtype"]) == (torch.bfloat16, torch.float64)
    assert loaded["adjust_lr_fn"] is rule
    assert loaded["split"] is RICH["split"]
    assert loaded["mine"] == {2}
    steps(optimizer, params, range(1, 6))
    steps(fresh, twins, range(1, 6))
    assert_same_bits(twins, params)


def test_dtypes_of_earlier_checkpoints_load_as_they_are() -> None:
    params = make()
    optimizer = build(params)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["momentum_dtype"], saved["param_groups"][0]["compute_dtype"] = torch.bfloat16, "float64"
    optimizer.load_state_dict(saved)
    loaded = optimizer.param_groups[0]
    assert (loaded["momentum_dtype"], loaded["compute_dtype"]) == (torch.bfloat16, torch.float64)


class Model(nn.Module):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        for k, param in enumerate(params):
            self.register_parameter(f"p{k}", param)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_functions_in_groups_pass_through_torch_checkpoints(flat: bool, tmp_path: Path) -> None:
    """Loaders demand every key of the living groups; flattening drops none of them."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    params = make()
    optimizer = build(params, muon=RICH)
    steps(optimizer, params, range(3))
    dcp.save({"optimizer": get_optimizer_state_dict(Model(params), optimizer, options=options)}, checkpoint_id=tmp_path)
    twins = copied(params)
    fresh, model = build(twins, muon=RICH), Model(twins)
    state = {"optimizer": get_optimizer_state_dict(model, fresh, options=options)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, fresh, state["optimizer"], options=options)
    assert (
        get_optimizer_state_dict(model, fresh)["param_groups"]
        == get_optimizer_state_dict(Model(params), optimizer)["param_groups"]
    )
    steps(optimizer, params, range(3, 7))
    steps(fresh, twins, range(3, 7))
    assert_same_bits(twins, params)
    assert_same_bits(content(fresh), content(optimizer))


def with_entry(key: int, name: str, value: Any) -> Any:
    return lambda saved: saved["state"][key].update({name: value})


STEPS = (True, -1.0, float("nan"), "3", torch.tensor(1j), torch.tensor(True), torch.tensor(-2.0), torch.zeros(5))
WRONG: list[tuple[Any, str]] = [
    (lambda saved: saved["state"].pop(0), r"layers\.0\.weight trains, but the state_dict has nothing for it"),
    (lambda saved: saved["state"].pop(4), r"norms\.1\.weight trains, but .* state_dict\[\"state\"\]\[4\] = \{\}"),
    (with_entry(0, "momentum_buffer", None), r"layers\.0\.weight: its saved momentum_buffer is a NoneType"),
    (
        with_entry(3, "exp_avg", 1.0),
        r"norms\.0\.weight: its saved exp_avg is a float, it must be a tensor of shape \(5,\)",
    ),
    *((with_entry(3, "step", step), r"norms\.0\.weight: its saved step is") for step in STEPS),
    (
        lambda saved: saved["param_groups"][0].update(momentum_dtype="float23"),
        r"momentum_dtype='float23', which is no dtype of torch",
    ),
]


@pytest.mark.parametrize(("edit", "message"), WRONG)
def test_wrong_state_is_refused(edit: Any, message: str) -> None:
    """That nothing has changed then is tested in tests/state/test_loading.py."""
    params = make()
    optimizer = build(params)
    steps(optimizer, params, range(5))
    foreign = copy.deepcopy(optimizer.state_dict())
    edit(foreign)
    with pytest.raises(StateError, match=message):
        optimizer.load_state_dict(foreign)


@pytest.mark.parametrize("known", [True, False])
def test_what_was_frozen_starts_from_zero(known: bool) -> None:
    """By itself where the checkpoint says so; those of earlier versions do not, so that only the user can know."""
    params = make()
    optimizer = build(params)
    steps(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["frozen"] == [FROZEN]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    fresh = build(twins)
    if not known:
        del saved["frozen"]
        with pytest.raises(StateError, match=rf"layers\.{FROZEN}\.weight was frozen when it was saved"):
            fresh.load_state_dict(saved)
        saved["state"][FROZEN] = {}
    fresh.load_state_dict(saved)
    run(fresh, twins, [0])
    assert_same_bits([fresh.state[twins[FROZEN]]["momentum_buffer"]], [gradients(twins, 0)[FROZEN]])


def test_what_is_frozen_later_keeps_its_state() -> None:
    """Parameters that were trained and then frozen keep their state through a plain state_dict."""
    params = make(frozen=False)
    optimizer = build(params)
    steps(optimizer, params, range(2))
    params[FROZEN].requires_grad_(False)
    twins = copies(params)
    twins[FROZEN].requires_grad_(False)
    fresh = build(twins)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    mine, theirs = (one.state[of[FROZEN]]["momentum_buffer"] for one, of in ((fresh, twins), (optimizer, params)))
    assert_same_bits([mine], [theirs])


def test_a_group_s_own_none_is_not_replaced_by_a_default() -> None:
    """None says something: this group's weights are not split, whatever the others are."""
    params = [nn.Parameter(torch.randn(32, 8)) for _ in range(2)]
    groups = [{"params": [p], "names": [str(k)], "use_muon": True} for k, p in enumerate(params)]
    groups[0]["split"] = None
    optimizer = Muon(groups, split=16)
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["split"] for group in optimizer.param_groups] == [None, 16]
