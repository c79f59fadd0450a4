"""The page of `meshmuon plan` for a run of the demo: what was predicted beside what the run measured."""

from __future__ import annotations

import shlex
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from demo.model import GPT, WEIGHTS
from demo.train import RunResult
from meshmuon.errors import ConfigError
from meshmuon.tools.simulate.advice import advice_for
from meshmuon.tools.simulate.inputs import load_machine
from meshmuon.tools.simulate.modules import describe_module
from meshmuon.tools.simulate.render import render_page
from meshmuon.tools.simulate.report import Figures, build_report
from meshmuon.tools.simulate.sharding import MeshAxes
from meshmuon.tools.simulate.simulation import MuonOptions, Simulation, Workload

if TYPE_CHECKING:
    from demo.report import Setting

FILE = "plan.html"
_MFU = 0.4  # for the prediction of forward and backward; the measured time stands beside it


def write_plan_page(folder: Path, setting: Setting, result: RunResult) -> str | None:
    """Writes `plan.html`. Returns why there is none, or None.

    The prediction takes the rates of the preset `cpu`, which were measured on another machine: it tells the order of magnitude.
    """
    if setting.device.type != "cpu":
        return "no preset has the rates of this device: see meshmuon doctor --save and meshmuon plan --calibration"
    if not result.optimizer_seconds:
        return "no step was made"
    with torch.device("meta"):
        model = GPT(setting.model)
    simulation = Simulation.run(
        describe_module(model, "the demo's GPT"),
        MeshAxes.parse(f"dp_shard={setting.processes}", None),
        load_machine("cpu"),
        MuonOptions(
            scheme=setting.optimizer.scheme, ns_steps=setting.optimizer.ns_steps, param_dtype=WEIGHTS[setting.model.weights]
        ),
        Workload(result.tokens_per_step, _MFU),
    )
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    report = build_report(simulation, command, advice_for(simulation))
    outside = [step - own for step, own in zip(result.step_seconds, result.optimizer_seconds, strict=True)]
    labels = ("optimizer step, median", "forward and backward, median")
    predicted = (simulation.seconds, simulation.training_seconds)
    measured = (statistics.median(result.optimizer_seconds), statistics.median(outside))
    rows = zip(labels, predicted, measured, strict=True)
    report["measured"] = [Figures(label=label, predicted=guess, measured=seconds) for label, guess, seconds in rows]
    try:
        (folder / FILE).write_text(render_page(report), encoding="utf-8")
    except ConfigError as error:
        return str(error)
    return None
