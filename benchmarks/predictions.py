"""Predicted against measured: step time, bytes and buffers of the layouts on 1, 2 and 4 ranks.

    make bench BENCH=predictions
    python benchmarks/predictions.py --worlds 2 4

Ranks are processes over gloo. In every round all ranks measure rates as ``meshmuon doctor --shapes`` does, with the
shapes of the plans, and step every layout; the steps of a round are predicted with the rates from before and after
them. Bytes and buffers are counted where they are sent and allocated. Ratios of times are medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import common  # first: it sets what torch reads when it starts
import torch
import torch.distributed as dist
from common import Goal, Report, ratio
from ranks import ModelLayout, Runner, Wire, layouts_for, make, run_rank, run_ranks

from meshmuon import Muon
from meshmuon.tools.doctor.context import Context, DoctorOptions
from meshmuon.tools.doctor.measurements import calibrate
from meshmuon.tools.predict.calibration import Calibration
from meshmuon.tools.predict.prediction import predict

sys.path.insert(0, str(common.ROOT))  # for the counts
from tests.support.counting import buffer_bytes, bytes_sent

OPTIONS = ("layers", "width", "rounds", "threads")
SCHEME = "meshmuon, auto"
EXCHANGE_BUFFERS = ("shards", "gathered", "results", "sent", "received", "averages")
COLUMNS = (
    "ranks",
    "layout",
    "waves",
    "measured, ms",
    "predicted, ms",
    "measured ÷ predicted",
    "largest part",
    "bytes",
    "buffers",
)


def rates_for(shapes: Iterable[tuple[int, ...]]) -> Calibration:
    """The doctor's measurements, with matrices of these shapes, summarised on every rank alike."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    options = DoctorOptions(quick=True, shapes=tuple(sorted({(shape[-2], shape[-1]) for shape in shapes})))
    return calibrate(Context(options, dist.get_rank(), dist.get_world_size(), store, torch.device("cpu"), "here"))


