"""Gradients that come and go on ranks of their own: when ranks compare notes, and one plan for all.

That every layout then has the bits of one device is a matter of ``test_cases.py``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshmuon import DistMuon, GradientError, Muon
from tests.support.cases import Case, Param, build, gradient, initial, place
from tests.support.tensors import assert_bits, everything
from tests.support.threads import run_threads

from .test_dist_muon import SHAPES, seeded
from .test_dist_muon import build as build_dist

S0, R = Shard(0), Replicate()


def test_replicas_still_need_equal_gradients() -> None:
    """Two replicas of each shard: one without a gradient would diverge. Nothing is written, and the next step is
    exact.
    """
    case = Case((Param((6, 5), 0, (R, S0)), Param((5, 5), 0, (R, S0))))

    def main(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2, 2))
        params = [nn.Parameter(place(case, [mesh], k, value)) for k, value in enumerate(initial(case))]
        optimizer = build(case, params, none_grad=False)
        for step, lacking in enumerate([(), (0,), ()]):
            for k, param in enumerate(params):
                value = gradient(case, step, k)
                assert value is not None
                param.grad = None if k in lacking else place(case, [mesh], k, value)
            optimizer.step()
        before = everything(optimizer)
        if rank == 3:
            params[0].grad = None
        for _ in range(2):
            with pytest.raises(GradientError, match="which hold the same elements") as caught:
                optimizer.step()
            assert_bits(everything(optimizer), before)
        return str(caught.value)

    texts = run_threads(4, main)
    assert len(set(texts)) == 1
    assert "has a gradient on rank 1 and none on rank 3" in texts[0]


def test_data_parallel_after_a_step_that_was_skipped() -> None:
    """A parameter that had its only gradient then has no state anywhere: that is no lost state."""

    def main(rank: int) -> None:
        params, optimizer = build_dist(DistMuon, SHAPES, nonfinite="skip")
        for step, active in enumerate([(0, 1), (0, 1, 2, 3), (0, 1), (0, 1, 2), (0, 1, 2, 3)]):
            for k, param in enumerate(params):
                param.grad = seeded(SHAPES[k], step, k, rank) if k in active else None
            if step == 1 and rank == 0:
                params[0].grad = torch.full(SHAPES[0], torch.nan)
            optimizer.step()
        assert optimizer.skipped_steps == 1
        assert len(optimizer.plan().params) == 4

    run_threads(2, main)


@pytest.mark.parametrize("loss", ["state", "rule memory", "loaded", "rounding"])
def test_state_that_is_missing_when_the_gradient_comes_back_on_another_rank(loss: str) -> None:
    """The rank without a gradient steps with zeros, and creates what its state lacks."""

    def main(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.ones(8, 6, dtype=torch.bfloat16)
        x, y = (nn.Parameter(distribute_tensor(whole, mesh, [S0], src_data_rank=None)) for _ in range(2))
        rule = "normuon" if loss == "rule memory" else "plain"
        optimizer = Muon([{"params": [("x", x), ("y", y)], "use_muon": True, "rule": rule}], lr=0.005)

        def step(*with_gradient: Tensor) -> None:
            for param in (x, y):
                param.grad = torch.ones_like(param) if any(param is other for other in with_gradient) else None
            optimizer.step()

        step(x, y)
        if loss == "state":
            optimizer.state.pop(x)
        elif loss == "rule memory":
            optimizer.state[x].pop("rule_memory")
        elif loss == "rounding":
            optimizer.param_groups[0]["rounding"] = "stochastic"
        else:
            saved = optimizer.state_dict()
            saved["state"][0] = {}
            optimizer.load_state_dict(saved)
        for _ in range(3):
            step(y)
        step(y, *([x] if rank == 0 else []))
        return sorted(optimizer.state[x])

    extra = {"rule memory": ["rule_memory"], "rounding": ["rounding_counter"]}.get(loss, [])
    assert run_threads(2, main) == [["momentum_buffer", *extra]] * 2


@pytest.mark.parametrize("on_all", [True, False], ids=["on all ranks", "on one rank"])
def test_dist_muon_starts_an_idle_parameter_from_zero_on_purpose(on_all: bool) -> None:
    """Its state was left out of what was loaded, and it is idle in the first step after that: nothing is lost."""

    def main(rank: int) -> str:
        params = [nn.Parameter(seeded((6, 4), k)) for k in range(4)]
        optimizer = DistMuon([{"params": params, "names": list("abcd"), "use_muon": True}], lr=0.01)

        def step(*with_gradient: int) -> None:
            for k, param in enumerate(params):
                param.grad = torch.ones_like(param) if k in with_gradient else None
            optimizer.step()

        step(0, 1, 2, 3)
        optimizer.consolidate()
        saved = optimizer.state_dict()
        saved["state"][0] = {}
        optimizer.load_state_dict(saved)
        step(1, 2)
        step(1, *([2] if rank == 0 else []))  # idle still, while ranks compare notes
        step(1, *([0] if on_all or rank == 0 else []))
        step(0, 1, 2, 3)
        return "stepped"

    run_threads(2, main)
