"""What rounding on the wire costs in loss: the demos in full precision, and with matrices sent as bfloat16 and as int8.

A pair is of dtypes to the owners and back. The runs are of one process, whose reference path rounds as if it sent:
every layout that sends has its bits.

python benchmarks/loss_by_wire.py
python benchmarks/loss_by_wire.py --seeds 0 1 --steps 100 --lrs 0.016
"""

from __future__ import annotations

import statistics

from common import Goal
from demo_losses import DENSE, EXPERTS, Comparison, Results, cases, differences, spread

REFERENCE = "float32"
WIRES = {
    REFERENCE: (),
    "bfloat16": ("--wire", "bfloat16"),
    "(bfloat16, int8)": ("--wire", "bfloat16-int8"),
    "int8": ("--wire", "int8"),
}
LRS = (0.016, 0.004)


def goals_of(results: Results) -> list[Goal]:
    """Rounding costs no more than noise."""
    goals = []
    for demo, lr, wire in cases(results):
        if wire != REFERENCE:
            apart = differences(results, lr, wire, REFERENCE, demo)
            text = f"{demo}, lr {lr:g}: loss with {wire} minus that in {REFERENCE}, in standard errors"
            goals.append(Goal(text, statistics.mean(apart) / spread(apart), most=2.0))
    return goals


if __name__ == "__main__":
    Comparison("loss_by_wire", __doc__, WIRES, LRS, goals_of, seeds=5, steps=300, demos=(DENSE, EXPERTS)).main()
