"""What int8 on the wire costs in loss: the demo in full precision, with updates sent as int8, and with all sent as int8.

The runs are of one process, whose reference path rounds as if it sent: every layout that sends has its bits.

python benchmarks/loss_by_wire.py
python benchmarks/loss_by_wire.py --seeds 0 1 --steps 100 --lrs 0.016
"""

from __future__ import annotations

import statistics

from common import Goal
from demo_losses import Comparison, Results, differences, spread

REFERENCE = "float32"
WIRES = {REFERENCE: (), "int8 scatter": ("--wire", "int8-scatter"), "int8": ("--wire", "int8")}
LRS = (0.016, 0.004)


def goals_of(results: Results) -> list[Goal]:
    """int8 costs no more than noise."""
    goals = []
    for lr in dict.fromkeys(result["lr"] for result in results):
        for wire in list(WIRES)[1:]:
            apart = differences(results, lr, wire, REFERENCE)
            text = f"lr {lr:g}: loss with {wire} minus that in {REFERENCE}, in standard errors"
            goals.append(Goal(text, statistics.mean(apart) / spread(apart), most=2.0))
    return goals


if __name__ == "__main__":
    Comparison("loss_by_wire", __doc__, WIRES, LRS, goals_of, seeds=5, steps=300).main()
