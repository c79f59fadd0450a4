"""Is a plan that meshmuon chooses the best one by its own prediction? Each row compares it with every single option set
by hand.

    make bench BENCH=choices

Nothing is measured but the time that planning takes: steps are predicted from the machine files of ``meshmuon plan``.
Options that need more exchange buffers than a plan may take by itself are shown, and not counted as exceptions. The
bound is what no order of a plan's waves can undercut.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from common import COLOURS, Benchmark, Goal, Report

from meshmuon.device import memory_budget_for
from meshmuon.plan import bytes_text
from meshmuon.tools.simulate.description import load_model
from meshmuon.tools.simulate.inputs import load_machine
from meshmuon.tools.simulate.sharding import MeshAxes
from meshmuon.tools.simulate.simulation import MuonOptions, SimulatedStage, Simulation, Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = (
    ("deepseek-v3", "dp_shard=2048,ep=64"),
    ("llama3-405b", "dp_shard=2048"),
    ("kimi-k2", "dp_shard=4096,ep=64"),
    ("kimi-k2", "dp_replicate=4,dp_shard=128,ep=128"),
    ("llama3-8b", "dp_replicate=4,dp_shard=4,tp=4"),
    ("llama3-70b", "dp_shard=64"),
    ("qwen3-32b", "dp_shard=64"),
    ("llama3-8b", "dp_shard=64"),
    ("llama3-8b", "dp_shard=8"),
    ("llama3-8b", "dp_replicate=8,dp_shard=64"),
    ("llama3-70b", "dp_replicate=2,dp_shard=32"),
    ("llama3-70b", "dp_shard=32,tp=8"),
    ("llama3-70b", "dp_shard=512"),
    ("llama3-405b", "dp_shard=128,tp=8"),
    ("qwen3-0.6b", "dp_replicate=8"),
    ("qwen3-4b", "dp_shard=16"),
    ("qwen3-8b", "dp_replicate=2,dp_shard=8"),
    ("qwen3-14b", "dp_replicate=4,dp_shard=8"),
    ("qwen3-32b", "dp_replicate=16,dp_shard=16"),
    ("qwen3-30b-a3b", "dp_shard=32,ep=8"),
    ("qwen3-30b-a3b", "dp_shard=64"),
    ("qwen3-235b-a22b", "dp_shard=128,ep=8"),
    ("qwen3-235b-a22b", "dp_shard=128"),
    ("mixtral-8x7b", "dp_shard=64,ep=8"),
    ("mixtral-8x22b", "dp_shard=128,ep=8"),
    ("gpt-oss-20b", "dp_shard=16,ep=8"),
    ("gpt-oss-120b", "dp_shard=256,ep=32"),
    ("gpt2-xl", "dp_replicate=8"),
    ("gpt2-medium", "dp_replicate=64"),
    ("vit-g", "dp_replicate=16"),
    ("vit-l", "dp_shard=8"),
    ("kimi-k2", "dp_shard=1024,ep=64"),
)
QUICK = (4, 5, 7, 9, 10, 29)
FASTER = 0.97  # of the chosen plan's seconds: an exception
MOST_OVER_BOUND = 1.15
BUFFERS = 18  # usual budgets that a plan may take for exchange buffers


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.rows = [ROWS[k] for k in QUICK] if options.quick else ROWS


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hardware", default="h100", help="a machine of meshmuon plan")


def by_hand(options: MuonOptions, usual: int, *, replicated: bool) -> Iterator[tuple[str, MuonOptions]]:
    for replicas in ("share", "repeat") if replicated else ():
        yield f"replicas={replicas}", replace(options, replicas=replicas)
    for factor in (1 / 8, 1 / 2, 2, 4):
        budget = int(factor * usual)
        yield f"memory_budget={budget >> 20}M", replace(options, memory_budget=budget)
    for ahead in (1, 3, 8, 11):
        yield f"waves_ahead={ahead}", replace(options, waves_ahead=ahead)


def measure(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    machine, muon = load_machine(options.hardware), MuonOptions(param_dtype=torch.bfloat16)
    usual, rows = memory_budget_for(machine.memory_bytes), []
    for name, mesh in report.each(options.rows, lambda row: " ".join(row)):
        model, axes = load_model(name), MeshAxes.parse(mesh)

        def simulate(muon: MuonOptions) -> tuple[SimulatedStage, float]:
            begin = time.process_time()
            simulation = Simulation.run(model, axes, machine, muon, Workload(2**22, 0.4))  # noqa: B023 - called in its turn only
            return simulation.slowest, time.process_time() - begin

        chosen, planning = simulate(muon)
        others = []
        for label, other in by_hand(muon, usual, replicated=axes.dp_replicate > 1):
            stage = simulate(other)[0]
            others.append(
                {
                    "option": label,
                    "seconds": stage.timeline.seconds,
                    "buffers": int(stage.memory["exchange_buffers"].max()),
                }
            )
        rows.append(
            {
                "model": name,
                "mesh": mesh,
                "ranks": axes.ranks,
                "seconds": chosen.timeline.seconds,
                "bound": chosen.timeline.bound,
                "waves": len(chosen.plan.wave_lanes),
                "in_flight": chosen.plan.options.in_flight,
                "buffers": int(chosen.memory["exchange_buffers"].max()),
                "allowed": BUFFERS * usual,
                "matrices": len(chosen.plan.tasks),
                "planning": planning,
                "others": others,
            }
        )
    return rows


def best_of(row: dict[str, Any]) -> dict[str, Any]:
    """The fastest option by hand within the memory that a plan may take."""
    return min(
        (other for other in row["others"] if other["buffers"] <= row["allowed"]), key=lambda other: other["seconds"]
    )


def exceptions(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if best_of(row)["seconds"] < FASTER * row["seconds"]]


def show(rows: list[dict[str, Any]], report: Report) -> None:
    columns = (
        "model",
        "mesh",
        "chosen",
        "buffers",
        "waves",
        "÷ bound",
        "best by hand",
        "option",
        "with more memory",
        "planning",
    )
    report.table(
        "predicted steps of chosen plans, and of plans with one option set by hand",
        columns,
        [_cells(row) for row in rows],
    )
    report.note(f"{len(exceptions(rows))} of {len(rows)} rows have an option by hand that is more than 3 % faster.")
    report.note("with more memory: the fastest option that needs more exchange buffers than a plan may take by itself.")
    report.note("planning: CPU seconds of planning and of predicting the chosen plan, by one process.")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    best = best_of(row)
    more = [
        other
        for other in row["others"]
        if other["buffers"] > row["allowed"] and other["seconds"] < FASTER * row["seconds"]
    ]
    larger = min(more, key=lambda other: other["seconds"], default=None)
    return (
        row["model"],
        row["mesh"],
        f"{1e3 * row['seconds']:.1f} ms",
        bytes_text(row["buffers"]),
        f"{row['waves']}, {row['in_flight']} in flight",
        f"{row['seconds'] / row['bound']:.2f}",
        f"{1e3 * best['seconds']:.1f} ms",
        best["option"],
        ""
        if larger is None
        else f"{1e3 * larger['seconds']:.1f} ms, {larger['option']}, {bytes_text(larger['buffers'])}",
        f"{row['planning']:.2f} s",
    )


def goals(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[Goal]:
    large = [row["planning"] for row in rows if row["matrices"] > 50_000]
    small = [row["planning"] for row in rows if row["matrices"] <= 1000 and row["ranks"] <= 64]
    return [
        Goal("rows with an option by hand that is more than 3 % faster", len(exceptions(rows)), most=0),
        Goal("largest step ÷ bound", max(row["seconds"] / row["bound"] for row in rows), most=MOST_OVER_BOUND),
        Goal("seconds to plan at most 1,000 matrices on at most 64 ranks", max(small, default=None), most=0.5),
        Goal("seconds to plan more than 50,000 matrices", max(large, default=None), most=15),
    ]


def plot(rows: list[dict[str, Any]], figure: Figure) -> None:
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh(places, [row["seconds"] / row["bound"] for row in rows], color=COLOURS["ours"], label="chosen")
    axes.plot(
        [best_of(row)["seconds"] / row["bound"] for row in rows],
        places,
        "o",
        color=COLOURS["AdamW"],
        label="best by hand",
    )
    axes.axvline(1, color=COLOURS["line"])
    axes.set_yticks(places, [f"{row['model']} {row['mesh']}" for row in rows], fontsize=7)
    axes.set_xlabel("predicted step ÷ bound of the chosen plan")
    axes.invert_yaxis()
    axes.legend()


BENCHMARK = Benchmark("choices", __doc__, measure, show, goals, plot, (9, 8), add_options, settle_options)

if __name__ == "__main__":
    BENCHMARK.main()
