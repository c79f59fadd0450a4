"""Plans as text and as JSON say what the plan says."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings

from meshmuon.layout import Layout, Mesh, Replicated, Sharded
from meshmuon.plan import NO_WAVE, Plan, make_plan, routes_of, slot_sizes, table, wave_sizes
from meshmuon.plan.tasks import EVERY_HOLDER
from tests.support.plans import entry, line, options_for, plans


def mixed() -> Plan:
    hsdp = Mesh((2, 2), (0, 1, 2, 3))
    return make_plan(
        [
            entry("sharded"),
            entry("twin"),
            entry("shared", (6, 4), hsdp, (Replicated(), Sharded(0)), share=True),
            entry("whole", (5, 4), placements=(Replicated(),), share=False),
            entry("expert", (4, 3, 3), placements=(Sharded(0),), stack_dims=1),
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
        "in_flight": plan.options.in_flight,
        "max_peers": None,
        "cost": asdict(plan.options.cost),
    }
    assert [wave["lane"] for wave in facts["waves"]] == [str(lane) for lane in plan.wave_lanes]
    assert [one["name"] for one in facts["parameters"]] == [one.name for one in plan.params]
    for shown, one in zip(facts["parameters"], plan.params, strict=True):
        assert tuple(shown["shape"]) == one.layouts[0].shape
        assert shown["layouts"] == [str(layout) for layout in one.layouts]
        assert (shown["flops_per_matrix"], shown["bytes_per_element"]) == (one.flops, one.itemsize)
    assert len(facts["matrices"]) == len(plan.tasks)
    for shown, task in zip(facts["matrices"], plan.tasks, strict=True):
        assert (shown["parameter"], shown["matrix"]) == (plan.params[task.param].name, task.matrix)
        assert shown["owner"] == (None if task.owner == EVERY_HOLDER else task.owner)
        assert shown["wave"] == (None if task.wave == NO_WAVE else task.wave)
        assert (shown["pieces"], shown["replicas"]) == (len(task.sharded.pieces), task.sharded.replicas)
    assert set(facts["per_rank"]) == set(map(str, plan.ranks))
    for rank in plan.ranks:
        shown = facts["per_rank"][str(rank)]
        sent = {"bytes_sent": plan.bytes_sent[rank], "bytes_between": plan.bytes_between[rank], "bytes_relayed": 0}
        assert shown == {"load": plan.loads[rank], "flops": plan.flops[rank], **sent}


@settings(max_examples=60)
@given(plans)
def test_every_plan_can_be_described(plan: Plan) -> None:
    text = plan.describe()
    moving = sum(task.wave != NO_WAVE for task in plan.tasks)
    many = "matrix" if moving == 1 else "matrices"
    assert f"{moving} {many} with an owner and exchanged, {len(plan.tasks) - moving} computed where they are" in text
    ranks, waves = (
        f"{n} {what}{'' if n == 1 else 's'}" for n, what in ((len(plan.ranks), "rank"), (len(plan.wave_lanes), "wave"))
    )
    assert f"over {ranks} in {waves}" in text
    assert "nan" not in text


def slow_description(plan: Plan) -> str:
    """The text worked out the long way: every send, every holder, every buffer of every wave."""
    sent, owned = dict.fromkeys(plan.ranks, 0), dict.fromkeys(plan.ranks, 0)
    loads, flops = dict.fromkeys(plan.ranks, 0.0), dict.fromkeys(plan.ranks, 0.0)
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for k, task in enumerate(plan.tasks):
        one = plan.params[task.param]
        for send in (*plan.gather_sends(k), *plan.scatter_sends(k)):
            sent[send.source] += one.itemsize * send.piece.size
        for rank in task.sharded.holdings if task.owner == EVERY_HOLDER else (task.owner,):
            owned[rank] += 1
            loads[rank] += task.cost
            flops[rank] += one.flops
        alone = task.sharded.replicas == 1
        how = ("local" if alone else "every holder") if task.wave == NO_WAVE else "one owner" if alone else "shared by replicas"
        kinds.setdefault((f"{task.sharded.rows}×{task.sharded.cols}", str(one.layouts[0]), how), []).append(k)
    rows = []
    for kind, tasks in kinds.items():
        owners, waves = {plan.tasks[k].owner for k in tasks} - {EVERY_HOLDER}, {plan.tasks[k].wave for k in tasks} - {NO_WAVE}
        rows.append((str(len(tasks)), *kind, str(len(owners) or "-"), str(len(waves) or "-")))
    mean = sum(loads.values()) / len(loads)
    moving, most = sum(task.wave != NO_WAVE for task in plan.tasks), max(loads.values())
    balance = f"{most / mean:.3f} of the mean, {most / plan.bound:.3f} of what any plan must take" if most else "no work"
    shown = [
        (str(r), str(owned[r]), f"{loads[r] / (mean or 1.0):.3f}", f"{flops[r]:.3g}", size(sent[r])) for r in plan.ranks[:16]
    ]
    lines = [
        f"{moving} {'matrix' if moving == 1 else 'matrices'} with an owner and exchanged, {len(plan.tasks) - moving} computed "
        f"where they are, over {len(plan.ranks)} rank{'s' * (len(plan.ranks) != 1)} in "
        f"{len(plan.wave_lanes)} wave{'s' * (len(plan.wave_lanes) != 1)}",
        f"heaviest rank: {balance}",
        f"sent per rank and step: {size(max(sent.values()))} at most, {size(sum(sent.values()) / len(sent))} on average; "
        "nothing is padded",
        f"exchange buffers on rank {plan.ranks[0]}: {size(slow_buffers(plan, plan.ranks[0]))}"
        if plan.wave_lanes
        else "no exchange",
        "",
        table(("matrices", "shape", "layout", "how", "owners", "waves"), rows),
        "",
        table(("rank", "owns", "load", "FLOPs", "sends"), shown),
    ]
    return "\n".join([*lines, f"… and {len(plan.ranks) - 16} more ranks"] if len(plan.ranks) > 16 else lines)


def slow_buffers(plan: Plan, rank: int) -> int:
    sizes, turns, total = [wave_sizes(routes) for routes in routes_of(plan, rank)], plan.options.in_flight, 0
    for lane in set(plan.wave_lanes):
        itemsize = next(one.itemsize for one in plan.params if one.lane == lane)
        for slot in range(turns):
            total += itemsize * sum(
                slot_sizes([s for k, s in enumerate(sizes) if plan.wave_lanes[k] == lane and k % turns == slot])
            )
    return total


def size(count: float) -> str:
    power = next(n for n in range(4) if count < 1024 ** (n + 1) or n == 3)
    return f"{count / 1024**power:.{0 if power == 0 else 1}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


@settings(max_examples=100)
@given(plans)
def test_the_text_is_what_the_long_way_finds(plan: Plan) -> None:
    assert plan.describe() == slow_description(plan)
    assert json.loads(plan.to_json())["buffer_bytes"] == {str(plan.ranks[0]): slow_buffers(plan, plan.ranks[0])}


def lines_run(what: Callable[[], object]) -> int:
    """How many lines of the package ``what`` runs."""
    count = 0

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return local if "meshmuon" in frame.f_globals.get("__name__", "") else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        what()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("shards", [1, 32])
def test_reports_look_at_every_matrix_and_every_rank_and_not_at_every_pair(share: bool, shards: int) -> None:
    def work(matrices: int, replicas: int) -> int:
        mesh = Mesh((replicas, shards), tuple(range(replicas * shards)))
        layouts = [Layout((64, 4), mesh, (Replicated(), Sharded(0)))]
        parts = [entry(f"p{k}", (64, 4), mesh, layouts[0].placements, share=share) for k in range(matrices)]
        plan = make_plan(parts, options_for())
        return lines_run(plan.describe) + lines_run(plan.to_json)

    if not share and shards > 1:  # every replica computes for itself: as many tasks as that
        assert work(20, 16) < 2.5 * work(20, 8)
        return
    small, more_matrices, more_ranks, both = work(60, 8), work(240, 8), work(60, 32), work(240, 32)
    assert both < 1.2 * (more_matrices + more_ranks - small)


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
        len(task.sharded.holdings) if task.owner == EVERY_HOLDER else 1 for task in plan.tasks
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
