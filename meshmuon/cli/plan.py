"""``meshmuon plan``: its arguments, and what is written where."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import torch

from ..errors import ConfigError
from ..params.option_table import optimizer_options
from ..plan import Calibration, CostModel, write_trace
from ..simulate.advice import advice_for, advice_from_choices
from ..simulate.build_report import build_report
from ..simulate.cluster import MuonOptions
from ..simulate.compare import compare_meshes, compare_options
from ..simulate.description import ModelDescription
from ..simulate.job_plan import describe_job, device_of, read_job_plan
from ..simulate.machines import Machine
from ..simulate.meshes import MeshAxes
from ..simulate.modules import build_from_hf_config, build_module
from ..simulate.page import render_page, require_plotly
from ..simulate.presets import load_machine, load_model, machine_names, model_names
from ..simulate.report import Report
from ..simulate.sharding import FileSharding, MeshSharding, Sharding
from ..simulate.simulation import Simulation, Workload
from ..simulate.suggestions import did_you_mean
from ..simulate.text import print_report
from .output import is_standard_output, printing, write_output, write_text

HELP = "see what a step costs on a cluster that is not there"
DESCRIPTION = (
    "Plans a step of Muon for a model on a cluster, with the planner of a real step and without any process group, and tells "
    'what it costs: meshmuon plan --model llama3-8b --mesh "dp_shard=64" --hardware h100 --nodes 8.'
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OF_MODELS = ("model", "hf_config", "module", "mesh", "layout", "nodes", "save_model")
_WRITTEN = ("json", "html", "trace", "save_model", "save_rates")
_DIGITS = r"\d{1,18}(?:\.\d{1,18})?"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    model = parser.add_argument_group("the model, one of")
    model.add_argument("--model", metavar="NAME", help="a model that meshmuon knows (--list), or a .json file like those")
    model.add_argument("--hf-config", type=Path, metavar="FILE", help="the config.json of any model of transformers")
    model.add_argument("--module", metavar="MODULE:FUNCTION", help="a function that builds a torch.nn.Module")
    model.add_argument("--from-json", type=Path, metavar="FILE", help="a plan that a job wrote: optimizer.plan().to_json()")
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument("--mesh", action="append", default=[], metavar="AXES", help='such as "dp_replicate=2,dp_shard=32,tp=8"')
    cluster.add_argument("--layout", type=Path, metavar="FILE", help="any other layout, as JSON, instead of --mesh")
    cluster.add_argument("--hardware", metavar="NAME", help="a machine that meshmuon knows, or a .json file (default: h100)")
    cluster.add_argument("--calibration", type=Path, metavar="FILE", help="what meshmuon doctor --save measured")
    cluster.add_argument("--nodes", type=int, metavar="N", help="nodes of the cluster; the mesh must have their ranks")
    options = parser.add_argument_group("options of Muon")
    options.add_argument("--replicas", choices=("auto", "share", "repeat"), default="auto")
    options.add_argument("--comm-dtype", choices=tuple(_DTYPES), help="default: bfloat16 on GPUs")
    options.add_argument("--param-dtype", choices=tuple(_DTYPES), default="float32", help="of the weights (default: float32)")
    options.add_argument("--momentum-dtype", choices=tuple(_DTYPES), help="default: that of the weights")
    options.add_argument("--scheme", default="auto", metavar="NAME", help="auto, polar_express, keller, zolotarev or hybrid")
    options.add_argument("--memory-budget", type=_size, default=MuonOptions().memory_budget, metavar="BYTES", help="such as 64M")
    options.add_argument("--waves-ahead", type=int, default=MuonOptions().waves_ahead, metavar="N")
    options.add_argument("--max-peers", type=int, default=MuonOptions().max_peers, metavar="N", help="more: in two hops")
    training = parser.add_argument_group("the training step around it")
    training.add_argument("--tokens-per-step", type=_count, default=2**22, metavar="N", help="such as 4M (default: 4,194,304)")
    training.add_argument("--mfu", type=_share, default=0.4, help="share of the peak in forward and backward (default: 0.4)")
    output = parser.add_argument_group("output; FILE is - for standard output, which then has nothing else")
    output.add_argument("--compare", action="store_true", help="other options side by side, and other meshes if there are any")
    output.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    output.add_argument("--html", type=Path, metavar="FILE", help="write the report as one page for a browser")
    output.add_argument("--trace", type=Path, metavar="FILE", help="write a timeline for Perfetto or chrome://tracing")
    output.add_argument("--save-model", type=Path, metavar="FILE", help="write the model as a file for --model")
    output.add_argument("--save-rates", type=Path, metavar="FILE", help="write the machine's rates, for Muon(cost_model=FILE)")
    output.add_argument("--list", action="store_true", help="list models and machines and end")


def _size(text: str) -> int:
    return _number(text, re.fullmatch(rf"({_DIGITS}) ?([KMG]?)(?:i?B)?", text), "bytes, such as 64M")


def _count(text: str) -> int:
    return _number(text, re.fullmatch(rf"({_DIGITS})([KMG]?)", text), "tokens, such as 4M")


def _number(text: str, match: re.Match[str] | None, what: str) -> int:
    number = 0 if match is None else int(float(match[1]) * _UNITS[match[2]])
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of {what}")
    return number


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Plans, prints and writes."""
    if arguments.list:
        with printing():
            _print_list()
        return 0
    quiet = _names_standard_output(arguments)
    if arguments.html is not None:
        require_plotly()  # before anything is planned or written
    others: list[Sharding] = []
    if arguments.from_json is not None:
        simulation = _of_job(arguments)
    else:
        model = _model(arguments)
        if _saves_only(arguments, model):
            return 0
        if not any(param.use_muon for param in model.params):
            raise ConfigError(f"{model.name} has no matrix for Muon: AdamW alone would update it, and nothing is planned.")
        machine = _machine(arguments)
        first, *others = _shardings(arguments, machine)
        simulation = Simulation.run(model, first, machine, _options(arguments), _workload(arguments))
    if arguments.save_rates is not None:
        machine, ranks = simulation.machine, simulation.sharding.ranks
        rates = machine.calibration or machine.as_calibration(ranks)
        write_text(arguments.save_rates, json.dumps(rates.to_json(), indent=1))
    report = _report(simulation, others, compare=arguments.compare)
    if arguments.html is not None:
        page = render_page(report)
        write_output(arguments.html, lambda file: file.write(page))
    if arguments.trace is not None:
        timelines = [(stage.planned.plan.ranks, stage.timeline.phases) for stage in simulation.stages]
        write_output(arguments.trace, lambda file: write_trace(timelines, file))
    if arguments.json is not None:
        write_text(arguments.json, json.dumps(report.to_json()))
    if not quiet:
        with printing():
            print_report(report)
    return 0


