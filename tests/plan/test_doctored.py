"""Plans and spreads that no planner makes are refused at birth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshmuon.errors import PlanError
from meshmuon.layout import Layout, Mesh, Replicated, Sharded
from meshmuon.plan import NO_WAVE, Plan, Task, make_plan
from meshmuon.plan.tasks import EVERY_HOLDER
from tests.support.plans import entry, options_for

Doctor = Callable[[list[Task]], list[Task]]


def healthy() -> Plan:
    """A sharded matrix, a stack of two, a replicated one that every rank computes, and one on another lane."""
    return make_plan(
        [
            entry("sharded"),
            entry("stack", (2, 8, 6), stack_dims=1, placements=(Sharded(1),)),
            entry("whole", placements=(Replicated(),), share=False),
            entry("half", lane="other"),
        ],
        options_for(),
    )


def of(plan: Plan, name: str) -> int:
    return next(k for k, task in enumerate(plan.tasks) if plan.params[task.param].name == name)


def doctored(name: str, **changes: object) -> Plan:
    plan = healthy()
    tasks = list(plan.tasks)
    k = of(plan, name)
    tasks[k] = replace(tasks[k], **changes)  # type: ignore[arg-type]
    return replace(plan, tasks=tuple(tasks))


def test_the_healthy_plan() -> None:
    plan = healthy()
    assert len(plan.tasks) == 5
    assert len(plan.wave_lanes) >= 2
    assert replace(plan).digest == plan.digest


@pytest.mark.parametrize("owner", [4, 17, EVERY_HOLDER])
def test_an_owner_that_holds_nothing(owner: int) -> None:
    with pytest.raises(PlanError, match="holds no piece"):
        doctored("sharded", owner=owner)


def test_a_matrix_in_pieces_that_stays() -> None:
    with pytest.raises(PlanError, match="the plan moves none of them"):
        doctored("sharded", wave=NO_WAVE)
    with pytest.raises(PlanError, match="the plan moves none of them"):
        doctored("sharded", wave=NO_WAVE, owner=EVERY_HOLDER)


def test_a_whole_matrix_with_an_owner_but_no_wave() -> None:
    """Only its owner would get an update."""
    with pytest.raises(PlanError, match="the plan moves none of them"):
        doctored("whole", owner=0)


def test_a_wave_of_another_lane() -> None:
    plan = healthy()
    with pytest.raises(PlanError, match="travels on"):
        doctored("sharded", wave=plan.tasks[of(plan, "half")].wave)


def test_a_wave_without_a_lane() -> None:
    with pytest.raises(PlanError):
        doctored("sharded", wave=len(healthy().wave_lanes))


@pytest.mark.parametrize("k", range(5))
def test_a_missing_task(k: int) -> None:
    plan = healthy()
    with pytest.raises(PlanError, match="the plan computes it for 0"):
        replace(plan, tasks=plan.tasks[:k] + plan.tasks[k + 1 :])


@pytest.mark.parametrize("k", range(5))
def test_a_task_that_is_there_twice(k: int) -> None:
    plan = healthy()
    with pytest.raises(PlanError, match="the plan computes it for 8"):
        replace(plan, tasks=(*plan.tasks, plan.tasks[k]))


def test_a_matrix_twice_instead_of_two_matrices() -> None:
    with pytest.raises(PlanError, match="matrix 0 has 4 holders, the plan computes it for 0"):
        doctored("stack", matrix=1)


def test_a_replica_that_is_forgotten() -> None:
    hsdp = entry(mesh=Mesh((2, 2), (0, 1, 2, 3)), placements=(Replicated(), Sharded(0)))
    plan = make_plan([hsdp], options_for(replicas="repeat"))
    with pytest.raises(PlanError, match="computes it for 2"):
        replace(plan, tasks=plan.tasks[:1])
    with pytest.raises(PlanError, match="matrix 0 has 4 holders"):  # one replica twice has as many holders as two replicas
        replace(plan, tasks=(plan.tasks[0], plan.tasks[0]))


def test_a_sibling_that_is_forgotten() -> None:
    one = entry()
    both = replace(one, layouts=(*one.layouts, Layout((8, 6), Mesh((4,), (4, 5, 6, 7)), (Sharded(0),))))
    plan = make_plan([both], options_for())
    assert len(plan.tasks) == 2
    with pytest.raises(PlanError, match="computes it for 4"):
        replace(plan, tasks=plan.tasks[:1])


def test_the_digest_knows_owners_and_waves() -> None:
    """What another version of the planner might decide from the same parameters."""
    plan = make_plan([entry("a"), entry("b")], options_for(chunk_size=1))
    (first, second), digests = plan.tasks, {plan.digest}
    for tasks in (
        (replace(first, owner=second.owner), replace(second, owner=first.owner)),
        (replace(first, wave=second.wave), replace(second, wave=first.wave)),
    ):
        digests.add(replace(plan, tasks=tasks).digest)
    assert len(digests) == 3
