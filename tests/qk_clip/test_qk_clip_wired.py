"""QK-clip through Muon itself: one rank's mistake is every rank's error, and nothing is written before it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from meshmuon import ConfigError, Muon, PlanMismatchError
from meshmuon.errors import MeshmuonError
from tests.qk_clip.test_qk_clip_on_meshes import S0, local, mesh_of, place, random, same, separate
from tests.support.threads import run_threads

LAYER = separate(4, 2, 3, 7)


def build(mesh: Any = None, **options: Any) -> tuple[dict[str, nn.Parameter], Muon]:
    tensors = {
        name: nn.Parameter(place(value, mesh, None if mesh is None else (S0,))) for name, value in LAYER.before.items()
    }
    groups = [{"params": list(tensors.items()), "use_muon": True}]
    return tensors, Muon(groups, lr=0.01, **{"clip_config": LAYER.config, **options})


def give_gradients(tensors: dict[str, nn.Parameter], mesh: Any = None, value: float = 1.0) -> None:
    for k, param in enumerate(tensors.values()):
        param.grad = place(random(*param.shape, seed=k) * value, mesh, None if mesh is None else (S0,))


@pytest.mark.parametrize(
    ("logits", "error", "message"),
    [
        (None, PlanMismatchError, "no qk_logits"),
        ({0: torch.ones(7)}, ConfigError, "rank 1: .*7 logits but 8 query heads"),
        ({1: torch.ones(8)}, ConfigError, "rank 1: .*layer 1 has no query and key projections"),
    ],
)
def test_one_rank_with_other_logits_stops_all(logits: Any, error: type[MeshmuonError], message: str) -> None:
    def main(rank: int) -> str:
        mesh = mesh_of((3,))
        tensors, optimizer = build(mesh)
        give_gradients(tensors, mesh)
        with pytest.raises(error, match=message) as shown:
            optimizer.step(qk_logits=logits if rank == 1 else {0: LAYER.logits})
        for name, param in tensors.items():
            same(local(param), local(place(LAYER.before[name], mesh, (S0,))), name)
        return str(shown.value)

    assert len(set(run_threads(3, main))) == 1


@pytest.mark.parametrize("how", ["skipped", "creates state"])
def test_a_step_that_is_not_made_does_not_clip(how: str) -> None:
    tensors, optimizer = build(nonfinite="skip")
    give_gradients(tensors, value=float("nan") if how == "skipped" else 0.0)
    if how == "creates state":
        optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step(qk_logits={0: LAYER.logits})
    for name, param in tensors.items():
        same(local(param), LAYER.before[name], name)


def test_copies_of_an_optimizer_clip() -> None:
    _, optimizer = build(weight_decay=0.0)
    stored = io.BytesIO()
    torch.save(optimizer, stored)
    stored.seek(0)
    for copied in (copy.deepcopy(optimizer), torch.load(stored, weights_only=False)):
        for param in copied.param_groups[0]["params"]:
            param.grad = torch.zeros_like(param)
        copied.state.clear()
        copied.step(qk_logits={0: LAYER.logits})
        for name, param in zip(LAYER.after, copied.param_groups[0]["params"], strict=True):
            same(local(param), LAYER.after[name], name)
