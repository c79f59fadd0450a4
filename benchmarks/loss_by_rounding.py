"""What bfloat16 weights cost in loss: the demo with float32 weights, and with bfloat16 weights rounded in either way.

The model computes in float32 throughout; only weights, gradients, momentum and moments are bfloat16, and there is no
float32 copy of the weights.

    python benchmarks/loss_by_rounding.py
    python benchmarks/loss_by_rounding.py --seeds 0 1 --steps 100 --lrs 0.016
"""

from __future__ import annotations

import statistics

from common import Goal
from demo_losses import Comparison, Results, differences

REFERENCE, NEAREST, STOCHASTIC = "float32", "bfloat16, nearest", "bfloat16, stochastic"
WEIGHTS = {
    REFERENCE: ("--weights", "float32"),
    NEAREST: ("--weights", "bfloat16", "--rounding", "nearest"),
    STOCHASTIC: ("--weights", "bfloat16", "--rounding", "stochastic"),
}
LRS = (0.016, 0.002)


def goals_of(results: Results) -> list[Goal]:
    """Stochastic rounding costs less than rounding to nearest."""
    return [
        Goal(
            f"lr {lr:g}: loss of {STOCHASTIC} minus that of {NEAREST}",
            statistics.mean(differences(results, lr, STOCHASTIC, NEAREST)),
            most=0.0,
        )
        for lr in dict.fromkeys(result["lr"] for result in results)
    ]


if __name__ == "__main__":
    Comparison("loss_by_rounding", __doc__, WEIGHTS, LRS, goals_of, seeds=3, steps=400).main()
