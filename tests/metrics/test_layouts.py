"""The same metrics on every layout, and the same bits of the weights as without them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings

from meshmuon import Muon
from meshmuon.metrics import Metrics
from tests.support.cases import Case, as_parameter, check, gradient, initial, run, single
from tests.support.random_layouts import Layouts, cases
from tests.support.threads import run_threads

MEASURED = Metrics(every=1, iterations=4)
LAYOUT_FREE = ("step", "skipped", "skipped_steps", "weight_half_iterations", "matrices", "adamw", "groups", "kinds")


def near(found: Any, expected: Any, where: str = "") -> None:
    """Within 1e-5 of one device, or of what the matrix's largest number can resolve."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key in expected:
            near(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-6), (where, found, expected)
    else:
        assert found == expected, where


def measured(case: Case, metrics: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Options under which every step is measured and noted."""

    def watch(optimizer: Muon) -> None:
        content = optimizer.metrics()
        metrics.append({key: content[key] for key in LAYOUT_FREE} if content else {})

    return {**options, "metrics": MEASURED, "watch": watch}


def run_case(case: Case, layouts: Layouts, *, replica_group: bool = False) -> None:
    """Compares all metrics of all steps on all ranks with those of one device, and the weights with unmeasured ones."""
    torch.set_num_threads(case.threads)
    unmeasured = single(case)
    expected: list[dict[str, Any]] = []
    values = [as_parameter(value, not param.frozen) for value, param in zip(initial(case), case.params, strict=True)]
    run(case, values, lambda step, k: gradient(case, step, k), **measured(case, expected))

    def main(rank: int) -> None:
        found: list[dict[str, Any]] = []
        options = {"replica_group": dist.group.WORLD} if replica_group else {}
        check(case, layouts.build(), unmeasured, **measured(case, found, **options))
        for step, (one, other) in enumerate(zip(found, expected, strict=True)):
            near(one, other, f"rank {rank}, step {step}")

    run_threads(layouts.world, main)


@settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(cases())
def test_random_layouts_measure_what_one_device_does(drawn: tuple[Case, Layouts, bool]) -> None:
    case, layouts, replica_group = drawn
    run_case(replace(case, steps=3), layouts, replica_group=replica_group)
