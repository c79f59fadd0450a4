"""After a step that failed on one rank in the middle: QK-clip, saving, copying and loading leave no rank with other weights."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshmuon import MeshmuonError, Muon, StateError
from tests.support.tensors import seeded
from tests.support.threads import run_threads

WORLD, ODD = 3, 1
CLIP = {"head_dim": 2, "threshold": 1.0}
SHAPES = {"layers.0.wq.weight": (6, 5), "layers.0.wk.weight": (6, 5), "layers.0.up.weight": (9, 4)}
LOGITS = torch.tensor([4.0, 0.5, 100.0])
_mood = threading.local()  # ranks are threads


def moody(batch: Tensor) -> Tensor:
    """A user's scheme that fails on one rank, once; the others may be told which matrices then are zero."""
    if getattr(_mood, "raises", False):
        raise ZeroDivisionError("a user's scheme")
    return torch.zeros_like(batch) if getattr(_mood, "lost", False) else batch / 2


class Rank:
    """A small attention layer: DTensors on a mesh, or plain replicas whose work is divided."""

    def __init__(self, placement: Any, **options: Any) -> None:
        self.mesh: DeviceMesh | None = None if placement is None else init_device_mesh("cpu", (WORLD,))
        self.placement = placement
        self.params = [nn.Parameter(self.placed(seeded(shape, k))) for k, shape in enumerate(SHAPES.values())]
        named = list(zip(SHAPES, self.params, strict=True))
        where = {} if placement is not None else {"replica_group": dist.group.WORLD}
        groups = [{"params": named, "use_muon": True}]
        self.optimizer = Muon(groups, lr=0.01, scheme=moody, clip_config=CLIP, **where, **options)

    def placed(self, value: Tensor) -> Tensor:
        return value if self.mesh is None else distribute_tensor(value, self.mesh, [self.placement], src_data_rank=None)

    def step(self, number: int, *, fails: bool = False, bad: bool = False) -> str:
        """What the step raised."""
        for k, param in enumerate(self.params):
            param.grad = self.placed(seeded(tuple(param.shape), 100 * number + k) * (float("nan") if bad else 1.0))
        _mood.raises = fails
        try:
            self.optimizer.step(qk_logits={0: LOGITS})
        except (MeshmuonError, ZeroDivisionError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            _mood.raises = False
        return ""

    def whole(self) -> list[Tensor]:
        return [whole(param) for param in self.params]


def whole(param: Tensor) -> Tensor:
    found = param.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).clone()


def assert_equal_on_all(found: list[list[Tensor]]) -> None:
    for rank, values in enumerate(found):
        for name, mine, first in zip(SHAPES, values, found[0], strict=True):
            assert torch.equal(mine, first), f"{name} on rank {rank}: {mine.abs().sum():.4f}, on rank 0: {first.abs().sum():.4f}"


LAYOUTS = {"replicas of DTensors": Replicate(), "plain replicas": None, "rows": Shard(0), "columns": Shard(1)}


@pytest.mark.parametrize("options", [{}, {"rule": "normuon"}, {"nonfinite": "skip"}], ids=["plain", "normuon", "skip"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_clip_after_a_failed_step(layout: str, options: dict[str, Any]) -> None:
    """The owner of a matrix fails: the step goes on without it on every rank, and every rank clips, also the one that failed."""

    def main(rank: int) -> tuple[list[str], list[Tensor], list[Tensor]]:
        one = Rank(LAYOUTS[layout], replicas="share", **options)
        said = [one.step(0), one.step(1, fails=rank == ODD)]
        after = one.whole()
        said.append(one.step(2))
        said += [one.step(3, bad="nonfinite" in options and rank == 0), one.step(4)]
        return said, after, one.whole()

    found = run_threads(WORLD, main)
    assert_equal_on_all([after for _, after, _ in found])
    assert_equal_on_all([last for _, _, last in found])
    for rank, (said, _, _) in enumerate(found):
        assert said[1] == ("ZeroDivisionError: a user's scheme" if rank == ODD else "")
        assert said[2] == "MeshmuonError: rank 1: the step before this one failed: ZeroDivisionError: a user's scheme"
        assert said[0] == said[3] == said[4] == ""


def test_one_device_clips_after_a_failed_step_as_ranks_do() -> None:
    """All matrices are lost: what is left is the weight decay and the clip."""
    failed, lost = (Rank.__new__(Rank) for _ in range(2))
    for one in (failed, lost):
        one.mesh = one.placement = None
        one.params = [nn.Parameter(seeded(shape, k)) for k, shape in enumerate(SHAPES.values())]
        groups = [{"params": list(zip(SHAPES, one.params, strict=True)), "use_muon": True}]
        one.optimizer = Muon(groups, lr=0.01, scheme=moody, clip_config=CLIP)
    assert failed.step(0, fails=True).startswith("ZeroDivisionError")
    _mood.lost = True
    try:
        assert lost.step(0) == ""
    finally:
        _mood.lost = False
    assert_equal_on_all([lost.whole(), failed.whole()])


def test_the_rank_that_failed_may_save_what_all_ranks_have() -> None:
    """Matrices computed once for all: the ranks are still equal, and so is what they save and load."""

    def main(rank: int) -> tuple[list[Tensor], list[str]]:
        one = Rank(Replicate(), replicas="share")
        one.step(0)
        one.step(1, fails=rank == ODD)
        one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
        return one.whole(), [one.step(2), one.step(3)]

    found = run_threads(WORLD, main)
    assert_equal_on_all([values for values, _ in found])
    assert [said for _, said in found] == [["", ""]] * WORLD, "all ranks have loaded: there is nothing left to tell"


@pytest.mark.parametrize("how", ["step", "deepcopy", "group set anew"])
def test_a_rank_that_has_diverged_neither_steps_nor_saves(how: str) -> None:
    """Each rank computes its replica: the one that failed has other weights. A copy knows it too."""

    def main(rank: int) -> tuple[str, str]:
        one = Rank(Replicate(), replicas="repeat")
        one.step(0)
        one.step(1, fails=rank == ODD)
        if how == "deepcopy":
            one.optimizer = copy.deepcopy(one.optimizer)
            one.params = one.optimizer.param_groups[0]["params"]
        elif how == "group set anew":
            one.optimizer.replica_group = None
        saved = ""
        try:
            one.optimizer.state_dict()
        except StateError as error:
            saved = str(error)
        return one.step(2), saved

    found = run_threads(WORLD, main)
    text = "an earlier step failed on this rank alone (ZeroDivisionError: a user's scheme)"
    assert len({said for said, _ in found}) == 1
    assert found[0][0].startswith(f"StateError: rank {ODD}: {text}")
    assert [saved.startswith(text) for _, saved in found] == [rank == ODD for rank in range(WORLD)]
