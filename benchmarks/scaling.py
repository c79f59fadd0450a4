"""What a plan and the host's part of a step cost as matrices and ranks grow: µs per matrix, which must stay flat.

Nothing is sent: one process is rank 0 of thousands, over torch's fake process group. Matrices are as small as their
shards allow, so that a step is dispatch only. ``plan`` makes a plan with its digest and this rank's routes, from
layouts; ``first step`` is everything that an optimizer does once: reading DTensors, planning, buffers, views; ``step``
is what it does ever after. ``changing`` is a step in which another tenth of the 32×64 matrices has no gradient every
time, as experts without tokens, beside a steady step in which all have one.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --matrices 1000 100000 --ranks 2 4096
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import common  # first: it sets what torch reads when it starts
import torch
import torch.distributed as dist
from common import Goal, Report, Step, race, ratio
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshmuon import Muon
from meshmuon.layout import Layout, Mesh, Sharded
from meshmuon.plan import PlannedParam, PlanOptions, cost_model_for, make_plan, routes_of

SHAPES = [(rows, cols) for rows in (1024, 2048, 4096, 768, 1536, 1000) for cols in (1024, 2048, 4096, 8192, 100)]
PLAN, FIRST, STEP, CHANGING = "plan", "first step", "step", "changing"
MOST_PER_MATRIX = {1: 15.0, 2: 30.0}  # µs of host time: on one device, sharded
MOST_CHANGING = 1.2  # a step whose missing gradients change ÷ a steady one


@dataclass(frozen=True, slots=True)
class Point:
    """µs of process time per matrix for a number of matrices on a number of ranks."""

    what: str
    matrices: int
    ranks: int
    us_per_matrix: float
    wall_us_per_matrix: float
    rounds: int
    over_steady: float | None = None  # of ``changing``: its time ÷ that of a steady step, median of rounds


def timed(what: str, matrices: int, ranks: int, run: Callable[[], object], rounds: int, warmups: int = 0) -> Point:
    samples = race({what: Step(run)}, rounds, warmups=warmups, seconds=10.0)[what]
    host = samples.microseconds(matrices)
    return Point(what, matrices, ranks, host["cpu_us"], host["wall_us"], len(samples.cpu))


def plan_point(matrices: int, ranks: int, rounds: int) -> Point:
    mesh = Mesh((ranks,), tuple(range(ranks)))
    layouts = [(Layout(shape, mesh, (Sharded(0),)),) for shape in SHAPES]
    flops = [30 * min(shape) ** 2 * max(shape) for shape in SHAPES]
    names = [f"layers.{k}.weight" for k in range(matrices)]

    def run() -> None:
        kinds = len(SHAPES)
        params = [
            PlannedParam(name, layouts[k % kinds], 0, "bf16", 2, flops[k % kinds]) for k, name in enumerate(names)
        ]
        plan = make_plan(params, PlanOptions(cost_model_for("cuda")))
        assert plan.digest
        routes_of(plan, 0)

    return timed(PLAN, matrices, ranks, run, rounds)


def make_params(matrices: int, ranks: int, shape: tuple[int, int] = (8, 8)) -> list[nn.Parameter]:
    """Weights with gradients: of the given shape, with more rows where each of many ranks needs one."""
    if ranks == 1:
        return [_with_gradient(torch.randn(shape), torch.randn(shape)) for _ in range(matrices)]
    rows, cols = max(shape[0], ranks), shape[1]
    mesh = DeviceMesh("cpu", torch.arange(ranks))

    def shard() -> Tensor:
        return DTensor.from_local(
            torch.randn(rows // ranks, cols),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size((rows, cols)),
            stride=(cols, 1),
        )

    return [_with_gradient(shard(), shard()) for _ in range(matrices)]


def _with_gradient(value: Tensor, grad: Tensor) -> nn.Parameter:
    param = nn.Parameter(value)
    param.grad = grad
    return param


@contextmanager
def first_of(ranks: int) -> Iterator[None]:
    """This process as rank 0 of so many; alone it needs no process group."""
    if ranks == 1:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def step_points(matrices: int, ranks: int, rounds: int) -> list[Point]:
    """The first step and those after it, of one optimizer on rank 0."""
    with first_of(ranks):
        params = make_params(matrices, ranks)
        names = [f"layers.{k}.weight" for k in range(matrices)]
        optimizer = Muon([{"params": params, "names": names, "use_muon": True}], none_grad=False)
        return [
            timed(FIRST, matrices, ranks, optimizer.step, 1),
            timed(STEP, matrices, ranks, optimizer.step, rounds, warmups=1),
        ]


def changing_point(matrices: int, ranks: int, rounds: int) -> Point:
    """Two optimizers in turns: one whose matrices all have gradients, one where another tenth has none every time."""
    with first_of(ranks):
        names = [f"experts.{k}.weight" for k in range(matrices)]
        steady, changing = (make_params(matrices, ranks, (32, 64)) for _ in range(2))
        grads, turns = [param.grad for param in changing], itertools.count()

        def another_tenth_is_idle() -> None:
            turn = next(turns)
            for k, (param, grad) in enumerate(zip(changing, grads, strict=True)):
                param.grad = None if turn and (k + turn) % 10 == 0 else grad

        optimizers = [
            Muon([{"params": p, "names": names, "use_muon": True}], none_grad=False) for p in (steady, changing)
        ]
        steps = {STEP: Step(optimizers[0].step), CHANGING: Step(optimizers[1].step, another_tenth_is_idle)}
        samples = race(steps, max(rounds, 5), warmups=2, seconds=20.0)
        host = samples[CHANGING].microseconds(matrices)
        over_steady = ratio(samples[CHANGING].clock, samples[STEP].clock).median
        return Point(
            CHANGING, matrices, ranks, host["cpu_us"], host["wall_us"], len(samples[CHANGING].cpu), over_steady
        )


def cases(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """What is measured, as (what, matrices, ranks): every plan; steps on one device, and sharded up to
    ``--most-sharded``.
    """
    sharded = [count for count in options.matrices if count <= options.most_sharded]
    middle = sharded[len(sharded) // 2]
    plans = [(PLAN, count, ranks) for count in options.matrices for ranks in options.ranks]
    alone = [(STEP, count, 1) for count in options.matrices]
    growing = [(STEP, count, options.ranks[0]) for count in sharded]
    wider = [(STEP, middle, ranks) for ranks in options.ranks[1:]]
    few = [count for count in options.matrices if 1000 <= count <= 10_000] or options.matrices[-1:]
    changing = [(CHANGING, count, ranks) for count in few for ranks in (1, options.ranks[0])]
    return [*plans, *alone, *growing, *wider, *changing]


def rounds_for(what: str, matrices: int) -> int:
    """Large plans take seconds and hardly vary."""
    return 5 if matrices < 10_000 else 1 if what == PLAN and matrices > 10_000 else 3


MEASURED: dict[str, Callable[[int, int, int], list[Point]]] = {
    PLAN: lambda *case: [plan_point(*case)],
    STEP: step_points,
    CHANGING: lambda *case: [changing_point(*case)],
}


def measure(options: argparse.Namespace, report: Report) -> list[Point]:
    points: list[Point] = []
    for what, matrices, ranks in report.each(
        cases(options), lambda case: f"{case[0]}: {case[1]} matrices, {case[2]} ranks"
    ):
        rounds = options.rounds or rounds_for(what, matrices)
        gc.collect()
        begin = time.perf_counter()
        points += MEASURED[what](matrices, ranks, rounds)
        report.console.print(f"  {what}, {matrices} matrices, {ranks} ranks: {time.perf_counter() - begin:.1f} s")
    return points


def grid(points: Sequence[Point], what: str, report: Report) -> None:
    """A table with a row per number of ranks and a column per number of matrices."""
    by_cell = {(point.ranks, point.matrices): point for point in points if point.what == what}
    counts = sorted({matrices for _, matrices in by_cell})
    rows = []
    for ranks in sorted({ranks for ranks, _ in by_cell}):
        cells = [by_cell.get((ranks, count)) for count in counts]
        rows.append((str(ranks), *(f"{point.us_per_matrix:.1f}" if point else "–" for point in cells)))
    report.table(
        f"{what}: µs of process time per matrix", ("ranks", *(f"{count:,} matrices" for count in counts)), rows
    )


def show(points: Sequence[Point], report: Report) -> None:
    for what in (PLAN, FIRST, STEP, CHANGING):
        grid(points, what, report)
    rows = [(str(p.ranks), f"{p.matrices:,}", f"{p.over_steady:.3f}") for p in points if p.over_steady is not None]
    report.table("changing ÷ a steady step", ("ranks", "matrices", "ratio"), rows)


def curve(points: Sequence[Point], what: str, ranks: int) -> list[Point]:
    """The points of one number of ranks, by number of matrices."""
    return sorted(
        (point for point in points if point.what == what and point.ranks == ranks), key=lambda point: point.matrices
    )


def growth(points: Sequence[Point], what: str, ranks: int) -> float | None:
    """µs per matrix at the most matrices ÷ at the fewest."""
    along = curve(points, what, ranks)
    return along[-1].us_per_matrix / along[0].us_per_matrix if len(along) > 1 else None


def goals_of(points: Sequence[Point], options: argparse.Namespace) -> list[Goal]:
    goals, ranks = [], options.ranks
    for world, where in ((1, "on one device"), (ranks[0], f"sharded over {ranks[0]} ranks")):
        worst = max(point.us_per_matrix for point in points if point.what == STEP and point.ranks == world)
        goals.append(
            Goal(f"host µs per matrix {where}, at any number of matrices", worst, most=MOST_PER_MATRIX[min(world, 2)])
        )
        goals.append(
            Goal(f"growth of µs per matrix {where}, most ÷ fewest matrices", growth(points, STEP, world), most=1.2)
        )
    changing = [point.over_steady for point in points if point.over_steady is not None]
    goals.append(Goal("step with another idle tenth every time ÷ a steady step", max(changing), most=MOST_CHANGING))
    wide = [point.us_per_matrix for point in points if point.what == STEP and point.ranks > 1]
    goals.append(Goal("host µs per matrix at any number of ranks", max(wide), most=MOST_PER_MATRIX[2]))
    plans = {world: growth(points, PLAN, world) for world in ranks}
    known = {world: grown for world, grown in plans.items() if grown is not None}
    most = max(known, key=lambda world: known[world], default=None)
    goals.append(
        Goal(
            "growth of planning µs per matrix, most ÷ fewest matrices",
            known[most] if most else None,
            most=1.2,
            note=f"at {most} ranks",
        )
    )
    return goals


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--matrices", type=int, nargs="+", default=None, help="numbers of matrices (default 10² to 10⁵)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=None, help="numbers of ranks (default 2 64 1024 4096)")
    parser.add_argument(
        "--most-sharded", type=int, default=10_000, help="most matrices of a sharded step (default 10,000)"
    )


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.matrices = options.matrices or ([20, 100] if options.quick else [100, 1000, 10_000, 100_000])
    options.ranks = options.ranks or ([2, 16] if options.quick else [2, 64, 1024, 4096])


if __name__ == "__main__":
    common.Benchmark("scaling", __doc__, measure, show, goals_of, add_options, settle_options).main()
