"""``rounding="stochastic"`` in whole steps: bits, state, checkpoints, refusals. Layouts are drawn in
tests/dist/test_cases.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon import ConfigError, Muon, RoutingWarning, StateError
from meshmuon.execute import RoundingScratch
from meshmuon.optim.adamw import _step_stochastically
from tests.support.reference import (
    LR,
    adamw,
    assert_same_bits,
    copies,
    gradients,
    group,
    make_params,
    run,
    set_gradients,
)

COUNTER = "rounding_counter"
SHAPES = ((8, 12), (12, 8), (3, 6, 4), (5,), (7, 2))
HALF = torch.bfloat16


def build(params: Sequence[Tensor], **options: Any) -> Muon:
    """Matrices and experts in Muon, the last two parameters in AdamW."""
    written = [
        group(params[:3], prefix="experts", expert_keys=["experts"]),
        group(params[3:], use_muon=False, prefix="norms"),
    ]
    return Muon(written, **{"lr": LR, "rounding": "stochastic", **options})


def counts(optimizer: Muon, params: Sequence[Tensor]) -> list[int]:
    return [int(optimizer.state[param][COUNTER][1]) for param in params]


def test_every_parameter_counts_its_steps_with_a_key_of_its_own() -> None:
    params = make_params(*SHAPES, dtype=HALF)
    optimizer = build(params)
    run(optimizer, params, range(3))
    assert counts(optimizer, params) == [3] * 5
    keys = [int(optimizer.state[param][COUNTER][0]) for param in params]
    assert len(set(keys)) == 5
    assert min(keys) > 1 << 40  # hashes of names, not small numbers
    again = make_params(*SHAPES, dtype=HALF)
    other = build(again)
    run(other, again, range(3))
    assert_same_bits(again, params)
    assert [int(other.state[param][COUNTER][0]) for param in again] == keys


def test_what_is_not_stepped_is_not_counted() -> None:
    """Neither a skipped step nor a refused one; of parameters without gradients see below."""
    params = make_params(*SHAPES, dtype=HALF)
    optimizer = build(params, nonfinite="skip")
    run(optimizer, params, range(2))
    grads = gradients(params, 3)
    grads[1].view(-1)[0] = torch.inf
    set_gradients(params, grads)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    optimizer.param_groups[0]["lr"] = -1.0
    set_gradients(params, gradients(params, 4))
    with pytest.raises(ConfigError):
        optimizer.step()
    assert counts(optimizer, params) == [2] * 5


def test_a_first_step_that_only_creates_state_counts_nothing() -> None:
    params = make_params(*SHAPES, dtype=HALF)
    optimizer = build(params, lr=0.0)
    set_gradients(params, [torch.zeros_like(param) for param in params])
    optimizer.step()
    assert counts(optimizer, params) == [0] * 5


def test_it_can_be_turned_on_and_off_between_steps() -> None:
    params = make_params(*SHAPES, dtype=HALF)
    optimizer = build(params, rounding="nearest")
    run(optimizer, params, range(1))
    assert all(COUNTER not in optimizer.state[param] for param in params)
    for rounding, expected in (("stochastic", 1), ("nearest", 1), ("stochastic", 2)):
        for one in optimizer.param_groups:
            one["rounding"] = rounding
        run(optimizer, params, range(1, 2))
        assert counts(optimizer, params) == [expected] * 5


WRONG = {
    "has one number": (torch.tensor([3]), r"its saved rounding_counter is a tensor of shape \(1,\)"),
    "is rounded": (torch.tensor([3.0, 1.0]), "it must be a tensor of shape .* in torch.int64"),
    "counts backwards": (torch.tensor([3, -1]), "has the count -1"),
    "is a list": ([3, 1], "is a list"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("key", [0, 3])
def test_a_wrong_counter_is_refused(what: str, key: int) -> None:
    params = make_params(*SHAPES, dtype=HALF)
    optimizer = build(params)
    run(optimizer, params, range(2))
    saved = optimizer.state_dict()
    value, message = WRONG[what]
    saved["state"][key] = {**saved["state"][key], COUNTER: value}
    before = [param.detach().clone() for param in params]
    with pytest.raises(StateError, match=message):
        optimizer.load_state_dict(saved)
    assert_same_bits(params, before)
    optimizer.state[params[key]][COUNTER] = value
    set_gradients(params, gradients(params, 2))
    with pytest.raises(StateError, match="rounding_counter"):
        optimizer.step()


@pytest.mark.parametrize("use_muon", [True, False])
def test_float16_is_refused(use_muon: bool) -> None:
    params = make_params((4, 6), dtype=torch.float16)
    with pytest.raises(ConfigError, match=r'\.0\.weight is float16, and rounding="stochastic" is for bfloat16'):
        Muon([group(params, use_muon=use_muon)], rounding="stochastic")
    optimizer = Muon([group(params, use_muon=use_muon)], allow_inactive=True)
    run(optimizer, params, range(1))
    optimizer.param_groups[0]["rounding"] = "stochastic"
    before = params[0].detach().clone()
    set_gradients(params, gradients(params, 1))
    with pytest.raises(ConfigError, match="is float16"):
        optimizer.step()
    assert torch.equal(params[0], before)


def test_other_dtypes_are_rounded_as_ever() -> None:
    """It has no effect on them, and says so if there is nothing that it could have an effect on."""
    params, expected = make_params(*SHAPES), make_params(*SHAPES)
    with pytest.warns(RoutingWarning, match='rounding="stochastic" has no effect: .* and these are float32'):
        optimizer = build(params)
    oracle = build(expected, rounding="nearest")
    for one, weights in ((optimizer, params), (oracle, expected)):
        run(one, weights, range(3))
    assert_same_bits(params, expected)
    assert all(COUNTER not in optimizer.state[param] for param in params)
    mixed = [
        *make_params((8, 12), dtype=HALF),
        *make_params((12, 8), (3, 6, 4), (5,)),
        *make_params((7, 2), dtype=HALF),
    ]
    optimizer = build(mixed)  # no warning
    run(optimizer, mixed, range(1))
    assert [COUNTER in optimizer.state[param] for param in mixed] == [True, False, False, False, True]


# AdamW.

ADAMW_SHAPES = ((37,), (9, 70), (300, 301))


def neighbours(exact: Tensor) -> Tensor:
    """The distance between the bfloat16 numbers around each number."""
    return torch.exp2(torch.frexp(exact).exponent.float() - 8)


@pytest.mark.parametrize(
    "options", [{}, {"maximize": True}, {"weight_decay": 0.0}, {"lr": torch.tensor(0.03)}], ids=str
)
def test_adamw_is_float32_rounded_once(options: dict[str, Any]) -> None:
    """Against torch's fused step on float32 copies of parameter, gradient and moments, at every step."""
    for rounding in ("nearest", "stochastic"):
        params = make_params(*ADAMW_SHAPES, dtype=HALF)
        optimizer = adamw(params, **{"lr": 0.01, **options}, rounding=rounding)
        for step in range(4):
            wide = [nn.Parameter(param.detach().float()) for param in params]
            oracle = adamw(wide, **{"lr": 0.01, **options})
            grads = gradients(params, step)
            for param, copied in zip(params, wide, strict=True):
                entry = optimizer.state.get(param, {})
                if entry:
                    oracle.state[copied] = {k: v.float().clone() for k, v in entry.items() if k != COUNTER}
            before = [oracle.state[copied].get("exp_avg", torch.zeros(())).clone() for copied in wide]
            set_gradients(params, grads)
            set_gradients(wide, [grad.float() for grad in grads])
            optimizer.step()
            oracle.step()
            for param, copied, grad, mean in zip(params, wide, grads, before, strict=True):
                exact, entry, wanted = copied.detach(), optimizer.state[param], oracle.state[copied]
                # roundings on the way: of weights, and of steps of at most 0.1
                in_float32 = 8 * 2**-24 * (exact.abs() + 0.1)
                bound = neighbours(exact) * (1.0 if rounding == "stochastic" else 0.5) + in_float32
                assert bool(((param.detach().float() - exact).abs() <= bound).all())
                for key, size in (("exp_avg", mean.abs() + grad.float().abs()), ("exp_avg_sq", wanted["exp_avg_sq"])):
                    bound = 0.5 * neighbours(wanted[key]) + 8 * 2**-24 * size
                    assert bool(((entry[key].float() - wanted[key]).abs() <= bound).all())
                assert float(entry["step"]) == float(wanted["step"])


