"""The page of `meshmuon plan` for a run of the demo: what was predicted beside what the run measured."""

from __future__ import annotations

import shlex
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from demo.model import GPT, WEIGHTS
from demo.processes import Runtime
from demo.train import RunResult
from meshmuon.errors import ConfigError
from meshmuon.tools.doctor.context import Context, DoctorOptions
from meshmuon.tools.doctor.measurements import calibrate
from meshmuon.tools.predict.calibration import Calibration
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


def measured_rates(setting: Setting, runtime: Runtime) -> Calibration | None:
    """How fast this machine is on the model's matrices while all processes work, as `meshmuon doctor` measures it;
    CPUs alone.
    """
    if setting.device.type != "cpu":
        return None
    with torch.device("meta"):
        matrices = GPT(setting.model).layers.parameters()
    options = DoctorOptions(quick=True, shapes=tuple({(p.size(0), p.size(1)) for p in matrices if p.dim() == 2}))
    store = dist.HashStore()  # type: ignore[attr-defined]
    alone = runtime.world_size == 1
    if alone:  # a single process has joined no group
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return calibrate(Context(options, runtime.rank, runtime.world_size, store, setting.device, "here"))
    finally:
        if alone:
            dist.destroy_process_group()


def write_plan_page(folder: Path, setting: Setting, result: RunResult) -> str | None:
    """Writes `plan.html`. Returns why there is none, or None.

    Where this machine's rates were not measured, the prediction takes those of the preset `cpu`, which are another
    machine's.
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
        load_machine("cpu") if setting.rates is None else load_machine("cpu").with_calibration(setting.rates),
        MuonOptions(
            scheme=setting.optimizer.scheme,
            ns_steps=setting.optimizer.ns_steps,
            param_dtype=WEIGHTS[setting.model.weights],
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
