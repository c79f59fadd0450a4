"""One device against Muon written plainly, within what rounding explains."""

from __future__ import annotations

import pytest

from .bounds import Bounds
from .cases import FEATURES
from .oracle import matrices
from .run import assembled, run

NOT_KNOWN = ("defaults", "experts, defaults", "own gradients, defaults")  # they take what this machine is fast with


@pytest.mark.filterwarnings("ignore::meshmuon.OptionNameWarning")  # positional names of Motif's optimizer
@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in NOT_KNOWN])
def test_one_device_follows_the_formulas(feature: str) -> None:
    case = FEATURES[feature]
    outcome, bounds = run(case), Bounds(case)
    tensors, exact = assembled([outcome]), bounds.exact
    assert outcome.facts["skipped steps"] == exact.skipped
    assert exact.smallest_cautious > 1e-5  # no rounding turns a decision of cautious decay
    for k, param in enumerate(case.params):
        state = {key: value for (name, key), value in tensors.items() if name == param.name}
        bounds.check_weight(k, state["weight"], exact.weights[k])
        if param.kind == "adamw":
            bounds.check_moments(k, state)
        elif k in exact.touched:
            bounds.check_momentum(k, state["momentum_buffer"])
        kept = [matrix for matrix in matrices(param) if (k, matrix) in exact.memories]
        assert bool(kept) == ("rule_memory" in state)
        for matrix in kept:
            per_input = exact.memories[k, matrix].shape != (len(matrix.rows), 1)
            bounds.check_memory(k, matrix, state["rule_memory"] if per_input else matrix.read(state["rule_memory"]))