def test_adamw_decays_on_average() -> None:
    """lr·weight_decay = 2⁻¹⁰: to nearest nothing happens; stochastically the mean follows float32."""
    found = {}
    for rounding in ("nearest", "stochastic"):
        param = nn.Parameter(torch.ones(100, 100, dtype=HALF))
        optimizer = adamw([param], lr=2**-10, weight_decay=1.0, rounding=rounding)
        for _ in range(256):
            param.grad = torch.zeros_like(param)
            optimizer.step()
        found[rounding] = param.detach().double()
    assert bool((found["nearest"] == 1).all())
    values = found["stochastic"]
    assert abs(float(values.mean()) - (1 - 2**-10) ** 256) <= 5 * float(values.std()) / 100


def test_an_idle_parameter_neither_counts_nor_changes() -> None:
    """A parameter without a gradient stays in the plan; when its gradient comes back it goes on as if the step had
    not been.
    """
    params = make_params(*SHAPES, dtype=HALF)
    optimizer = build(params)
    for step in range(4):
        set_gradients(params, gradients(params, step))
        before = [param.detach().clone() for param in params]
        if step == 2:
            params[1].grad = params[4].grad = None
        optimizer.step()
        unchanged = [torch.equal(param.detach(), value) for param, value in zip(params, before, strict=True)]
        assert unchanged == [step == 2 and k in (1, 4) for k in range(5)]
    assert counts(optimizer, params) == [4, 3, 4, 4, 3]
    fresh = make_params(*SHAPES, dtype=HALF)
    alone = build(fresh)
    for step in (0, 1, 3):
        set_gradients(fresh, gradients(fresh, step))
        alone.step()
    assert_same_bits([params[1], params[4]], [fresh[1], fresh[4]])


