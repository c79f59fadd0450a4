"""Several optimizers that look alike: ranks that step them in different orders are told, and nobody else is
disturbed.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshmuon import DistMuon, Muon
from meshmuon.agree.differences import Note, other_optimizer
from meshmuon.agree.identity import Pairing, Place, place_of
from meshmuon.errors import MeshmuonError
from tests.support.tensors import assert_bits, local, seeded
from tests.support.threads import run_threads

WORLD, ODD = 3, 1
SHAPES = ((7, 5), (6, 4), (5, 9))
PLACEMENTS: dict[str, Any] = {"rows": Shard(0), "replicas": Replicate()}
LAYOUTS = ["rows", "replicas", "plain replicas", "DistMuon"]


class Model:
    """Some matrices and their optimizer. Two models of one layout differ in their values only."""

    def __init__(self, layout: str, seed: int, **options: Any) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if layout in PLACEMENTS else None
        self.place: Callable[[Tensor], Tensor] = (
            (lambda value: value)
            if mesh is None
            else lambda value: distribute_tensor(value, mesh, [PLACEMENTS[layout]], src_data_rank=None)
        )
        self.layout, self.seed, self.options = layout, seed, options
        self.params = [nn.Parameter(self.place(seeded(shape, seed + k))) for k, shape in enumerate(SHAPES)]
        self.build()

    def build(self) -> None:
        """A new optimizer for the same parameters."""
        groups = [{"params": self.params, "names": list("abc"), "use_muon": True}]
        if self.layout == "DistMuon":
            self.optimizer: Muon = DistMuon(groups, lr=0.01, **self.options)
        else:
            group = {"replica_group": dist.group.WORLD} if self.layout == "plain replicas" else {}
            self.optimizer = Muon(groups, lr=0.01, **group, **self.options)

    def become(self, optimizer: Muon) -> None:
        """Goes on with a copy, which has parameters of its own."""
        if self.layout in ("plain replicas", "DistMuon"):
            optimizer.replica_group = dist.group.WORLD
        self.optimizer, self.params = optimizer, optimizer.param_groups[0]["params"]

    def step(self, number: int, closure: Callable[[], Any] | None = None, value: float = 1.0) -> str:
        """What the step raised, which has then written nothing."""
        for k, param in enumerate(self.params):
            param.grad = self.place(seeded(tuple(param.shape), 1000 * self.seed + 10 * number + k) * value)
        before = self.whole()
        try:
            self.optimizer.step(closure)
        except MeshmuonError as error:
            assert_bits(self.whole(), before)
            return f"{type(error).__name__}: {error}"
        return ""

    def whole(self) -> list[Tensor]:
        return [local(param) for param in self.params]


@cache
def untroubled(layout: str, steps: int) -> list[list[list[Tensor]]]:
    """By rank and model, what two models become that nobody disturbs."""

    def main(rank: int) -> list[list[Tensor]]:
        models = [Model(layout, 1), Model(layout, 2)]
        for step in range(steps):
            for model in models:
                assert model.step(step) == ""
        return [model.whole() for model in models]

    return run_threads(WORLD, main)


def assert_untroubled(layout: str, steps: int, found: list[list[list[Tensor]]]) -> None:
    for models, expected in zip(found, untroubled(layout, steps), strict=True):
        for model, other in zip(models, expected, strict=True):
            assert_bits(model, other)


STRANGER = "PlanMismatchError: rank 1 steps another optimizer than rank 0"


@pytest.mark.parametrize("first", [0, 2], ids=["first step", "later"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_order_on_one_rank(layout: str, first: int) -> None:
    """Refused on all ranks, however often; in the right order the run goes on as if nothing had been."""

    def main(rank: int) -> tuple[list[str], list[list[Tensor]]]:
        models = [Model(layout, 1), Model(layout, 2)]
        for step in range(first):
            assert [model.step(step) for model in models] == ["", ""]
        turned = models[::-1] if rank == ODD else models
        said = [model.step(first) for model in (*turned, *turned)]
        for step in range(first, first + 2):
            assert [model.step(step) for model in models] == ["", ""]
        return said, [model.whole() for model in models]

    found = run_threads(WORLD, main)
    for said, _ in found:
        assert said == found[0][0]
        assert all(text.startswith(STRANGER) for text in said), said
    assert_untroubled(layout, first + 2, [values for _, values in found])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_order_that_changes_on_all_ranks(layout: str) -> None:
    def main(rank: int) -> list[list[Tensor]]:
        models = [Model(layout, 1), Model(layout, 2)]
        for step in range(4):
            assert [model.step(step) for model in (models if step % 2 else models[::-1])] == ["", ""]
        return [model.whole() for model in models]

    assert_untroubled(layout, 4, run_threads(WORLD, main))


def test_ranks_are_compared_with_all_others() -> None:
    """Rank 1 has no id yet and a lookalike more, so that it can be compared with none; ranks 0 and 2 can."""
    notes = {rank: Note(None, pairing=Pairing(shared_id=number)) for rank, number in enumerate((5, 0, 6))}
    notes[1] = replace(notes[1], place=Place(0, 2))
    assert str(other_optimizer(notes)).startswith("rank 2 steps another optimizer than rank 0")


def test_an_optimizer_that_was_stepped_beside_a_new_one() -> None:
    """The second is built when the first has been stepped for a while; one rank takes the new one at once."""

    def main(rank: int) -> list[str]:
        old = Model("rows", 1)
        assert [old.step(step) for step in range(3)] == [""] * 3
        new = Model("rows", 2)
        said = [(new if rank == ODD else old).step(3)]
        return [*said, old.step(3), new.step(0), new.step(1), old.step(4)]

    for said in run_threads(WORLD, main):
        assert said[0].startswith(STRANGER)
        assert said[1:] == [""] * 4


# What ranks may differ in.


def extra_of_its_own(model: Model) -> object:
    """An optimizer for parameters that look the same and are this rank's alone."""
    params = [nn.Parameter(seeded(shape, 50 + k)) for k, shape in enumerate(SHAPES)]
    extra = Muon([{"params": params, "names": list("abc"), "use_muon": True}])
    for param in params:
        param.grad = torch.ones_like(param)
    extra.step()
    return extra


