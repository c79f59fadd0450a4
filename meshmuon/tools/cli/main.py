"""The command line: its arguments, and how a command ends.

Nothing here imports torch, so that ``--help`` and mistakes are answered at once. A command is a module of the same name
with ``run(arguments)``, which returns the exit code.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import meshmuon

from ...dropped import refuse_command
from ...errors import ConfigError
from .output import OutputError, printing

_NOT_READ = 128 + 13  # SIGPIPE
_INTERRUPTED = 128 + 2  # SIGINT
_DTYPES = ("float32", "bfloat16", "float16")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_PLAN = (
    "Plans a step of Muon for a model on a cluster, with the planner of a real step and without any process group, "
    "and tells "
    'what it costs: meshmuon plan --model llama3-8b --mesh "dp_shard=64" --hardware h100 --nodes 8.'
)
_DOCTOR = (
    "Checks and measures meshmuon on the machines that it runs on. In one process: python -m meshmuon doctor. On all "
    "ranks: torchrun --nproc-per-node 8 -m meshmuon doctor, or any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, "
    "MASTER_ADDR and MASTER_PORT. The exit code is 1 if a check fails."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code.

    2 for a wrong command line, 1 if standard output cannot be written, 141 if its reader has stopped, 130 if
    interrupted.
    """
    parser = _make_parser()
    if sys.stdout is None:
        parser.error("standard output is closed. Redirect it to a file or to /dev/null.")
    if said := refuse_command(sys.argv[1:] if arguments is None else arguments):
        parser.error(said)
    try:
        try:
            parsed = parser.parse_args(arguments)
            code: int = import_module(f".{parsed.command}", __package__).run(parsed)
        finally:
            with printing():
                pass  # flushes what was printed, also by --help; the exit code says if that fails
    except ConfigError as error:
        parser.error(str(error))
    except BrokenPipeError:
        # As other tools do before "| head": print nothing more, and exit with the code of a process that SIGPIPE has
        # ended.
        _print_no_more()
        return _NOT_READ
    except OutputError as error:
        _print_no_more()
        print(f"meshmuon: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _print_no_more() -> None:
    """Drops what is still to be printed, or Python would fail again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """Fails where ``--help`` cannot be written; argparse itself would end as if all were well."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not sys.stdout:
            super()._print_message(message, file)
            return
        with printing() as output:
            output.write(message)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="meshmuon", description="Tools of the meshmuon optimizer.")
    parser.add_argument("--version", action="version", version=f"meshmuon {meshmuon.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_doctor(commands.add_parser("doctor", help="check and measure meshmuon on these machines", description=_DOCTOR))
    _add_plan(
        commands.add_parser("plan", help="see what a step costs on a cluster that is not there", description=_PLAN)
    )
    return parser


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", type=_names, default=(), metavar="NAMES", help="only these checks, separated by commas"
    )
    parser.add_argument("--skip", type=_names, default=(), metavar="NAMES", help="all but these checks")
    parser.add_argument("--list", action="store_true", help="list the checks and end")
    parser.add_argument("--quick", action="store_true", help="fewer steps and smaller measurements")
    parser.add_argument(
        "--shapes",
        type=_shapes,
        default=(),
        metavar="SHAPES",
        help="matrices to measure as well, such as 256x128,64x512",
    )
    limit = _within(1.0, 86400.0, "no number of seconds between 1 and 86400")
    parser.add_argument(
        "--limit", type=limit, default=60.0, metavar="SECONDS", help="most seconds of a check (default: 60)"
    )
    parser.add_argument("--json", dest="json_file", type=Path, metavar="FILE", help="write the whole report as JSON")
    parser.add_argument(
        "--save", dest="save_file", type=Path, metavar="FILE", help="write the measurements, for Muon(cost_model=FILE)"
    )
    parser.add_argument(
        "--device", help="type of device, such as cpu or cuda (default: the accelerator, if there is one)"
    )
    parser.add_argument("--backend", help="backend of the process group (default: torch's choice for the device)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="folder that all ranks see, for the checkpoint")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("the model, one of")
    model.add_argument(
        "--model", metavar="NAME", help="a model that meshmuon knows (--list), or a .json file like those"
    )
    model.add_argument("--hf-config", type=Path, metavar="FILE", help="the config.json of any model of transformers")
    model.add_argument("--module", metavar="MODULE:FUNCTION", help="a function that builds a torch.nn.Module")
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument(
        "--mesh", action="append", default=[], metavar="AXES", help='such as "dp_replicate=2,dp_shard=32,tp=8"'
    )
    cluster.add_argument("--layout", type=Path, metavar="FILE", help="any other layout, as JSON, instead of --mesh")
    cluster.add_argument(
        "--hardware", metavar="NAME", help="a machine that meshmuon knows, or a .json file (default: h100)"
    )
    cluster.add_argument("--calibration", type=Path, metavar="FILE", help="what meshmuon doctor --save measured")
    cluster.add_argument(
        "--nodes", type=_amount, metavar="N", help="nodes of the cluster; the mesh must have their ranks"
    )
    options = parser.add_argument_group("options of Muon")
    options.add_argument("--replicas", choices=("auto", "share", "repeat"), default="auto")
    options.add_argument(
        "--comm-dtype", metavar="DTYPE", help="or two, such as float32,bfloat16 (default: bfloat16 on GPUs)"
    )
    options.add_argument("--param-dtype", choices=_DTYPES, default="float32", help="of the weights (default: float32)")
    options.add_argument("--momentum-dtype", choices=_DTYPES, help="default: that of the weights")
    options.add_argument("--scheme", default="auto", choices=("auto", "polar_express", "keller", "zolotarev", "hybrid"))
    options.add_argument("--memory-budget", type=_amount, metavar="BYTES", help="such as 64M")
    options.add_argument("--warmup-step", type=int, metavar="N")
    training = parser.add_argument_group("the training step around it")
    share = _within(sys.float_info.min, 1.0, "not above 0 and at most 1")
    training.add_argument(
        "--tokens-per-step", type=_amount, default=2**22, metavar="N", help="such as 4M (default: 4,194,304)"
    )
    training.add_argument(
        "--mfu", type=share, default=0.4, help="share of the peak in forward and backward (default: 0.4)"
    )
    output = parser.add_argument_group("output; FILE is - for standard output, which then has nothing else")
    output.add_argument(
        "--compare", action="store_true", help="other options side by side, and other meshes if there are any"
    )
    output.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    output.add_argument("--save-model", type=Path, metavar="FILE", help="write the model as a file for --model")
    output.add_argument("--list", action="store_true", help="list models and machines and end")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError("it names no check; --list shows them")
    return names


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    try:
        shapes = [tuple(map(int, shape.lower().replace("×", "x").split("x"))) for shape in text.split(",")]
    except ValueError:
        shapes = []
    if not shapes or not all(len(shape) == 2 and min(shape) > 0 for shape in shapes):
        raise argparse.ArgumentTypeError(f"{text!r} must be rows and columns of matrices, such as 256x128,64x512")
    return tuple((rows, cols) for rows, cols in shapes)


def _within(low: float, high: float, wrong: str) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is {wrong}")
        return value

    return number


def _amount(text: str) -> int:
    """A number with a unit, in either case: 512k, 512KiB and 0.5M are the same. Units are powers of 1024."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?) ?([KMGT]?)(?:I?B)?", text.upper())
    amount = 0 if match is None else int(float(match[1]) * _UNITS[match[2]])
    if amount < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1, such as 512, 512K or 64M")
    return amount
