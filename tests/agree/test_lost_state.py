"""State that one rank has lost, or was never given: it would restart there from zero while the others go on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshmuon import DistMuon, Muon
from meshmuon.errors import MeshmuonError
from tests.support.tensors import local, seeded
from tests.support.threads import run_threads

WORLD, ODD = 3, 1
SHAPES = {"a": (7, 5), "b": (6, 4), "c": (5, 9), "late": (4, 6), "norm": (8,)}
PLACEMENTS: dict[str, Any] = {"rows": Shard(0), "replicas": Replicate()}
LAYOUTS = ["rows", "replicas", "plain replicas"]


class Model:
    """Matrices for Muon, of which one gets its first gradient late, and a vector for AdamW."""

    def __init__(self, layout: str | None, **options: Any) -> None:
        mesh = init_device_mesh("cpu", (WORLD,)) if layout in PLACEMENTS else None
        self.place: Callable[[Tensor], Tensor] = (
            (lambda value: value)
            if mesh is None
            else lambda value: distribute_tensor(value, mesh, [PLACEMENTS[str(layout)]], src_data_rank=None)
        )
        self.params = {name: nn.Parameter(self.place(seeded(shape, k))) for k, (name, shape) in enumerate(SHAPES.items())}
        self.layout, self.options = layout, options
        self.build()

    def build(self) -> None:
        named = list(self.params.items())
        groups = [{"params": named[:-1], "use_muon": True}, {"params": named[-1:], "use_muon": False}]
        if self.layout == "DistMuon":
            self.optimizer: Muon = DistMuon(groups, lr=0.01, **self.options)
        else:
            where = {"replica_group": dist.group.WORLD} if self.layout == "plain replicas" else {}
            self.optimizer = Muon(groups, lr=0.01, **where, **self.options)

    def step(self, number: int, *, without: tuple[str, ...] = ("late",)) -> str:
        """What the step raised, which has then written nothing."""
        for k, (name, param) in enumerate(self.params.items()):
            param.grad = None if name in without else self.place(seeded(tuple(param.shape), 100 + 10 * number + k))
        before = self.everything()
        try:
            self.optimizer.step()
        except MeshmuonError as error:
            after = self.everything()
            assert after.keys() == before.keys()
            for key, value in after.items():
                assert torch.equal(value, before[key]), f"a refused step has written {key}"
            return f"{type(error).__name__}: {error}"
        return ""

    def everything(self) -> dict[tuple[str, str], Tensor]:
        found = {(name, ""): local(param) for name, param in self.params.items()}
        for name, param in self.params.items():
            found.update({(name, key): local(value) for key, value in self.optimizer.state.get(param, {}).items()})
        return found


def pop_momentum(model: Model) -> None:
    model.optimizer.state[model.params["b"]].pop("momentum_buffer")


def delete_entry(model: Model) -> None:
    del model.optimizer.state[model.params["b"]]


def pop_memory(model: Model) -> None:
    model.optimizer.state[model.params["b"]].pop("rule_memory")


def pop_moment(model: Model) -> None:
    model.optimizer.state[model.params["norm"]].pop("exp_avg_sq")


def delete_moments(model: Model) -> None:
    del model.optimizer.state[model.params["norm"]]


def clear(model: Model) -> None:
    model.optimizer.state.clear()


def load_nothing(model: Model) -> None:
    saved = copy.deepcopy(model.optimizer.state_dict())
    model.optimizer.load_state_dict({**saved, "state": {}})


def build_anew(model: Model) -> None:
    model.build()


LOSSES = {
    pop_momentum: "b",
    delete_entry: "b",
    pop_memory: "b",
    delete_moments: "norm",
    pop_moment: "norm",
    clear: "a",
    load_nothing: "a",
    build_anew: "a",
}
Loss = Callable[[Model], None]


@pytest.mark.parametrize("offloaded", [False, True], ids=["", "offloaded"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_state_that_one_rank_has_lost(loss: Loss, layout: str, offloaded: bool) -> None:
    """Refused on all ranks, which name parameter and ranks, until every rank has the same."""

    def main(rank: int) -> tuple[list[str], dict[tuple[str, str], Tensor]]:
        model = Model(layout, rule="normuon")
        if offloaded:
            model.optimizer.turn_on_cpu_offload()
        assert [model.step(0), model.step(1)] == ["", ""]
        saved = copy.deepcopy(model.optimizer.state_dict())
        if rank == ODD:
            loss(model)
        said = [model.step(2), model.step(2)]
        model.optimizer.load_state_dict(saved)
        assert [model.step(2), model.step(3)] == ["", ""]
        return said, model.everything()

    found = run_threads(WORLD, main)
    name = LOSSES[loss]
    for said, _ in found:
        assert said == found[0][0]
        assert said[0] == said[1]
        assert said[0].startswith(
            f"StateError: {name} has no state on rank 1 and would restart there from zero, while rank 0 has"
        )

    def undisturbed(rank: int) -> dict[tuple[str, str], Tensor]:
        model = Model(layout, rule="normuon")
        assert [model.step(step) for step in range(4)] == [""] * 4
        return model.everything()

    for (_, mine), expected in zip(found, run_threads(WORLD, undisturbed), strict=True):
        assert all(torch.equal(mine[key], value) for key, value in expected.items())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", [pop_momentum, delete_entry, clear, delete_moments])
def test_state_that_all_ranks_restart_on_purpose(loss: Loss, layout: str) -> None:
    """As one device that does the same."""

    def live(model: Model) -> dict[tuple[str, str], Tensor]:
        assert [model.step(0), model.step(1)] == ["", ""]
        loss(model)
        assert [model.step(2), model.step(3)] == ["", ""]
        return {(name, ""): local(param) for name, param in model.params.items()}

    whole = live(Model(None))

    def main(rank: int) -> None:
        model = Model(layout)
        for (name, _), value in live(model).items():
            assert torch.equal(value, local(model.place(whole[name, ""])))

    run_threads(WORLD, main)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("who", ["nobody", "one rank saves", "one rank saves and loads", "one rank lacks the gradient"])
def test_a_first_gradient_that_comes_late(who: str, layout: str) -> None:
    """No rank has state of it, or one has zeros, from saving, which are the same as none."""
    if layout != "rows" and who == "one rank lacks the gradient":
        pytest.skip("replicas must have equal gradients")

    def main(rank: int) -> None:
        model = Model(layout)
        assert [model.step(0), model.step(1)] == ["", ""]
        if rank == ODD and "saves" in who:
            saved = model.optimizer.state_dict()
            if "loads" in who:
                model.optimizer.load_state_dict(copy.deepcopy(saved))
        without_state = rank == ODD and "lacks" in who
        assert model.step(2, without=("late",) if without_state else ()) == ""
        assert [model.step(3, without=()), model.step(4), model.step(5, without=())] == ["", "", ""]

    run_threads(WORLD, main)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_lost_while_its_parameter_was_idle(layout: str) -> None:
    """Noticed when it is needed again."""

    def main(rank: int) -> str:
        model = Model(layout)
        assert [model.step(0), model.step(1)] == ["", ""]
        assert model.step(2, without=("late", "b")) == ""
        if rank == ODD:
            pop_momentum(model)
        assert model.step(3, without=("late", "b")) == ""
        return model.step(4)

    said = run_threads(WORLD, main)
    assert said == [said[0]] * WORLD
    assert said[0].startswith("StateError: b has no state on rank 1")


@pytest.mark.parametrize("layout", [*LAYOUTS, "DistMuon"])
def test_a_rank_that_has_not_loaded_its_checkpoint(layout: str) -> None:
    def main(rank: int) -> str:
        model = Model(layout)
        assert [model.step(0), model.step(1)] == ["", ""]
        if isinstance(model.optimizer, DistMuon):
            model.optimizer.consolidate()
        saved = copy.deepcopy(model.optimizer.state_dict())
        resumed = Model(layout)
        if rank != ODD:
            resumed.optimizer.load_state_dict(saved)
        return resumed.step(2)

    said = run_threads(WORLD, main)
    assert said == [said[0]] * WORLD
    assert said[0].startswith("StateError: a has no state on rank 1 and would restart there from zero, while rank 0 has")


@pytest.mark.parametrize("loss", [pop_momentum, delete_entry, delete_moments])
def test_what_an_owner_has_lost(loss: Loss) -> None:
    """DistMuon keeps momentum on owners only, so that no other rank has it; AdamW's moments are everywhere."""

    def main(rank: int) -> tuple[int, str, str]:
        model = Model("DistMuon")
        assert [model.step(0), model.step(1)] == ["", ""]
        plan = model.optimizer.plan()
        owner = next(task.owner for task in plan.tasks if plan.params[task.param].name == "b")
        loser = ODD if loss is delete_moments else owner
        if rank == loser:
            loss(model)
        said = model.step(2)
        if rank != loser:
            clear(model)
        else:
            model.optimizer.state.clear()
        return loser, said, model.step(2)

    found = run_threads(WORLD, main)
    assert found == [found[0]] * WORLD
    loser, said, again = found[0]
    name = "norm" if loss is delete_moments else "b"
    assert said.startswith(f"StateError: {name} has no state on rank {loser} and would restart there from zero")
    assert again == "", "cleared on every rank, on purpose"