def _names_standard_output(arguments: argparse.Namespace) -> bool:
    """Whether one of the options has taken standard output for itself."""
    names = [f"--{name.replace('_', '-')}" for name in _WRITTEN if is_standard_output(getattr(arguments, name))]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} are all for standard output. Keep one - and name files for the others.")
    return bool(names)


def _saves_only(arguments: argparse.Namespace, model: ModelDescription) -> bool:
    """Writes the model where ``--save-model`` says so, and tells whether that is all that was asked for."""
    if arguments.save_model is None:
        return False
    write_text(arguments.save_model, json.dumps(model.to_json(), indent=1))
    return not arguments.mesh and arguments.layout is None


def _workload(arguments: argparse.Namespace) -> Workload:
    return Workload(arguments.tokens_per_step, arguments.mfu)


def _of_job(arguments: argparse.Namespace) -> Simulation:
    """The plan of a job, on the machine that is named or on one of its kind."""
    refused = [f"--{name.replace('_', '-')}" for name in _OF_MODELS if getattr(arguments, name)]
    if refused or arguments.compare:
        raise ConfigError(f"--from-json reads a plan that is complete: leave out {', '.join(refused) or '--compare'}.")
    plan = read_job_plan(arguments.from_json)
    model, sharding, stage = describe_job(plan, arguments.from_json.stem)
    if arguments.hardware is None and arguments.calibration is None and device_of(plan) == "cpu":
        arguments.hardware = "cpu"
    machine = _machine(arguments)
    if plan.options.nodes is not None:
        machine = replace(machine, ranks_per_node=max(map(len, plan.options.nodes.ranks)))
    options = replace(_options(arguments), replicas=plan.options.replicas, memory_budget=plan.options.budget)
    return Simulation.of_plans([stage], model, sharding, machine, options, _workload(arguments))


