"""Plans as text and as JSON say what the plan says."""

from __future__ import annotations

import re
from itertools import takewhile

from hypothesis import given, settings

from meshmuon.layout import Mesh, Replicated, Sharded
from meshmuon.plan import CostModel, Plan, make_plan, table
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


GOLDEN = """\
3 matrices with an owner and exchanged, 5 computed where they are, over 4 ranks in 2 waves
heaviest rank: 1.392 of the mean, 1.099 of what any plan must take
sent per rank and step: 120 B at most, 96 B on average; nothing is padded
exchange buffers on rank 0: 144 B

matrices  shape  layout                        how                 owners  waves
--------------------------------------------------------------------------------
1         5×4    [R] on 4 (ranks 0-3)          every holder        -       -
4         3×3    [S(0)] on 4 (ranks 0-3)       local               -       -
2         8×6    [S(0)] on 4 (ranks 0-3)       one owner           2       1
1         6×4    [R, S(0)] on 2×2 (ranks 0-3)  shared by replicas  1       1

rank  owns  load   FLOPs  sends
-------------------------------
0     3     1.392  3e+03  96 B
1     3     1.392  3e+03  96 B
2     3     1.091  3e+03  120 B
3     2     0.125  2e+03  72 B"""


def test_description() -> None:
    assert mixed().describe() == GOLDEN


@settings(max_examples=60)
@given(plans)
def test_every_plan_can_be_described(plan: Plan) -> None:
    text = plan.describe()
    assert "nan" not in text
    kinds, ranks = (rows_under(text, heading) for heading in ("matrices  shape", "rank"))
    assert sum(int(row[0]) for row in kinds) == len(plan.tasks)
    assert [row[:2] for row in ranks] == [[str(rank), str(plan.computed[rank])] for rank in plan.ranks[:16]]
    mean = sum(plan.loads.values()) / len(plan.loads) or 1.0
    assert [row[2] for row in ranks] == [f"{plan.loads[rank] / mean:.3f}" for rank in plan.ranks[:16]]


def rows_under(text: str, heading: str) -> list[list[str]]:
    lines = text.splitlines()
    at = next(k for k, line in enumerate(lines) if line.startswith(heading))
    assert set(lines[at + 1]) == {"-"}
    return [re.split(r" {2,}", one) for one in takewhile(lambda one: one and not one.startswith("…"), lines[at + 2 :])]


def test_copies_alone_have_no_bound() -> None:
    """Weights in host memory that cost nothing else."""
    cost = CostModel(0.0, 1.0, host_flops_per_byte=1.0)
    text = make_plan([entry(flops=0, staged=True)], options_for(cost=cost)).describe()
    assert "heaviest rank: 1.000 of the mean\n" in text


def test_many_ranks_are_cut_off() -> None:
    plan = make_plan([entry(shape=(40, 4), mesh=line(40))], options_for())
    text = plan.describe()
    assert [row[0] for row in rows_under(text, "rank")] == [str(rank) for rank in range(16)]
    assert text.endswith("… and 24 more ranks")


def test_sizes_are_readable() -> None:
    plan = make_plan([entry(shape=(4096, 4096), mesh=line(2), itemsize=4)], options_for())
    assert max(plan.bytes_sent.values()) == 32 * 2**20
    assert "sent per rank and step: 32.0 MiB at most, 32.0 MiB on average" in plan.describe()
    small = make_plan([entry(shape=(4, 3), mesh=line(2))], options_for())
    assert "12 B at most" in small.describe()


def test_no_work() -> None:
    assert "heaviest rank: no work" in make_plan([], options_for()).describe()


def test_table() -> None:
    assert table(("a", "long"), [("xyz", "1"), ("", "22222")]) == "a    long\n---------\nxyz  1\n     22222"
