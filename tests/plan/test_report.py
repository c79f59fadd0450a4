"""Plans as text and as JSON say what the plan says."""

from __future__ import annotations

import json
import re

from hypothesis import given, settings

from meshmuon.layout import Mesh, Replicated, Sharded
from meshmuon.plan import NO_WAVE, Plan, make_plan, table
from meshmuon.plan.plan import EVERY_HOLDER

from .models import entry, line, options_for, plans


def mixed() -> Plan:
    hsdp = Mesh((2, 2), (0, 1, 2, 3))
    return make_plan(
        [
            entry("sharded"),
            entry("twin"),
            entry("shared", (6, 4), hsdp, (Replicated(), Sharded(0)), share=True),
            entry("whole", (5, 4), placements=(Replicated(),), share=False),
            entry("expert", (4, 3, 3), placements=(Sharded(0),), lead=1),
        ],
        options_for(chunk_size=2),
    )


@settings(max_examples=60)
@given(plans)
def test_json_is_the_plan(plan: Plan) -> None:
    facts = json.loads(plan.to_json())
    assert facts["digest"] == plan.digest
    assert facts["ranks"] == list(plan.ranks)
    assert facts["options"] == {
        "replicas": plan.options.replicas,
        "chunk_size": plan.options.chunk_size,
        "budget": plan.options.budget,
    }
    assert [wave["lane"] for wave in facts["waves"]] == [str(lane) for lane in plan.lanes]
    assert [one["name"] for one in facts["parameters"]] == [one.name for one in plan.entries]
    for told, one in zip(facts["parameters"], plan.entries, strict=True):
        assert tuple(told["shape"]) == one.layouts[0].shape
        assert told["layouts"] == [str(layout) for layout in one.layouts]
        assert (told["flops_per_matrix"], told["bytes_per_element"]) == (one.flops, one.itemsize)
    assert len(facts["matrices"]) == len(plan.tasks)
    for told, task in zip(facts["matrices"], plan.tasks, strict=True):
        assert (told["parameter"], told["matrix"]) == (plan.entries[task.entry].name, task.matrix)
        assert told["owner"] == (None if task.owner == EVERY_HOLDER else task.owner)
        assert told["wave"] == (None if task.wave == NO_WAVE else task.wave)
        assert (told["pieces"], told["replicas"]) == (len(task.spread.pieces), task.spread.replicas)
    assert set(facts["per_rank"]) == set(map(str, plan.ranks))
    for rank in plan.ranks:
        told = facts["per_rank"][str(rank)]
        assert told == {"load": plan.loads[rank], "flops": plan.flops[rank], "bytes_sent": plan.bytes_sent[rank]}


@settings(max_examples=60)
@given(plans)
def test_every_plan_can_be_described(plan: Plan) -> None:
    text = plan.describe()
    moving = sum(task.wave != NO_WAVE for task in plan.tasks)
    many = "matrix" if moving == 1 else "matrices"
    assert f"{moving} {many} with an owner and exchanged, {len(plan.tasks) - moving} computed where they are" in text
    ranks, waves = (f"{n} {what}{'' if n == 1 else 's'}" for n, what in ((len(plan.ranks), "rank"), (len(plan.lanes), "wave")))
    assert f"over {ranks} in {waves}" in text
    assert "nan" not in text


def rows_under(text: str, heading: str) -> list[list[str]]:
    lines = text.splitlines()
    at = next(k for k, line in enumerate(lines) if line.startswith(heading))
    assert set(lines[at + 1]) == {"-"}
    found = []
    for one in lines[at + 2 :]:
        if not one or one.startswith("…"):
            break
        found.append(re.split(r" {2,}", one))
    return found


def test_description() -> None:
    plan = mixed()
    text = plan.describe()
    kinds = rows_under(text, "matrices  shape")
    assert [(count, shape, how, owners) for count, shape, _, how, owners, _ in kinds] == [
        ("1", "5×4", "every holder", "-"),
        ("4", "3×3", "local", "-"),
        ("2", "8×6", "one owner", "2"),
        ("1", "6×4", "shared by replicas", "1"),
    ]
    ranks = rows_under(text, "rank")
    assert [row[0] for row in ranks] == ["0", "1", "2", "3"]
    assert sum(int(row[1]) for row in ranks) == sum(
        len(task.spread.place) if task.owner == EVERY_HOLDER else 1 for task in plan.tasks
    )
    assert "of the mean" in text
    assert "…" not in text


def test_many_ranks_are_cut_off() -> None:
    plan = make_plan([entry(shape=(40, 4), mesh=line(40))], options_for())
    text = plan.describe()
    assert [row[0] for row in rows_under(text, "rank")] == [str(rank) for rank in range(16)]
    assert text.endswith("… and 24 more ranks")
    assert len(json.loads(plan.to_json())["per_rank"]) == 40


def test_sizes_are_readable() -> None:
    plan = make_plan([entry(shape=(4096, 4096), mesh=line(2), itemsize=4)], options_for())
    assert max(plan.bytes_sent.values()) == 32 * 2**20
    assert "sent per rank and step: 32.0 MiB at most, 32.0 MiB on average" in plan.describe()
    small = make_plan([entry(shape=(4, 3), mesh=line(2))], options_for())
    assert "12 B at most" in small.describe()


def test_no_work() -> None:
    assert "heaviest rank: no work" in make_plan([], options_for()).describe()
    assert json.loads(make_plan([], options_for()).to_json())["matrices"] == []


def test_table() -> None:
    assert table(("a", "long"), [("xyz", "1"), ("", "22222")]) == "a    long\n---------\nxyz  1\n     22222"
