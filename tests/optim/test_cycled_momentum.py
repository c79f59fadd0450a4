"""Schedulers that cycle momentum: Muon's momentum and AdamW's beta1, as in torch's own optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from meshmuon import Muon, PlanMismatchError
from tests.support.reference import Reference, assert_same_bits, copies, gradients, group, make_params, set_gradients
from tests.support.small_model import give_gradients, initial, muon_of, world_mesh
from tests.support.threads import run_threads

Schedule = Callable[[torch.optim.Optimizer], Any]
SCHEDULES: list[Schedule] = [
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=8),
    lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.01, total_steps=8, three_phase=True, base_momentum=0.5
    ),
    lambda optimizer: lr_scheduler.CyclicLR(optimizer, base_lr=0.001, max_lr=0.01, step_size_up=3),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=8, cycle_momentum=False),
]


def build(matrices: list[Any], vectors: list[Any], **options: Any) -> Muon:
    return Muon([group(matrices), group(vectors, use_muon=False, prefix="norms", **options)], lr=0.001, scheme="keller")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["one cycle", "three phases", "cyclic", "only lr"])
@pytest.mark.parametrize("options", [{}, {"betas": (0.7, 0.95)}], ids=str)
def test_both_kinds_of_groups_are_cycled(schedule: Schedule, options: dict[str, Any]) -> None:
    """AdamW's group equals torch's AdamW under the same scheduler bit for bit; Muon's momentum is what the
    scheduler says.
    """
    matrices, vectors = make_params((6, 4), (3, 5)), make_params((7,), (3, 3), seed=1)
    twins, reference = copies(vectors), Reference(matrices)
    optimizer = build(matrices, vectors, **options)
    betas = options.get("betas", (0.9, 0.95))
    oracle = torch.optim.AdamW(twins, lr=0.001, betas=betas, weight_decay=0.1, fused=True)
    ours, theirs = schedule(optimizer), schedule(oracle)
    seen = set()
    for step in range(6):
        given, for_vectors = gradients(matrices, step), gradients(vectors, 100 + step)
        for params, grads in ((matrices, given), (vectors, for_vectors), (twins, for_vectors)):
            set_gradients(params, grads)
        muon_group = optimizer.param_groups[0]
        reference.step(given, lr=muon_group["lr"], momentum=muon_group["momentum"])
        optimizer.step()
        oracle.step()
        assert_same_bits(vectors, twins)
        for param, expected in zip(matrices, reference.params, strict=True):
            torch.testing.assert_close(param.double(), expected, atol=1e-5, rtol=1e-5)
        seen.add(oracle.param_groups[0]["betas"][0])
        ours.step()
        theirs.step()
    cycled = "max_momentum" in oracle.param_groups[0]
    assert len(seen) >= 3 if cycled else seen == {betas[0]}


def test_ranks_that_cycle_differently() -> None:
    def on_rank(rank: int) -> str:
        params = initial(world_mesh())
        optimizer = muon_of(params)
        bounds = {"base_momentum": [0.85, 0.8 + 0.1 * rank], "max_momentum": [0.95, 0.8 + 0.1 * rank]}
        lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=8, **bounds)
        give_gradients(params, 0)
        with pytest.raises(PlanMismatchError) as caught:
            optimizer.step()
        return str(caught.value)

    first, second = run_threads(2, on_rank)
    assert first == second
    assert "momentum=0.9" in first
    assert "Set the same hyperparameters" in first
