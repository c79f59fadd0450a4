"""What a scheme costs in loss, beside ``polar_express``: the demo over several seeds and learning rates.

Times are not compared here: ``schemes.py`` does that.

    python benchmarks/loss_by_scheme.py
    python benchmarks/loss_by_scheme.py --seeds 0 1 2 --steps 100
"""

from __future__ import annotations

import statistics

from common import Goal
from demo_losses import Comparison, Results, differences, spread

REFERENCE = "polar_express"
SCHEMES = {scheme: ("--scheme", scheme) for scheme in (REFERENCE, "keller", "zolotarev", "hybrid", "halley")}
LRS = (0.016, 0.032)


def goals_of(results: Results) -> list[Goal]:
    """No scheme costs more than noise."""
    goals = []
    for lr in dict.fromkeys(result["lr"] for result in results):
        for scheme in list(SCHEMES)[1:]:
            apart = differences(results, lr, scheme, REFERENCE)
            text = f"lr {lr:g}: loss of {scheme} minus {REFERENCE}'s, in standard errors"
            goals.append(Goal(text, statistics.mean(apart) / spread(apart), most=2.0))
    return goals


if __name__ == "__main__":
    Comparison("loss_by_scheme", __doc__, SCHEMES, LRS, goals_of, seeds=5, steps=400).main()
