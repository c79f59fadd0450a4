"""100,000 matrices on 2,048 ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshmuon.layout import Layout, Sharded
from meshmuon.plan import Plan, PlannedParam, PlanOptions, cost_model_for, make_plan, routes_of
from tests.support.plans import line

RANKS, MATRICES = 2048, 100_000
MOST_MEGABYTES = 400
ROOT = Path(__file__).parents[2]
SHAPES = [(rows, cols) for rows in (1024, 2048, 4096, 768, 1536, 1000) for cols in (1024, 2048, 4096, 8192, 100)]


def large_plan() -> Plan:
    mesh = line(RANKS)
    layouts = [(Layout(shape, mesh, (Sharded(0),)),) for shape in SHAPES]
    flops = [30 * min(shape) ** 2 * max(shape) for shape in SHAPES]
    entries = [
        PlannedParam(f"layers.{k}.weight", layouts[k % len(SHAPES)], 0, "bf16", 2, flops[k % len(SHAPES)])
        for k in range(MATRICES)
    ]
    return make_plan(entries, PlanOptions(cost_model_for("cuda")))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_a_hundred_thousand_matrices() -> None:
    """In a process of its own, whose peak the system knows; tracing every allocation takes four times as long.

    Not by ``ru_maxrss``: a child inherits its parent's.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.test_scale"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 20 < int(done.stdout) <= MOST_MEGABYTES


def kilobytes(what: str) -> int:
    found = re.search(rf"^{what}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def main() -> None:
    before = kilobytes("VmRSS")
    plan = large_plan()
    assert len(plan.tasks) == MATRICES
    # 1,024 rows and fewer lie on the first ranks only; placed first, they leave room for balance.
    assert max(plan.loads.values()) <= 1.01 * plan.bound
    assert len(plan.digest) == 64
    assert plan.describe().endswith("more ranks")  # by kinds of ranks and matrices: all pairs would take minutes
    assert sum(plan.bytes_sent.values()) > 0
    routes = routes_of(plan, RANKS // 2)
    assert len(routes) == len(plan.wave_lanes)
    owned = sum(len(wave.owned_tasks) for wave in routes)
    assert owned == sum(task.owner == RANKS // 2 for task in plan.tasks)
    print((kilobytes("VmHWM") - before) // 1024)


if __name__ == "__main__":
    main()
