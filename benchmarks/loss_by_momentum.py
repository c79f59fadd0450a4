"""What the dtype of momentum costs in loss: the demo with float32 weights, and with momentum in float32, bfloat16 and
int8.

python benchmarks/loss_by_momentum.py
python benchmarks/loss_by_momentum.py --seeds 0 1 --steps 100 --lrs 0.016
"""

from __future__ import annotations

import statistics

from common import Goal
from demo_losses import Comparison, Results, differences, spread

REFERENCE = "float32"
DTYPES = {dtype: ("--momentum-dtype", dtype) for dtype in (REFERENCE, "bfloat16", "int8")}
LRS = (0.016, 0.004)


def goals_of(results: Results) -> list[Goal]:
    """int8 costs no more than noise."""
    goals = []
    for lr in dict.fromkeys(result["lr"] for result in results):
        apart = differences(results, lr, "int8", REFERENCE)
        text = f"lr {lr:g}: loss with momentum in int8 minus that in {REFERENCE}, in standard errors"
        goals.append(Goal(text, statistics.mean(apart) / spread(apart), most=2.0))
    return goals


if __name__ == "__main__":
    Comparison("loss_by_momentum", __doc__, DTYPES, LRS, goals_of, seeds=3, steps=400).main()
