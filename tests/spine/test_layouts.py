"""Every layout ends with the bits of one device: weights, all state, skipped steps."""

from __future__ import annotations

from functools import cache

import pytest
from torch import Tensor

from .cases import CASES, FEATURES, LAYOUTS
from .ranks import Ranks
from .run import Outcome, assembled, run, same_bits


@cache
def one_device(feature: str) -> tuple[dict[tuple[str, str], Tensor], Outcome]:
    case = next(case for name, case in CASES.items() if name.split(" | ")[0] == feature)
    outcome = run(case.on_one_device)
    return assembled([outcome]), outcome


@pytest.mark.filterwarnings("ignore::meshmuon.OptionNameWarning")  # positional names of Motif's optimizer
@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_one_device(name: str, ranks: Ranks) -> None:
    case = CASES[name]
    outcomes = ranks.run(case.layout.world, run, case, backend=case.layout.backend)
    tensors, expected = one_device(name.split(" | ")[0])
    actual = assembled(outcomes)
    assert set(actual) == set(tensors)
    different = {
        " ".join(key): _apart(actual[key], value) for key, value in tensors.items() if not same_bits(actual[key], value)
    }
    assert not different
    for outcome in outcomes:
        assert outcome.facts["skipped steps"] == expected.facts["skipped steps"]
        assert outcome.facts["digest"] == outcomes[0].facts["digest"]


def test_every_feature_and_every_layout_is_in_some_case() -> None:
    assert {name.split(" | ")[0] for name in CASES} == set(FEATURES)
    assert {name.split(" | ")[1] for name in CASES} == set(LAYOUTS)


def _apart(a: Tensor, b: Tensor) -> str:
    return f"{a.dtype} is not {b.dtype}" if a.dtype != b.dtype else f"{(a.double() - b.double()).abs().max():g}"
