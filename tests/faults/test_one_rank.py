"""One rank cannot do its part of a step, or would do another one: every rank is told, in the same words."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from meshmuon import Muon
from meshmuon.agree import local_planner
from meshmuon.optim import muon_step
from meshmuon.plan import Plan, make_plan
from tests.support.processes import RankOutcome, results_of, run_ranks
from tests.support.small_model import (
    S0,
    S1,
    R,
    after,
    assert_equal,
    give_gradients,
    initial,
    muon_of,
    on_mesh,
    run_steps,
    world_mesh,
)
from tests.support.tensors import assert_untouched, everything, local, one_text, refused, same, seeded
from tests.support.threads import run_threads

WORLD, ODD = 3, 1  # the odd one out
Said = tuple[str, str]  # class and text of an error
MISMATCH = "PlanMismatchError"


def raised(optimizer: Muon) -> Said:
    with pytest.raises(Exception) as caught:
        optimizer.step()
    return type(caught.value).__name__, str(caught.value)


def one_saying(ended: Sequence[RankOutcome]) -> Said:
    """What all ranks raised: the same class and the same words."""
    said: list[Said] = results_of(ended)
    assert len(set(said)) == 1, said
    return said[0]


# Refused before anything is written: the same error everywhere, and the next good step has the bits of one device.


def other_shape(optimizer: Muon, params: list[nn.Parameter]) -> None:
    param = params[0]
    kept, smaller = param.data, on_mesh(torch.ones(8, 5), param.device_mesh)
    param.grad = None
    param.data = smaller
    param.grad = torch.ones_like(smaller)
    param.data = kept


def other_cut(optimizer: Muon, params: list[nn.Parameter]) -> None:
    rows, columns = params[0].to_local().shape
    part = torch.ones(rows + 1, columns)
    params[0].grad = DTensor.from_local(part, params[0].device_mesh, [S0], run_check=False, shape=(8, 6), stride=(6, 1))


def other_placements(optimizer: Muon, params: list[nn.Parameter]) -> None:
    params[0].grad = distribute_tensor(torch.ones(8, 6), params[0].device_mesh, [S1], src_data_rank=None)


def partial_sum(optimizer: Muon, params: list[nn.Parameter]) -> None:
    params[0].grad = DTensor.from_local(torch.ones(8, 6), params[0].device_mesh, [Partial()])


def complex_numbers(optimizer: Muon, params: list[nn.Parameter]) -> None:
    params[0].grad_dtype = None
    params[0].grad = params[0].grad.to(torch.complex64)


def not_finite(optimizer: Muon, params: list[nn.Parameter]) -> None:
    params[0].grad.to_local()[0, 0] = float("nan")


def setting(group: int, **changed: Any) -> Callable[[Muon, list[nn.Parameter]], None]:
    return lambda optimizer, params: optimizer.param_groups[group].update(changed)


REFUSALS: dict[str, tuple[Callable[[Muon, list[nn.Parameter]], None], str, tuple[str, ...]]] = {
    "gradient of another shape": (other_shape, "GradientError: rank 1: a has shape (8, 6)", ("(8, 5)",)),
    "gradient cut otherwise": (other_cut, "GradientError: rank 1: a: this rank holds", ()),
    "gradient laid out otherwise": (other_placements, "GradientError: rank 1: a", ("is laid out differently",)),
    "gradient that is a sum": (partial_sum, "GradientError: rank 1: a", ("is not reduced yet", "redistribute")),
    "NaN": (not_finite, "GradientError: rank 1: a has a gradient that is not finite", ()),
    "negative lr": (setting(0, lr=-1.0), "ConfigError: rank 1: group 0: lr=-1.0", ()),
    "too large an lr": (setting(0, lr=1e39), "ConfigError: rank 1: group 0: lr=1e+39 times adjust_lr_fn", ()),
    "maximize as text": (setting(1, maximize="False"), "ConfigError: rank 1: group 1: maximize='False'", ()),
    "unknown scheme": (setting(0, scheme="magic"), "ConfigError: rank 1", ("magic",)),
    "another lr": (setting(0, lr=0.02), f"{MISMATCH}: a: rank 1 steps it with lr=0.02; rank 0 with lr=0.01. Set", ()),
    "another lr of AdamW": (setting(1, lr=0.02), f"{MISMATCH}: f: rank 1 steps it with lr=0.02", ()),
    "another momentum": (setting(0, momentum=0.9), f"{MISMATCH}: a: rank 1 steps it with momentum=0.9;", ()),
    "another weight decay": (setting(1, weight_decay=0.0), f"{MISMATCH}: f: rank 1", ("weight_decay=0.0",)),
    "complex gradient": (complex_numbers, "GradientError: rank 1: a has a complex gradient", ()),
    "other betas": (setting(1, betas=(0.8, 0.9)), f"{MISMATCH}: f: rank 1", ("betas=(0.8, 0.9)",)),
}


@pytest.mark.parametrize("first", [0, 2], ids=["first step", "later"])
@pytest.mark.parametrize("name", REFUSALS)
def test_a_step_that_one_rank_cannot_make(name: str, first: int) -> None:
    spoil, start, parts = REFUSALS[name]

    def main(rank: int) -> str:
        params = initial(world_mesh())
        optimizer = muon_of(params, nonfinite="raise")
        run_steps(params, optimizer, range(first))
        give_gradients(params, first)
        kept = [dict(group) for group in optimizer.param_groups]
        if rank == ODD:
            spoil(optimizer, params)
        text = one_text([refused(optimizer), refused(optimizer)])  # a second try as well
        for group, old in zip(optimizer.param_groups, kept, strict=True):
            group.clear()
            group.update(old)
        run_steps(params, optimizer, range(first, 4))
        assert_equal(params, after(4))
        return text

    text = one_text(run_threads(WORLD, main))
    assert text.startswith(start), text
    assert all(part in text for part in parts), text


# Failures of this rank alone, in places that a user cannot see.


def out_of_memory(*args: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError("no 3 GiB left")


def unready_rank(rank: int, folder: Path, later: bool) -> Said:
    """No plan can be made. ``later``: not at the first step but when a group is added."""
    params = initial(world_mesh())
    optimizer = muon_of(params)
    added = nn.Parameter(on_mesh(seeded((6, 6), 50), world_mesh()))
    if later:
        give_gradients(params, 0)
        optimizer.step()
        optimizer.add_param_group({"params": [("late", added)], "use_muon": True})
        added.grad = on_mesh(seeded((6, 6), 51), world_mesh())
    first = int(later)
    give_gradients(params, first)
    before = [local(param) for param in params]
    with patch.object(local_planner, "make_plan", out_of_memory) if rank == ODD else nullcontext():
        said = raised(optimizer)
    for param, old in zip(params, before, strict=True):
        same(local(param), old, "a parameter that a refused step must not write")
    run_steps(params, optimizer, range(first, 3))
    assert_equal(params, after(3))
    return said


@pytest.mark.parametrize("later", [False, True], ids=["first step", "later"])
def test_one_rank_runs_out_of_memory_while_it_plans(later: bool, tmp_path: Path) -> None:
    kind, text = one_saying(run_ranks(WORLD, unready_rank, tmp_path, later))
    assert kind == "MeshmuonError"
    assert text == "rank 1: OutOfMemoryError: no 3 GiB left"


# Failures in the middle: the step is made to its end, the rank raises its own error, and the next step tells the
# others.

BAD_STEP = 1
_current = {"step": -1, "raises": False}  # each rank is a process


def moody(batch: Tensor) -> Tensor:
    """Half of the matrix as its update; fails on one rank in one step."""
    if _current["step"] == BAD_STEP and _current["raises"]:
        raise ZeroDivisionError("a user's scheme")
    return batch / 2


def parted_rank(rank: int, folder: Path, what: str) -> tuple[Said | None, Said]:
    """AdamW fails, or the scheme on a matrix that every rank computes for itself: then ranks no longer have the
    same model.
    """
    mesh = world_mesh()
    params = initial(mesh)
    if what == "replicas":
        params[0] = nn.Parameter(on_mesh(seeded((8, 6), 0), mesh, R))
    optimizer = muon_of(params, scheme=moody, replicas="repeat")
    run_steps(params, optimizer, [0])
    saved = copy.deepcopy(([local(param) for param in params], optimizer.state_dict()))
    give_gradients(params, 1)
    failing = rank == ODD
    _current.update(step=BAD_STEP, raises=failing and what == "replicas")
    with patch.object(muon_step, "adamw_step", out_of_memory) if failing and what == "AdamW" else nullcontext():
        own = raised(optimizer) if failing or what == "replicas" else optimizer.step()
    give_gradients(params, 2)
    shown = raised(optimizer)
    assert raised(optimizer) == shown, "ranks that have parted never step again"
    _current.update(step=-1, raises=False)
    for param, value in zip(params, saved[0], strict=True):
        param.detach().to_local().copy_(value)
    optimizer.load_state_dict(saved[1])
    run_steps(params, optimizer, (1, 2))
    assert_equal(params, after(3, scheme=moody))
    return own, shown


KEPT = "a kept weights and momentum in this step, which failed: ZeroDivisionError: a user's scheme"


@pytest.mark.parametrize(
    ("what", "world", "text"),
    [("AdamW", 3, "OutOfMemoryError: no 3 GiB left"), ("replicas", 2, f"OrthogonalizeError: {KEPT}")],
)
def test_a_failure_after_which_ranks_have_parted(what: str, world: int, text: str, tmp_path: Path) -> None:
    """No rank steps on until a checkpoint is loaded; after that the run is exact."""
    said = results_of(run_ranks(world, parted_rank, tmp_path, what))
    assert said[ODD][0] == tuple(text.split(": ", 1))
    assert [own is None for own, _ in said] == [what == "AdamW" and rank != ODD for rank in range(world)], (
        "of all else they know"
    )
    assert len({one for _, one in said}) == 1
    kind, shown = said[0][1]
    assert kind == "StateError"
    assert shown.startswith(f"rank 1: an earlier step failed on this rank alone ({text})")


# Plans that were changed.


def doctored(entries: Any, options: Any) -> Plan:
    """Another owner for the matrix of b, which is as good a plan as any."""
    plan = make_plan(entries, options)
    tasks = list(plan.tasks)
    k = next(k for k, task in enumerate(tasks) if plan.params[task.param].name == "b")
    tasks[k] = replace(tasks[k], owner=next(rank for rank in plan.ranks if rank != tasks[k].owner))
    return replace(plan, tasks=tuple(tasks))


def contradictory(entries: Any, options: Any) -> Plan:
    plan = make_plan(entries, options)
    return replace(plan, tasks=plan.tasks[1:])


def lazy(entries: Any, options: Any) -> Plan:
    """Leaves out a parameter."""
    return make_plan(entries[1:], options)


PLANS: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "another owner": (
        doctored,
        "PlanMismatchError",
        ("b: rank 1 plans matrix 0 to owner", "rank 0 plans matrix 0 to owner"),
    ),
    "one parameter less": (lazy, "PlanMismatchError", ("rank 1 plans", "rank 0 plans")),
    "no owner": (contradictory, "PlanError", ("rank 1: ",)),
}


def plan_rank(rank: int, folder: Path, name: str) -> Said:
    params = initial(world_mesh())
    optimizer = muon_of(params)
    give_gradients(params, 0)
    before = everything(optimizer)
    with patch.object(local_planner, "make_plan", PLANS[name][0]) if rank == ODD else nullcontext():
        said = raised(optimizer)
        assert_untouched(optimizer, before)
        assert raised(optimizer) == said, "a second try is refused as well"
    return said


@pytest.mark.parametrize("name", PLANS)
def test_a_doctored_plan(name: str, tmp_path: Path) -> None:
    _, wanted, parts = PLANS[name]
    kind, text = one_saying(run_ranks(WORLD, plan_rank, tmp_path, name))
    assert kind == wanted, text
    assert all(part in text for part in parts), text