def extra_for_the_same(model: Model) -> object:
    """To look at its routing table, for example."""
    kept = model.optimizer
    model.build()
    model.optimizer, kept = kept, model.optimizer
    return kept


def copied(model: Model) -> object:
    return copy.deepcopy(model.optimizer)


def copied_and_used(model: Model) -> object:
    kept = model.optimizer
    model.become(copy.deepcopy(model.optimizer))
    return kept


def replaced_by_a_copy(model: Model) -> object:
    model.become(copy.deepcopy(model.optimizer))
    return None


def stored(model: Model) -> object:
    stored = io.BytesIO()
    torch.save(model.optimizer, stored)
    stored.seek(0)
    model.become(torch.load(stored, weights_only=False))
    return None


def loaded(model: Model) -> object:
    model.optimizer.load_state_dict(copy.deepcopy(model.optimizer.state_dict()))
    return None


def built_anew(model: Model) -> object:
    saved = copy.deepcopy(model.optimizer.state_dict())
    model.build()
    model.optimizer.load_state_dict(saved)
    return None


EVENTS = [extra_of_its_own, extra_for_the_same, copied, copied_and_used, replaced_by_a_copy, stored, loaded, built_anew]


ON_ALL_RANKS = [copied, replaced_by_a_copy, loaded, built_anew]


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("layout", ["rows", "plain replicas"])
@pytest.mark.parametrize(
    ("event", "whose", "ranks"),
    [
        *((event, [k], [ODD]) for event in EVENTS for k in (0, 1)),
        *((event, [0, 1], range(WORLD)) for event in ON_ALL_RANKS),
    ],
)
def test_what_ranks_may_do(
    event: Callable[[Model], object], whose: list[int], ranks: list[int], layout: str, when: int
) -> None:
    """One alone with one of two optimizers, or all with both, before the first step or later: no error, and the
    same bits.
    """

    def main(rank: int) -> list[list[Tensor]]:
        models, kept = [Model(layout, 1), Model(layout, 2)], []
        for step in range(4):
            if step == when and rank in ranks:
                kept += [event(models[k]) for k in whose]
            assert [model.step(step) for model in models] == ["", ""], f"step {step}"
        return [model.whole() for model in models]

    assert_untroubled(layout, 4, run_threads(WORLD, main))


def test_an_optimizer_built_before_on_one_rank_is_no_trouble() -> None:
    """The odd rank has a model of its own first: its optimizers have other places than those of the other ranks."""

    def main(rank: int) -> list[list[Tensor]]:
        before = extra_of_its_own(Model("rows", 9)) if rank == ODD else None
        more = [Model("rows", 8)] if rank == ODD else []
        models = [Model("rows", 1), Model("rows", 2)]
        for step in range(3):
            assert [model.step(step) for model in models] == ["", ""]
        assert (before is not None) == bool(more)
        return [model.whole() for model in models]

    assert_untroubled("rows", 3, run_threads(WORLD, main))


def test_an_optimizer_of_an_earlier_process_group_does_not_count() -> None:
    kept, places = [], []
    for _ in range(2):
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        kept.append(Muon([{"params": [nn.Parameter(torch.ones(3, 4))], "names": ["a"], "use_muon": True}]))
        places.append(place_of(kept[-1]))
        dist.destroy_process_group()
    assert places == [Place(0, 1)] * 2