def by_rank(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def optimizer_of(runner: Runner) -> Muon:
    assert isinstance(runner.optimizer, Muon)
    return runner.optimizer


def held_buffers(optimizer: Muon) -> int:
    """Bytes of the exchange buffers that the executor really holds."""
    flat = optimizer._executor._workspace._flat  # type: ignore[attr-defined]
    return sum(t.numel() * t.element_size() for (name, _, _), t in flat.items() if name.split()[0] in EXCHANGE_BUFFERS)


def counts(layout: ModelLayout, runner: Runner, wire: Wire) -> dict[str, Any]:
    """Bytes and buffers of every rank, predicted and found."""
    wire.reset()
    runner.step.before()
    runner.step.run()
    plan = optimizer_of(runner).plan()
    found = by_rank((wire.sent, held_buffers(optimizer_of(runner))))
    planned_bytes = bytes_sent(plan, averages=layout.data_parallel)
    planned_buffers = buffer_bytes(plan, averages=layout.data_parallel)
    return {
        "waves": len(plan.wave_lanes),
        "matrices": len(plan.tasks),
        "bytes": {"predicted": list(planned_bytes.values()), "measured": [sent for sent, _ in found]},
        "buffers": {"predicted": list(planned_buffers.values()), "measured": [held for _, held in found]},
        "layout": layout.name,
        "ranks": dist.get_world_size(),
        "predicted_s": [],
        "measured_s": [],
        "parts": [],
    }


def measure_rank(options: argparse.Namespace) -> list[dict[str, Any]]:
    """On one rank. Rounds alternate: measure rates with all ranks at work, then step every layout.

    Each round predicts its own steps, so that a machine that slows down slows down both.
    """
    world, wire = dist.get_world_size(), Wire()
    layouts = layouts_for(world)
    runners = {layout.name: make(SCHEME, layout, layout.shapes(options.layers, options.width)) for layout in layouts}
    for _ in range(2):  # the first step makes plans and buffers
        for runner in runners.values():
            runner.step.before()
            runner.step.run()
    results = {layout.name: counts(layout, runners[layout.name], wire) for layout in layouts}
    steps = {name: runner.step for name, runner in runners.items()}
    plans = {name: optimizer_of(runner).plan() for name, runner in runners.items()}
    shapes = [tuple(param.shape) for runner in runners.values() for param in runner.params]
    calibrations = [rates_for(shapes)]
    for _ in range(options.rounds):
        wire.reset()
        times = common.race(steps, 3, warmups=0, barrier=dist.barrier)
        if options.rounds > 1:  # a single round is a try
            calibrations.append(rates_for(shapes))
        for layout in layouts:
            plan, result = plans[layout.name], results[layout.name]
            around = [predict(plan, rates, averages=layout.data_parallel) for rates in calibrations[-2:]]
            result["predicted_s"].append(statistics.mean(prediction.seconds for prediction in around))
            result["parts"].append(around[-1].seconds_by_kind)
            result["measured_s"].append(statistics.median(times[layout.name].wall))
    return list(results.values())


def exact(result: dict[str, Any], what: str) -> bool:
    """Whether every rank has just what was predicted."""
    return bool(result[what]["predicted"] == result[what]["measured"])


def row_of(result: dict[str, Any]) -> tuple[str, ...]:
    measured, predicted = (statistics.median(result[key]) * 1e3 for key in ("measured_s", "predicted_s"))
    part, seconds = max(result["parts"][-1].items(), key=lambda item: item[1])
    counted = ["equal" if exact(result, what) else "DIFFER" for what in ("bytes", "buffers")]
    return (
        str(result["ranks"]),
        result["layout"],
        str(result["waves"]),
        f"{measured:.1f}",
        f"{predicted:.1f}",
        ratio(result["measured_s"], result["predicted_s"]).text(digits=2),
        f"{part} {seconds / sum(result['parts'][-1].values()):.0%}",
        *(
            f"{max(result[what]['measured']) / 2**20:.1f} MiB, {text}"
            for what, text in zip(("bytes", "buffers"), counted, strict=True)
        ),
    )


def off(result: dict[str, Any]) -> float:
    """How far the prediction is from what was measured, as a share of the latter."""
    return abs(1 - 1 / ratio(result["measured_s"], result["predicted_s"]).median)


def goals_of(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Goal]:
    """Times within 15 %, everything that can be counted exactly."""
    apart = {f"{result['layout']} on {result['ranks']}": off(result) for result in results}
    worst, median = max(apart, key=lambda name: apart[name]), statistics.median(apart.values())
    wrong = [sum(not exact(result, what) for result in results) for what in ("bytes", "buffers")]
    return [
        Goal("prediction beside the measured step time, median of layouts", median, most=0.15),
        Goal("prediction beside the measured step time, worst layout", apart[worst], most=0.15, note=worst),
        Goal("layouts whose bytes were not predicted exactly", wrong[0], most=0),
        Goal("layouts whose buffers were not predicted exactly", wrong[1], most=0),
    ]


def measure(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for world in report.each(options.worlds, lambda world: f"{world} ranks"):
        results += run_ranks(Path(__file__), world, options, OPTIONS)
    return results


def show(results: Sequence[dict[str, Any]], report: Report) -> None:
    report.table("Predicted and measured steps", COLUMNS, map(row_of, results))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--layers", type=int, default=None, help="layers of the model")
    parser.add_argument("--width", type=int, default=None, help="its width")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for one number of ranks")


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.layers = options.layers or (2 if options.quick else 4)
    options.width = options.width or (64 if options.quick else 256)
    options.rounds = options.rounds or (1 if options.quick else 9)


if __name__ == "__main__":
    if dist.is_torchelastic_launched():  # by this very script
        run_rank(measure_rank, OPTIONS)
    else:
        common.Benchmark("predictions", __doc__, measure, show, goals_of, add_options, settle_options).main()
