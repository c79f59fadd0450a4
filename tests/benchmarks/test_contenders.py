"""What speed claims rest on: contenders take turns, ratios are of one round, and all have made the same update
before.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from common import Goal, Step, quartiles, race, ratio
from contenders import (
    BF16,
    CONTENDERS,
    FLOOR,
    FP32,
    MODELS,
    OURS,
    QUICK_MODELS,
    SAME,
    TOLERANCE,
    Contender,
    Model,
    available,
    differences,
    enter,
)
from single_device import allocations_of, check
from torch import Tensor

MODEL = Model("mixed", "", ((24, 16), (16, 40), (3, 20, 12), (8, 4, 3, 3)), 6)
PLAIN = "Keller Jordan's, plain"
BY_NAME = {contender.name: contender for contender in CONTENDERS}


def test_those_that_can_run_make_the_same_update() -> None:
    shown: list[str] = []
    contenders = available(shown.append)
    names = {contender.name for contender in contenders}
    assert {FLOOR, *(contender.name for contender in CONTENDERS if not contender.package)} <= names
    apart = differences([enter(contender, MODEL) for contender in contenders])
    assert set(apart) == {contender.name for contender in contenders if contender.is_muon and contender.scheme == SAME}
    assert apart[OURS] == 0.0
    for contender in contenders:
        if contender.name in apart:
            assert apart[contender.name] <= TOLERANCE[contender.dtype], contender.name
        if contender.dtype == BF16:
            assert apart[contender.name] > TOLERANCE[FP32]  # else the tolerance of the others tells nothing
    assert len(shown) == len(CONTENDERS) - len(contenders), "those that are missing are named"


def _other_coefficients(x: Tensor) -> Tensor:
    gram = x @ x.mT
    return 2 * x - 1.5 * gram @ x + 0.5 * gram @ gram @ x


@pytest.mark.parametrize(
    "change",
    [
        {"original": False},
        {"decays_adjusted": True},
        {"make": partial(BY_NAME[PLAIN].make.func, iteration=_other_coefficients)},  # type: ignore[attr-defined]
    ],
    ids=["scale", "decay", "coefficients"],
)
def test_another_update_is_left_out(change: dict[str, object]) -> None:
    other: Contender = replace(BY_NAME[PLAIN], **change)  # type: ignore[arg-type]
    shown: list[str] = []
    kept, apart = check([enter(BY_NAME[OURS], MODEL), enter(other, MODEL)], shown.append)
    assert [entrant.contender.name for entrant in kept] == [OURS]
    assert apart[PLAIN] > TOLERANCE[FP32]
    assert "left out" in shown[0]


def test_everyone_starts_from_the_same_weights_and_gradients() -> None:
    ours, theirs = (enter(BY_NAME[name], MODEL) for name in (OURS, PLAIN))
    assert all(map(torch.equal, ours.matrices(), theirs.matrices()))
    before = [param.grad.clone() for param in theirs.params if param.grad is not None]
    for param in theirs.params:
        assert param.grad is not None
        param.grad.zero_()
    theirs.step.before()
    assert all(map(torch.equal, (param.grad for param in theirs.params), before))


@pytest.mark.parametrize("model", [*MODELS, *QUICK_MODELS], ids=lambda model: model.name)
def test_models_are_matrices(model: Model) -> None:
    assert sum(math.prod(shape) for shape in model.shapes) == sum(rows * cols for rows, cols in model.matrices)


def test_allocations_are_counted() -> None:
    kept: list[Tensor] = []

    def step() -> None:
        kept.append(torch.ones(1000))
        torch.ones(500)

    taken = allocations_of(step)
    assert taken.count == 2
    assert 4000 + 2000 <= taken.peak <= taken.nbytes < 8000


def test_contenders_take_turns_in_an_order_that_changes() -> None:
    order: list[str] = []
    steps = {name: Step(lambda name=name: order.append(name), lambda: None) for name in "abc"}  # type: ignore[misc]
    race(steps, 11, warmups=1)
    rounds = [order[k : k + 3] for k in range(0, 36, 3)]
    assert [sorted(names) for names in rounds] == [["a", "b", "c"]] * 12
    assert len({tuple(names) for names in rounds}) > 3
    race(steps, 11, warmups=1)
    assert order[:36] == order[36:], "ranks must agree on it"


def test_ratios_goals_and_medians() -> None:
    halves = ratio([1.0, 10.0, 100.0], [2.0, 20.0, 200.0])
    assert (halves.median, halves.low, halves.high, halves.count) == (0.5, 0.5, 0.5, 3)
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]).median == 3.0
    goals = [
        Goal("a", 0.5, most=0.5),
        Goal("a", 0.51, most=0.5),
        Goal("a", 0.9, least=0.9),
        Goal("a", math.nan, most=1),
    ]
    assert [goal.verdict for goal in goals] == ["reached", "missed", "reached", "not measured"]