def test_an_optimizer_whose_groups_were_emptied_is_no_trouble() -> None:
    """Not used any more, and its memory freed: others are built, copied and stepped beside it."""

    def life(rank: int) -> str:
        left, model = Model("rows", 1), Model("rows", 5)
        for group in left.optimizer.param_groups:
            del group["params"], group["param_names"]
        Model("rows", 7)
        return model.step(0) + model.step(1)

    assert set(run_threads(WORLD, life)) == {""}


def test_copies_that_are_stepped_too() -> None:
    """A copy on every rank, stepped beside its original: taken for the other on one rank, all are told."""

    def main(rank: int) -> list[str]:
        one = Model("rows", 1)
        assert [one.step(step) for step in range(2)] == ["", ""]
        other = Model("rows", 1)
        other.become(copy.deepcopy(one.optimizer))
        order = (other, one) if rank == ODD else (one, other)
        return [model.step(2) for model in (*order, one, other)]

    for said in run_threads(WORLD, main):
        assert all(text.startswith(STRANGER) for text in said[:2])
        assert said[2:] == ["", ""]


# How often.


def failing() -> None:
    raise ZeroDivisionError("a user's closure")


@pytest.mark.parametrize("first", [1, 3])
def test_a_closure_that_ends_a_step_on_one_rank(first: int) -> None:
    """The others wait for its next step, which is of another batch: all are told, once."""

    def main(rank: int) -> tuple[list[str], list[list[Tensor]]]:
        models = [Model("rows", 1), Model("rows", 2)]
        for step in range(first):
            assert [model.step(step) for model in models] == ["", ""]
        if rank == ODD:
            with pytest.raises(ZeroDivisionError):
                models[0].step(first, failing)
        said = [models[0].step(first + (rank == ODD))]
        for step in (first, first + 1):
            assert [model.step(step) for model in models] == ["", ""]
        return said, [model.whole() for model in models]

    found = run_threads(WORLD, main)
    texts = {said[0] for said, _ in found}
    assert len(texts) == 1, texts
    assert texts.pop().startswith(
        f"PlanMismatchError: rank 1 is at call {first + 1} of this optimizer's step() since the ranks first stepped "
        f"it together, rank 0 at call {first}"
    )
    assert_untroubled("rows", first + 2, [values for _, values in found])


@pytest.mark.parametrize("ranks", [range(WORLD), [ODD]], ids=["all ranks", "one rank, then all load"])
def test_a_closure_that_ends_a_step_and_counts_nowhere(ranks: Sequence[int]) -> None:
    def main(rank: int) -> None:
        model = Model("rows", 1)
        for step in range(4):
            if rank in ranks:
                with pytest.raises(ZeroDivisionError):
                    model.step(step, failing)
            if len(ranks) == 1:
                loaded(model)
            assert model.step(step) == ""

    run_threads(WORLD, main)


def test_steps_that_fail_or_are_left_out_count_alike_everywhere() -> None:
    """One rank has NaN, or an option that makes no sense: skipped or refused by all, after which all go on."""

    def main(rank: int) -> list[str]:
        model = Model("rows", 1, nonfinite="skip")
        said = [model.step(0), model.step(1, value=float("nan") if rank == ODD else 1.0)]
        kept = dict(model.optimizer.param_groups[0])
        if rank == ODD:
            model.optimizer.param_groups[0]["momentum"] = 7.0
        said.append(model.step(2))
        model.optimizer.param_groups[0].update(kept)
        if rank == ODD:
            model.optimizer.param_groups[0]["lr"] = 0.5
        said.append(model.step(2))
        model.optimizer.param_groups[0].update(kept)
        return [*said, model.step(2), model.step(3)]

    found = run_threads(WORLD, main)
    assert all(said == found[0] for said in found)
    assert [bool(text) for text in found[0]] == [False, False, True, True, False, False]


def test_a_steady_step_has_one_reduction() -> None:
    """What ranks say of themselves travels with the vote that there was before."""
    calls: dict[int, int] = {}
    all_reduce = dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        calls[dist.get_rank()] = calls.get(dist.get_rank(), 0) + 1
        return all_reduce(*args, **options)

    def main(rank: int) -> None:
        models = [Model("rows", 1), Model("rows", 2)]
        for step in range(2):
            assert [model.step(step) for model in models] == ["", ""]
        calls[rank] = 0
        dist.barrier()
        for step in range(2, 5):
            assert [model.step(step) for model in models] == ["", ""]
        assert calls[rank] == 6
        dist.barrier()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_reduce", counted)
        run_threads(WORLD, main)