def test_state_without_a_counter_is_loaded_and_counts_from_zero() -> None:
    """A frozen parameter has none when rounding is switched on; a float32 checkpoint has none at all."""
    params = make_params(*SHAPES, dtype=HALF)
    optimizer = build(params, rounding="nearest")
    run(optimizer, params, range(2))
    params[0].requires_grad_(False)
    for param_group in optimizer.param_groups:
        param_group["rounding"] = "stochastic"
    set_gradients(params, [None, *gradients(params, 2)[1:]])
    optimizer.step()
    saved = optimizer.state_dict()
    assert COUNTER not in saved["state"][0]
    again = copies(params)
    loaded = build(again)
    loaded.load_state_dict(saved)
    run(loaded, again, range(3, 5))
    assert counts(loaded, again) == [2, 3, 3, 3, 3]


@torch.no_grad()
def test_a_first_step_that_a_device_skips_changes_nothing() -> None:
    """The count of steps is then 0 on the host, and AdamW's bias correction with it."""
    param = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = Muon(
        [{"params": [param], "names": ["norm"], "use_muon": False}], rounding="stochastic", allow_inactive=True
    )
    optimizer.step()
    param.grad = torch.ones_like(param)
    state, before = optimizer.state[param], param.detach().clone()
    moments = state["exp_avg"].clone()
    state["step"].zero_()
    _step_stochastically(optimizer.param_groups[0], (param, param.grad, state), RoundingScratch(), torch.tensor(True))
    assert torch.equal(param, before)
    assert torch.equal(state["exp_avg"], moments)
    assert state["step"].item() == 0