def _report(simulation: Simulation, others: list[Sharding], *, compare: bool) -> Report:
    command = shlex.join(["meshmuon", *sys.argv[1:]])
    report = build_report(simulation, command, advice_for(simulation))
    if others:
        report = replace(report, meshes=compare_meshes(simulation, others))
    if not compare:
        return report
    choices = compare_options(simulation)
    return replace(report, choices=choices, advice=[*report.advice, *advice_from_choices(choices)])


def _print_list() -> None:
    for name in model_names():
        print(f"{name:<18} {load_model(name).title}")
    print()
    for name in machine_names():
        print(f"{name:<18} {load_machine(name).title}")


def _model(arguments: argparse.Namespace) -> ModelDescription:
    given = [name for name in ("model", "hf_config", "module") if getattr(arguments, name) is not None]
    if len(given) != 1:
        have = "none is" if not given else "several are"
        raise ConfigError(f"one of --model, --hf-config, --module and --from-json says which model to plan; {have} given.")
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
    return load_machine(arguments.hardware or _machine_like(calibration)).with_calibration(calibration)


def _machine_like(calibration: Calibration) -> str:
    """The machine whose memory a calibration is taken to have."""
    if calibration.device == "cpu":
        return "cpu"
    name = next((name for name in machine_names() if name in calibration.device_name.lower()), None)
    if name is None:
        raise ConfigError(
            f"--calibration was measured on {calibration.device_name!r}, whose memory is not known: add --hardware with one of "
            f"{', '.join(machine_names())}, or with a .json file of your own."
        )
    return name


def _shardings(arguments: argparse.Namespace, machine: Machine) -> list[Sharding]:
    if (arguments.layout is None) == (not arguments.mesh):
        raise ConfigError('--mesh "dp_shard=64" or --layout FILE says how the model is sharded; give one of them.')
    if arguments.layout is not None:
        return [FileSharding.load(arguments.layout)]
    ranks = None
    if arguments.nodes is not None:
        if arguments.nodes < 1:
            raise ConfigError(f"--nodes {arguments.nodes} must be at least 1.")
        ranks = arguments.nodes * machine.ranks_per_node
    return [MeshSharding(MeshAxes.parse(text, ranks)) for text in arguments.mesh]


def _options(arguments: argparse.Namespace) -> MuonOptions:
    schemes = ("auto", "polar_express", "keller", "zolotarev", "hybrid")
    if arguments.scheme not in schemes:
        raise ConfigError(
            f"--scheme {arguments.scheme} is unknown.{did_you_mean(arguments.scheme, schemes)} Write one of {', '.join(schemes)}."
        )
    for option in optimizer_options():
        if option.name in ("memory_budget", "waves_ahead", "max_peers") and option.check is not None:
            option.check(vars(arguments), option.name, "meshmuon plan")
    calibration = arguments.calibration
    return MuonOptions(
        replicas=arguments.replicas,
        comm_dtype=_DTYPES.get(arguments.comm_dtype),
        scheme=arguments.scheme,
        memory_budget=arguments.memory_budget,
        waves_ahead=arguments.waves_ahead,
        max_peers=arguments.max_peers,
        param_dtype=_DTYPES[arguments.param_dtype],
        momentum_dtype=_DTYPES.get(arguments.momentum_dtype),
        cost_model=None if calibration is None else _cost_model(Calibration.load(calibration)),
    )


def _cost_model(calibration: Calibration) -> CostModel | None:
    return calibration.cost_model() if calibration.exchange is not None else None
