"""One device against Muon written plainly, within what rounding explains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .case import Case, initial
from .cases import FEATURES
from .oracle import Oracle, Rounding, matrices
from .run import assembled, run

DRAWS = 4
ROOM = 4.0
"""Times the largest distance of all draws.

A library adds up in another order on each machine, and rounds at other places than the draws do; each draw bounds every
single rounding by its largest, as a sum of independent ones. So the draws have the right size, and not the exact value.
"""
LARGEST = {torch.float64: 0.01, torch.float32: 0.05, torch.bfloat16: 0.25}
"""Of the way that a weight has moved: what a wrong formula changes is larger."""

NOT_KNOWN = ("defaults", "experts, defaults", "own gradients, defaults")  # they take what this machine is fast with


def distance(a: Tensor, b: Tensor) -> float:
    assert torch.equal(a.isnan(), b.isnan())
    return way(a, b)


def way(a: Tensor, b: Tensor) -> float:
    return float(((a - b).nan_to_num() ** 2).sum().sqrt())


@pytest.mark.filterwarnings("ignore::meshmuon.OptionNameWarning")  # positional names of Motif's optimizer
@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in NOT_KNOWN])
def test_one_device_follows_the_formulas(feature: str) -> None:
    case = FEATURES[feature]
    outcome = run(case)
    actual, exact = assembled([outcome]), Oracle(case).run()
    draws = [Oracle(case, Rounding(seed)).run() for seed in range(DRAWS)]
    assert outcome.facts["skipped steps"] == exact.skipped
    assert exact.smallest_cautious > 1e-5  # no rounding turns a decision of cautious decay
    for k, param in enumerate(case.params):
        weight = actual[param.name, "weight"].double()
        if param.kind == "adamw":
            check_adamw(case, k, actual, exact)
            continue
        allowed = ROOM * max(distance(draw.weights[k], exact.weights[k]) for draw in draws)
        assert allowed <= LARGEST[param.dtype] * way(initial(case, k).double(), exact.weights[k]), (
            "rounding hides everything"
        )
        assert distance(weight, exact.weights[k]) <= allowed, param.name
        if k not in exact.touched:
            continue
        allowed = ROOM * max(distance(draw.momenta[k], exact.momenta[k]) for draw in draws)
        assert distance(actual[param.name, "momentum_buffer"].double(), exact.momenta[k]) <= allowed, param.name
        check_memory(case, k, actual, exact, draws)


def check_memory(case: Case, k: int, actual: dict[tuple[str, str], Tensor], exact: Oracle, draws: list[Oracle]) -> None:
    """NorMuon's running means."""
    param = case.params[k]
    found = actual.get((param.name, "rule_memory"))
    kept = [matrix for matrix in matrices(param) if (k, matrix) in exact.memories]
    assert (found is None) == (not kept)
    for matrix in kept:
        assert found is not None
        wanted = exact.memories[k, matrix]
        per_input = wanted.size(0) == 1 and wanted.size(1) > 1
        value = (found if per_input else matrix.read(found)).double()
        allowed = ROOM * max(distance(draw.memories[k, matrix], wanted) for draw in draws)
        assert distance(value, wanted) <= allowed, param.name


def check_adamw(case: Case, k: int, actual: dict[tuple[str, str], Tensor], exact: Oracle) -> None:
    """Elements of torch's last incomplete vector may be rounded otherwise, by a few units of each of the numbers in a
    step.

    These are the weight, and its update of at most 1/√(1 − β₂) times the learning rate. Random bits round twice as far.
    """
    param, weight = case.params[k], exact.weights[k]
    unit = torch.finfo(param.dtype).eps / 2
    size = torch.maximum(initial(case, k).double().abs(), weight.abs())
    allowed = case.steps * unit * (8 * size + 64 * 0.015)
    found = actual[param.name, "weight"].double()
    assert torch.equal(found.isnan(), weight.isnan())
    assert bool(((found - weight).abs().nan_to_num() <= allowed.nan_to_num()).all()), param.name
    state = exact.adamw[k].state.get(exact.adamw[k].param_groups[0]["params"][0], {})
    for key, value in state.items():
        torch.testing.assert_close(actual[param.name, key], value, rtol=8 * unit * case.steps, atol=0, equal_nan=True)
