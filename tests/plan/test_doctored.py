"""Plans and spreads that no planner makes are refused at birth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshmuon.errors import PlanError
from meshmuon.layout import Layout, Mesh, Replicated, Sharded
from meshmuon.plan import EVERY_HOLDER, NO_WAVE, Plan, Task, make_plan
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
    assert plan.wave_lanes == ("lane", "other")
    assert replace(plan).digest == plan.digest


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("sharded", {"owner": 4}, "holds no piece"),
        ("sharded", {"owner": EVERY_HOLDER}, "holds no piece"),
        ("sharded", {"wave": NO_WAVE}, "the plan moves none of them"),
        ("sharded", {"wave": NO_WAVE, "owner": EVERY_HOLDER}, "the plan moves none of them"),
        ("whole", {"owner": 0}, "the plan moves none of them"),  # only its owner would get an update
        ("sharded", {"wave": 1}, "travels on"),  # of another lane
        ("sharded", {"wave": 2}, "travels on"),  # of none
        ("stack", {"matrix": 1}, "matrix 0 has 4 holders, the plan computes it for 0"),  # one of two matrices twice
    ],
)
def test_a_task_that_no_planner_makes(name: str, changes: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        doctored(name, **changes)


@pytest.mark.parametrize("k", range(5))
def test_a_task_that_is_missing_or_there_twice(k: int) -> None:
    plan = healthy()
    with pytest.raises(PlanError, match="the plan computes it for 0"):
        replace(plan, tasks=plan.tasks[:k] + plan.tasks[k + 1 :])
    with pytest.raises(PlanError, match="the plan computes it for 8"):
        replace(plan, tasks=(*plan.tasks, plan.tasks[k]))


def test_a_replica_that_is_forgotten() -> None:
    hsdp = entry(mesh=Mesh((2, 2), (0, 1, 2, 3)), placements=(Replicated(), Sharded(0)))
    plan = make_plan([hsdp], options_for(replicas="repeat"))
    with pytest.raises(PlanError, match="computes it for 2"):
        replace(plan, tasks=plan.tasks[:1])
    # one replica twice has as many holders as two replicas
    with pytest.raises(PlanError, match="matrix 0 has 4 holders"):
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
