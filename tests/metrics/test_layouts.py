"""The same metrics on every layout, and the same bits of the weights as without them."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from torch.distributed.tensor import Replicate, Shard

from meshmuon import DistMuon, Interleaved, Muon, NorMuon, PlanMismatchError
from meshmuon.metrics.spectra import tridiagonalise
from tests.support.cases import Case, Param, as_parameter, check, gradient, initial, run, sharded, single
from tests.support.collectives import counted_collectives
from tests.support.random_layouts import Layouts, cases
from tests.support.threads import run_threads


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
        metrics.append(optimizer.metrics())

    return {**options, "metrics": 1, "watch": watch}


def run_case(case: Case, layouts: Layouts, *, replica_group: bool = False, use_distributed_muon: bool = False) -> None:
    """Compares all metrics of all steps on all ranks with those of one device, and the weights with unmeasured ones."""
    torch.set_num_threads(case.threads)
    unmeasured = single(case)
    expected: list[dict[str, Any]] = []
    values = [as_parameter(value, not param.frozen) for value, param in zip(initial(case), case.params, strict=True)]
    run(case, values, lambda step, k: gradient(case, step, k), **measured(case, expected))

    def main(rank: int) -> None:
        found: list[dict[str, Any]] = []
        options: dict[str, Any] = {"replica_group": dist.group.WORLD} if replica_group else {}
        options |= {"use_distributed_muon": True} if use_distributed_muon else {}
        check(case, layouts.build(), unmeasured, **measured(case, found, **options))
        for step, (one, other) in enumerate(zip(found, expected, strict=True)):
            near(one, other, f"rank {rank}, step {step}")

    run_threads(layouts.world, main)


@settings(max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(cases())
def test_random_layouts_measure_what_one_device_does(drawn: tuple[Case, Layouts, bool]) -> None:
    case, layouts, replica_group = drawn
    # A plan that was prepared covers what one device plans when it has a gradient: iterations would start at other
    # steps.
    spoilt = tuple((step, k) for step, k in case.spoilt if step < 3)
    run_case(replace(case, steps=3, spoilt=spoilt, prepares=False), layouts, replica_group=replica_group)


R, S0, S1 = Replicate(), Shard(0), Shard(1)
MIXED = (
    Param((7, 5), 0, (R, S0)),
    Param((6, 8), 0, (S1, S0)),
    Param((5, 4, 6), 0, (S0, S1)),
    Param((8, 6), 0, (R, S0), split=(3, 5)),
    Param((12, 5), 0, (S1, R), split=Interleaved((2, 4), 2)),
    Param((3, 4, 8), 0, (R, S1), flipped=True, split=(2, 6)),
    Param((9,), 0, (S0, R), muon=False),
    Param((5, 3), None),
    Param((4,), None, muon=False),
)


@pytest.mark.parametrize("options", [{}, {"rule": NorMuon()}], ids=str)
def test_the_reference_path_measures_what_one_device_does(options: dict[str, Any]) -> None:
    run_case(Case(MIXED, {"replicas": "share", **options}, steps=3), Layouts((2, 2)), use_distributed_muon=True)


def test_dist_muon_measures_averaged_gradients() -> None:
    """Two ranks with gradients g + d and g − d measure what one rank with g does."""
    shapes = ((6, 4), (5, 9), (7,))

    def gradients(step: int, sign: float) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        common = [torch.randn(shape, generator=generator) for shape in shapes]
        return [g + sign * torch.randn(shape, generator=generator) for g, shape in zip(common, shapes, strict=True)]

    def trained(sign: float) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        groups = [
            {"params": params[:2], "names": ["a", "b"], "use_muon": True},
            {"params": params[2:], "names": ["c"], "use_muon": False},
        ]
        optimizer = DistMuon(groups, metrics=1)
        found = []
        for step in range(4):
            for param, grad in zip(params, gradients(step, sign), strict=True):
                param.grad = grad
            optimizer.step()
            found.append(optimizer.metrics())
        return found

    expected = trained(0.0)
    for found in run_threads(2, lambda rank: trained(1.0 if rank else -1.0)):
        near(found[-1], expected[-1])


def test_one_reduction_on_measured_steps_and_nothing_on_others() -> None:
    """Beside the agreement, which is on every step."""
    case = Case((Param((6, 4), 0, (S0,)), Param((4, 6), 0, (S1,)), Param((5,), 0, (S0,), muon=False)), steps=6)
    steps: list[list[int]] = []

    def main(rank: int) -> None:
        def watch(optimizer: Muon) -> None:
            if rank == 0:
                steps.append([elements for name, elements in calls[0] if name == "all_reduce"])
                calls[0].clear()

        sharded(case, Layouts((2,)).build(), metrics=3, watch=watch)

    with counted_collectives() as calls:
        run_threads(2, main)
    assert [len(made) for made in steps[1:]] == [1, 2, 1, 1, 2]


def test_ranks_that_measure_different_steps_raise() -> None:
    case = Case((Param((6, 4), 0, (S0,)),), steps=2)

    def main(rank: int) -> None:
        with pytest.raises(PlanMismatchError, match="metrics=3, rank 0 metrics=2"):
            sharded(case, Layouts((2,)).build(), metrics=2 + rank)
        with pytest.raises(PlanMismatchError, match="metrics=None, rank 0 metrics=1"):
            sharded(case, Layouts((2,)).build(), metrics=None if rank else 1)

    run_threads(2, main)


def test_an_error_while_measuring_is_raised_after_the_step() -> None:
    """The other ranks get the sums, and the step is complete on all ranks."""
    case = Case((Param((6, 4), 0, (S0,)), Param((4, 6), 0, (S0,))), steps=1)
    expected = single(case)

    def main(rank: int) -> str:
        try:
            check(case, Layouts((2,)).build(), expected, metrics=1)
        except RuntimeError as error:
            return str(error)
        return ""

    failing = threading.local()

    def broken(*args: Any) -> torch.Tensor:
        if dist.get_rank() == 0 and not getattr(failing, "done", False):
            failing.done = True
            raise RuntimeError("out of memory")
        return tridiagonalise(*args)

    with patch("meshmuon.metrics.recorder.tridiagonalise", broken):
        assert run_threads(2, main) == ["out of memory", ""]
