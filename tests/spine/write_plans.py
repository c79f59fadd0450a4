"""Writes ``plans/best.json``: for every row of ``benchmarks/choices.py`` the fastest plan that a search has found.

    python -m tests.spine.write_plans             # writes the file
    python -m tests.spine.write_plans --compare   # today's plans by default, each ÷ the best of the file

It was written once, by meshmuon 0.1.0, while an optimizer still compared plans by itself, and takes 10 to 30 minutes.
The file is what later plans by default are compared with, so it is not written anew when they change. Each row has
seconds, exchange buffers and options of the plan by default and of the fastest whose buffers are allowed, and [seconds,
buffers] of every option that ``benchmarks/choices.py`` sets by hand. All are predicted by the machine
``plans/h100.json``; the rates that follow from it for a job inside a node and for one on several are in the file, and
each row names its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

HERE = Path(__file__).parent
FILE = HERE / "plans" / "best.json"
HARDWARE = str(HERE / "plans" / "h100.json")
_OPTIONS = ("replicas", "chunk_size", "budget", "in_flight", "max_peers", "waves", "heavy")


def report_of(row: dict[str, Any]) -> dict[str, Any]:
    """What ``meshmuon plan`` predicts of a row's model and mesh, by the machine with which the file was made."""
    command = ["meshmuon", "plan", "--model", row["model"], "--mesh", row["mesh"], "--param-dtype", row["param_dtype"]]
    output = io.StringIO()
    command += ["--hardware", HARDWARE, "--json", "-"]
    with patch.object(sys, "argv", command), contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        runpy.run_module("meshmuon", run_name="__main__")
    report: dict[str, Any] = json.loads(output.getvalue())
    return report


def compare() -> None:
    ratios = []
    for row in json.loads(FILE.read_text())["rows"]:
        ratios.append(report_of(row)["step"]["seconds"] / row["best"]["seconds"])
        print(f"{ratios[-1]:.4f}  {row['model']} {row['mesh']}, best: {row['best']['option']}", flush=True)
    print(f"worst {max(ratios):.4f}, median {statistics.median(ratios):.4f}")


def write() -> None:
    sys.path.insert(0, str(HERE.parent.parent / "benchmarks"))
    import choices

    import meshmuon

    rates: dict[str, Any] = {}
    rows = []
    for name, mesh in choices.ROWS:
        rows.append(_row(choices, name, mesh, rates))
        print(name, mesh, f"{rows[-1]['default']['seconds']:.5f}", f"{rows[-1]['best']['seconds']:.5f}", flush=True)
    versions = {"meshmuon": meshmuon.__version__, "torch": torch.__version__}
    FILE.write_text(as_text({**versions, "hardware": Path(HARDWARE).name, "rates": rates, "rows": rows}))


def as_text(content: dict[str, Any]) -> str:
    """JSON with a line for each of the rates and rows."""
    rates = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in content["rates"].items())
    rows = ",\n".join(f"  {json.dumps(row)}" for row in content["rows"])
    head = "".join(f" {json.dumps(key)}: {json.dumps(content[key])},\n" for key in ("meshmuon", "torch", "hardware"))
    return f'{{\n{head} "rates": {{\n{rates}\n }},\n "rows": [\n{rows}\n ]\n}}\n'


def _row(choices: Any, name: str, mesh: str, rates: dict[str, Any]) -> dict[str, Any]:
    """The plans of one row, whose rates are added to ``rates``."""
    machine, muon = choices.load_machine(HARDWARE), choices.MuonOptions(param_dtype=torch.bfloat16)
    model, axes = choices.load_model(name), choices.MeshAxes.parse(mesh)
    usual = choices.memory_budget_for(machine.memory_bytes)
    allowed = choices.BUFFERS * usual
    labelled = [("default", muon), *choices.by_hand(muon, usual, replicated=axes.dp_replicate > 1)]
    plans: list[dict[str, Any]] = []
    rates_of_row: dict[str, Any] = {}
    for label, options in labelled:
        stage = choices.Simulation.run(model, axes, machine, options, choices.Workload(2**22, 0.4)).slowest
        plans.append(_figures(label, stage))
        rates_of_row = rates_of_row or _rates(machine, stage, options)
    where = "one node" if rates_of_row["between"] is None else "several nodes"
    assert rates.setdefault(where, rates_of_row) == rates_of_row
    best = min((plan for plan in plans if plan["buffers"] <= allowed), key=lambda plan: plan["seconds"])
    row = {
        "model": name,
        "mesh": mesh,
        "ranks": axes.ranks,
        "param_dtype": "bfloat16",
        "rates": where,
        "allowed": allowed,
    }
    others = {plan["option"]: [plan["seconds"], plan["buffers"]] for plan in plans[1:]}
    return row | {"default": plans[0], "best": best, "others": others}


def _figures(label: str, stage: Any) -> dict[str, Any]:
    plan, timeline = stage.plan, stage.timeline
    return {
        "option": label,
        "seconds": timeline.seconds,
        "bound": timeline.bound,
        "buffers": int(stage.memory["exchange_buffers"].max()),
        "plan": {key: getattr(plan.options, key) for key in _OPTIONS}
        | {
            "waves_made": len(plan.wave_lanes),
            "relayed": bool(plan.relayed),
            "shared_by_replicas": len(
                {task.param for task in plan.tasks if task.owner >= 0 and task.sharded.replicas > 1}
            ),
        },
    }


def _rates(machine: Any, stage: Any, options: Any) -> dict[str, Any]:
    """Those of ``SimulatedStage.of``."""
    plan = stage.plan
    rates = machine.rates_for(
        stage.planned.compute_dtype,
        several_nodes=plan.options.nodes is not None,
        weight=options.param_dtype.itemsize,
        momentum=(options.momentum_dtype or torch.float32).itemsize,
        wire=max((param.wire.itemsize for param in plan.params), default=4),
    )
    as_json: dict[str, Any] = json.loads(json.dumps(asdict(rates)))
    return as_json


if __name__ == "__main__":
    compare() if "--compare" in sys.argv else write()
