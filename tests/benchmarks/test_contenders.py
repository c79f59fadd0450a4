"""Before anyone is timed, all have made the same update, and whoever has not is left out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import single_device
import torch
from contenders import BF16, CONTENDERS, FLOOR, FP32, OURS, SAME, TOLERANCE, Contender, available, differences, enter
from memory import allocations_of
from models import MODELS, QUICK_MODELS, Model
from single_device import check, orthogonalisation_alone
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from meshmuon import keller
from meshmuon.ortho import expected_flops

MODEL = Model("mixed", "", ((24, 16), (16, 40), (3, 20, 12), (8, 4, 3, 3)), 6)
BY_NAME = {contender.name: contender for contender in CONTENDERS}


def test_those_that_can_run_make_the_same_update() -> None:
    shown: list[str] = []
    contenders = available(shown.append)
    apart = differences([enter(contender, MODEL) for contender in contenders])
    assert set(apart) == {contender.name for contender in contenders if contender.is_muon and contender.scheme == SAME}
    assert apart[OURS] == 0.0
    for contender in contenders:
        if contender.name in apart:
            assert apart[contender.name] <= TOLERANCE[contender.dtype], contender.name
        if contender.dtype == BF16:
            assert apart[contender.name] > TOLERANCE[FP32]  # else the tolerance of the others tells nothing
    missing = {contender.name for contender in CONTENDERS} - {contender.name for contender in contenders}
    assert len(shown) == len(missing)
    assert all(any(line.startswith(name) for line in shown) for name in missing)


def test_a_baseline_without_a_package_is_never_missing() -> None:
    names = {contender.name for contender in available(lambda text: None)}
    assert {contender.name for contender in CONTENDERS if not contender.package} <= names
    assert FLOOR in names


def _other_coefficients(x: Tensor) -> Tensor:
    gram = x @ x.mT
    return 2 * x - 1.5 * gram @ x + 0.5 * gram @ gram @ x


@pytest.mark.parametrize(
    "change",
    [
        {"original": False},
        {"decays_adjusted": True},
        {"make": partial(BY_NAME["naive"].make.func, iteration=_other_coefficients)},  # type: ignore[attr-defined]
    ],
    ids=["scale", "decay", "coefficients"],
)
def test_another_update_is_left_out(change: dict[str, object]) -> None:
    other: Contender = replace(BY_NAME["naive"], **change)  # type: ignore[arg-type]
    shown: list[str] = []
    kept, apart = check([enter(BY_NAME[OURS], MODEL), enter(other, MODEL)], shown.append)
    assert [entrant.contender.name for entrant in kept] == [OURS]
    assert apart["naive"] > TOLERANCE[FP32]
    assert "left out" in shown[0]


def test_everyone_starts_from_the_same_weights() -> None:
    ours, theirs = (enter(BY_NAME[name], MODEL) for name in (OURS, "naive"))
    assert len(ours.params) == 4
    assert len(theirs.params) == 6
    for matrix, other in zip(ours.matrices(), theirs.matrices(), strict=True):
        assert torch.equal(matrix, other)


def test_gradients_are_fresh_in_every_round() -> None:
    entrant = enter(BY_NAME["naive"], MODEL)
    before = [param.grad.clone() for param in entrant.params if param.grad is not None]
    for param in entrant.params:
        assert param.grad is not None
        param.grad.zero_()
    entrant.step.before()
    assert all(param.grad is not None and torch.equal(param.grad, g) for param, g in zip(entrant.params, before, strict=True))


@pytest.mark.parametrize("model", [*MODELS, *QUICK_MODELS], ids=lambda model: model.name)
def test_models_are_matrices(model: Model) -> None:
    total = sum(torch.Size(shape).numel() for shape in model.shapes)
    assert total == sum(rows * cols for rows, cols in model.matrices)
    assert model.count >= len(model.matrices)


def test_allocations_are_counted() -> None:
    kept: list[Tensor] = []

    def step() -> None:
        kept.append(torch.ones(1000))
        torch.ones(500)
        torch.tensor(1.0)

    taken = allocations_of(step)
    assert taken.count == 2
    assert taken.numbers >= 1
    assert 4000 + 2000 <= taken.peak <= taken.nbytes < 8000


@pytest.mark.parametrize("budget", [1, 2**20], ids=["one at a time", "at once"])
def test_orthogonalisation_alone_takes_all_matrices(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_device, "DEFAULT_MEMORY_BUDGET", budget)
    alone = orthogonalisation_alone(MODEL)
    alone.run()  # forms are found by simulation when they are first asked for
    with FlopCounterMode(display=False) as counter:
        alone.run()
    expected = sum(expected_flops(rows, cols, keller(), "auto", torch.float32) for rows, cols in MODEL.matrices)
    assert counter.get_total_flops() == expected
