"""One rank of the predictions benchmark; ``predictions.py`` starts it under torchrun.

Rounds alternate: measure rates with all ranks at work, as ``meshmuon doctor`` does, then step every layout once. Each
round predicts its own steps, so that a machine that slows down slows down both.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import common  # first: it sets what torch reads when it starts
import torch
import torch.distributed as dist

sys.path.insert(0, str(common.ROOT))  # for the counts of DistMuon
from layouts import ModelLayout, layouts_for
from ranks import Runner, make, rates_for
from wire import Wire

from meshmuon import Muon
from meshmuon.tools.predict.prediction import predict
from tests.support.counting import buffer_bytes, bytes_sent

SCHEME = "meshmuon, auto"
EXCHANGE_BUFFERS = ("shards", "gathered", "results", "sent", "received", "averages")


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
    plan, rank = optimizer_of(runner).plan(), dist.get_rank()
    found = by_rank((wire.sent, held_buffers(optimizer_of(runner))))
    planned_bytes = bytes_sent(plan, averages=layout.data_parallel)
    planned_buffers = buffer_bytes(plan, averages=layout.data_parallel)
    return {
        "waves": len(plan.wave_lanes),
        "matrices": len(plan.tasks),
        "bytes": {"predicted": list(planned_bytes.values()), "measured": [sent for sent, _ in found]},
        "buffers": {"predicted": list(planned_buffers.values()), "measured": [held for _, held in found]},
        "rank": rank,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("layers", "width", "rounds", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    world, wire = dist.get_world_size(), Wire()
    layouts = layouts_for(world)
    runners = {layout.name: make(SCHEME, layout, layout.shapes(options.layers, options.width)) for layout in layouts}
    for _ in range(2):  # the first step makes plans and buffers
        for runner in runners.values():
            runner.step.before()
            runner.step.run()
    results = {layout.name: counts(layout, runners[layout.name], wire) for layout in layouts}
    predicted: dict[str, list[float]] = {name: [] for name in runners}
    measured: dict[str, list[float]] = {name: [] for name in runners}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
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
            around = [
                predict(plans[layout.name], calibration, averages=layout.data_parallel)
                for calibration in calibrations[-2:]
            ]
            predicted[layout.name].append(statistics.mean(prediction.seconds for prediction in around))
            parts[layout.name].append(around[-1].seconds_by_kind)
            measured[layout.name].append(statistics.median(times[layout.name].wall))
    for name, result in results.items():
        result |= {
            "layout": name,
            "ranks": world,
            "predicted_s": predicted[name],
            "measured_s": measured[name],
            "parts": parts[name],
        }
    if dist.get_rank() == 0:
        text = json.dumps({"results": list(results.values()), "calibration": calibrations[-1].to_json()})
        options.out.write_text(text + "\n")
    runners.clear()
    steps.clear()
    gc.collect()  # an optimizer that outlives its process group may hang the process when it exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
