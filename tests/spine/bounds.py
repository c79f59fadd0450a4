"""How far rounding may lead in a case: from the oracle's own runs with rounding, and for AdamW from its formula."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from .case import Case, initial
from .oracle import Matrix, Oracle, Rounding

DRAWS = 4
ROOM = 4.0
"""Times the largest distance of all draws.

A library adds up in another order on each machine, and rounds at other places than the draws do. Each draw moves every
number by up to the largest rounding, and sums as if their roundings were independent. So the draws have the right size,
and not the exact value.
"""
LARGEST = {torch.float64: 0.01, torch.float32: 0.05, torch.bfloat16: 0.25}
"""Of the way that a weight has moved: what a wrong formula changes is larger."""


class Bounds:
    """Of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.exact = Oracle(case).run()

    @cached_property
    def _draws(self) -> list[Oracle]:
        return [Oracle(self.case, Rounding(seed)).run() for seed in range(DRAWS)]

    def check_weight(self, k: int, actual: Tensor, wanted: Tensor) -> None:
        """Demands that weight ``k`` of two runs of this case differs by rounding alone."""
        param = self.case.params[k]
        if param.kind == "adamw":
            apart = (actual.double() - wanted.double()).abs().nan_to_num()
            assert torch.equal(actual.isnan(), wanted.isnan())
            assert bool((apart <= self._adamw(k).nan_to_num()).all()), param.name
            return
        exact = self.exact.weights[k]
        allowed = ROOM * max(distance(draw.weights[k], exact) for draw in self._draws)
        assert allowed <= LARGEST[param.dtype] * _way(initial(self.case, k).double(), exact), (
            "rounding hides everything"
        )
        assert distance(actual.double(), wanted.double()) <= allowed, param.name

    def check_momentum(self, k: int, actual: Tensor) -> None:
        exact = self.exact.momenta[k]
        allowed = ROOM * max(distance(draw.momenta[k], exact) for draw in self._draws)
        assert distance(actual.double(), exact) <= allowed, self.case.params[k].name

    def check_memory(self, k: int, matrix: Matrix, actual: Tensor) -> None:
        """Of NorMuon."""
        exact = self.exact.memories[k, matrix]
        allowed = ROOM * max(distance(draw.memories[k, matrix], exact) for draw in self._draws)
        assert distance(actual.double(), exact) <= allowed, self.case.params[k].name

    def check_moments(self, k: int, actual: dict[str, Tensor]) -> None:
        """Of AdamW: each is a sum of two products, rounded a few times in each step."""
        adamw = self.exact.adamw[k]
        for key, value in adamw.state.get(adamw.param_groups[0]["params"][0], {}).items():
            allowed = 8 * self.case.steps * self._unit(k) * float(value.abs().nan_to_num().max())
            torch.testing.assert_close(actual[key], value, rtol=0, atol=allowed, equal_nan=True)

    def _unit(self, k: int) -> float:
        return torch.finfo(self.case.params[k].dtype).eps / 2

    def _adamw(self, k: int) -> Tensor:
        """A few units of each of the numbers in a step; random bits round twice as far.

        These are the weight and its update, which is at most the learning rate ÷ √(1 − β₂), about 4.5 times it. torch's
        own kernel rounds the elements of its last incomplete vector otherwise than the others.
        """
        largest = torch.maximum(initial(self.case, k).double().abs(), self.exact.weights[k].abs())
        return self.case.steps * self._unit(k) * (8 * largest + 64 * self.exact.highest_lr)


def distance(a: Tensor, b: Tensor) -> float:
    assert torch.equal(a.isnan(), b.isnan())
    return _way(a, b)


def _way(a: Tensor, b: Tensor) -> float:
    return float(((a - b).nan_to_num() ** 2).sum().sqrt())
