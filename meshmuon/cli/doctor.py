"""``meshmuon doctor``: its arguments, and how the process ends."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from ..doctor import CHECKS, DoctorOptions, Session, chosen_checks, run_doctor
from ..errors import ConfigError
from .output import is_standard_output, printing

HELP = "check and measure meshmuon on these machines"
DESCRIPTION = (
    "Checks and measures meshmuon on the machines that it runs on. In one process: python -m meshmuon doctor. On all ranks: "
    "torchrun --nproc-per-node 8 -m meshmuon doctor, or any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
    "MASTER_PORT. The exit code is 1 if a check fails."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("--only", type=_names, default=(), metavar="NAMES", help="only these checks, separated by commas")
    parser.add_argument("--skip", type=_names, default=(), metavar="NAMES", help="all but these checks")
    parser.add_argument("--list", action="store_true", help="list the checks and end")
    parser.add_argument("--quick", action="store_true", help="fewer steps and smaller measurements")
    parser.add_argument("--limit", type=_seconds, default=60.0, metavar="SECONDS", help="most seconds of a check (default: 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report as JSON")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the measurements, for Muon(cost_model=FILE)")
    parser.add_argument("--device", help="type of device, such as cpu or cuda (default: the accelerator, if there is one)")
    parser.add_argument("--backend", help="backend of the process group (default: torch's choice for the device)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="folder that all ranks see, for the checkpoint")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError("it names no check; --list shows them")
    return names


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 1.0 <= value <= 86400.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 86400 seconds")
    return value


def _check_writable(option: str, path: Path | None) -> None:
    """Refuses a file that could not be written at the end, after minutes."""
    if path is None:
        return
    if is_standard_output(path):
        raise ConfigError(f"{option} - is not possible: the tables go to standard output. Name a file.")
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder. Name a file in it.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: the folder {path.absolute().parent} does not exist. Make it first.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written. Choose a folder that you may write to.")


def run(arguments: argparse.Namespace) -> int:
    """Runs the doctor on this rank."""
    if arguments.list:
        with printing():
            print("\n".join(f"{check.name:<17} {check.title}" for check in CHECKS))
        return 0
    options = DoctorOptions(
        only=arguments.only,
        skip=arguments.skip,
        quick=arguments.quick,
        limit=arguments.limit,
        folder=arguments.folder,
        device=arguments.device,
        backend=arguments.backend,
        json_file=arguments.json,
        save_file=arguments.save,
    )
    chosen_checks(options)  # a wrong name is refused before ranks wait for each other
    if os.environ.get("RANK", "0") == "0":  # which writes the files; other nodes need not have the folder
        for option, path in (("--json", options.json_file), ("--save", options.save_file)):
            _check_writable(option, path)
    try:
        session = Session.from_environment(options)
    except RuntimeError as error:  # the store of the launcher, or a device that does not exist
        reason = str(error).rstrip(".")
        print(f"meshmuon doctor: this rank could not start: {reason}. Start all ranks of WORLD_SIZE at once.", file=sys.stderr)
        return 1
    ending = run_doctor(options, session)
    if ending.code:
        # At once: a thread may still wait for a lost rank, and a launcher terminates this rank when it sees another's exit code.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # whoever read it has gone
                stream.flush()
        os._exit(ending.code)
    return 0
