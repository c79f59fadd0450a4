"""``meshmuon plan``: what its arguments mean, and what is written where."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import TypeAlias

import torch

from ...errors import ConfigError
from ...execute import CommDtypeLike
from ...params.checks import FLOAT_DTYPES
from ...params.option_table import optimizer_options
from ..predict.calibration import Calibration
from ..predict.machines import Machine, machine_like, machine_names
from ..simulate.advice import advice_for, advice_from_choices, compare_meshes, compare_options, search_options
from ..simulate.description import ModelDescription, load_model
from ..simulate.inputs import load_machine, preset_names
from ..simulate.modules import build_from_hf_config, build_module
from ..simulate.render import print_report
from ..simulate.report import Figures, build_report
from ..simulate.sharding import FileSharding, MeshAxes, Sharding
from ..simulate.simulation import MuonOptions, Simulation, Workload
from .output import is_standard_output, printing, write_output

_CHECKED = ("memory_budget", "warmup_step")
_WRITTEN = ("json", "save_model")


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        with printing():
            print("\n".join(f"{name:<18} {load_model(name).title}" for name in preset_names("model")), end="\n\n")
            print("\n".join(f"{name:<18} {load_machine(name).title}" for name in preset_names("machine")))
        return 0
    to_output = [f"--{name.replace('_', '-')}" for name in _WRITTEN if is_standard_output(getattr(arguments, name))]
    if len(to_output) > 1:
        raise ConfigError(
            f"{' and '.join(to_output)} are all for standard output. Keep one - and name files for the others."
        )
    inputs = _inputs(arguments)
    if inputs is None:
        return 0
    model, machine, options, shardings = inputs
    simulation = Simulation.run(
        model, shardings[0], machine, options, Workload(arguments.tokens_per_step, arguments.mfu)
    )
    report = _report(simulation, shardings[1:], compare=arguments.compare)
    if arguments.json is not None:
        write_output(arguments.json, lambda file: print(json.dumps(report), file=file))
    if not to_output:
        with printing():
            print_report(report)
    return 0


_Inputs: TypeAlias = tuple[ModelDescription, Machine, MuonOptions, Sequence[Sharding]]


def _inputs(arguments: argparse.Namespace) -> _Inputs | None:
    """A model on one or more shardings; None if it was only to be saved."""
    model = _model(arguments)
    if arguments.save_model is not None:
        write_output(arguments.save_model, lambda file: print(json.dumps(model.to_json(), indent=1), file=file))
        if not arguments.mesh and arguments.layout is None:
            return None
    if not any(param.use_muon for param in model.params):
        raise ConfigError(f"{model.name} has no matrix for Muon: AdamW alone would update it, and nothing is planned.")
    machine = _machine(arguments)
    shardings = _shardings(arguments, machine)
    return model, machine, _options(arguments), shardings


def _report(simulation: Simulation, others: Sequence[Sharding], *, compare: bool) -> Figures:
    command = shlex.join(["meshmuon", *sys.argv[1:]])
    report = build_report(simulation, command, advice_for(simulation))
    if others:
        report["meshes"] = compare_meshes(simulation, others)
    choices = compare_options(simulation) if compare else search_options(simulation)
    report["advice"] += advice_from_choices(choices)
    report["choices"] = choices if compare else []
    return report


def _model(arguments: argparse.Namespace) -> ModelDescription:
    given = [name for name in ("model", "hf_config", "module") if getattr(arguments, name) is not None]
    if len(given) != 1:
        have = "none is" if not given else "several are"
        raise ConfigError(f"one of --model, --hf-config and --module says which model to plan; {have} given.")
    if arguments.model is not None:
        return load_model(arguments.model)
    return build_module(arguments.module) if arguments.module is not None else build_from_hf_config(arguments.hf_config)


def _machine(arguments: argparse.Namespace) -> Machine:
    if arguments.calibration is None:
        return load_machine(arguments.hardware or "h100")
    try:
        calibration = Calibration.load(arguments.calibration)
    except ConfigError as error:
        raise ConfigError(f"--calibration {arguments.calibration}: {error}") from None
    if arguments.hardware is not None:
        return load_machine(arguments.hardware).with_calibration(calibration)
    machine = machine_like("cpu" if calibration.device == "cpu" else calibration.device_name)
    if machine is None:
        raise ConfigError(
            f"--calibration was measured on {calibration.device_name!r}, whose memory is not known: add --hardware "
            f"with one of {', '.join(machine_names())}, or with a .json file of your own."
        )
    return machine.with_calibration(calibration)


def _shardings(arguments: argparse.Namespace, machine: Machine) -> Sequence[Sharding]:
    if (arguments.layout is None) == (not arguments.mesh):
        raise ConfigError('--mesh "dp_shard=64" or --layout FILE says how the model is sharded; give one of them.')
    if arguments.layout is not None:
        return [FileSharding.load(arguments.layout)]
    ranks = None if arguments.nodes is None else arguments.nodes * machine.ranks_per_node
    return [MeshAxes.parse(text, ranks) for text in arguments.mesh]


def _options(arguments: argparse.Namespace) -> MuonOptions:
    given = {name: value for name in _CHECKED if (value := getattr(arguments, name)) is not None}
    for option in optimizer_options():
        if option.name in given and option.check is not None:
            option.check(given, option.name, "meshmuon plan")
    rates = None if arguments.calibration is None else Calibration.load(arguments.calibration)
    return MuonOptions(
        replicas=arguments.replicas,
        comm_dtype=_comm_dtype(arguments.comm_dtype),
        scheme=arguments.scheme,
        param_dtype=_dtype(arguments.param_dtype) or torch.float32,
        momentum_dtype=_dtype(arguments.momentum_dtype),
        cost_model=None if rates is None or rates.exchange is None else rates.cost_model(),
        **given,
    )


def _comm_dtype(text: str | None) -> CommDtypeLike:
    """Of ``"bfloat16"`` or ``"float32,bfloat16"``: to the owners, and back."""
    if text is None:
        return None
    known = {str(dtype).removeprefix("torch."): dtype for dtype in FLOAT_DTYPES}
    dtypes = tuple(known.get(name.strip()) for name in text.split(","))
    if None in dtypes or len(dtypes) > 2:
        raise ConfigError(
            f"--comm-dtype {text} is no dtype for the wire: write one of {', '.join(known)}, or two with a comma."
        )
    return (dtypes[0], dtypes[-1])


def _dtype(name: str | None) -> torch.dtype | None:
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype
