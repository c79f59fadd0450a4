"""``meshmuon doctor``: what is refused at once, and how the process ends."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from ...errors import ConfigError
from ..doctor import CHECKS, Context, DoctorOptions, chosen_checks, run_doctor
from .output import is_standard_output, printing


def _check_file(option: str, path: Path | None) -> None:
    """Refuses a file that could not be written at the end, after minutes."""
    if path is None:
        return
    if is_standard_output(path):
        raise ConfigError(f"{option} - is not possible: the tables go to standard output. Name a file.")
    try:
        is_new = not path.exists()
        if is_new or not path.is_fifo():
            with path.open("a", encoding="utf-8"):
                pass
        if is_new:
            path.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"{option} {path} cannot be written: {reason}. Name a file in a folder that you may write to."
        ) from None


def _check_folder(folder: Path | None) -> None:
    """Refuses a folder in which no checkpoint could be written, on every rank that it is refused for."""
    if folder is None:
        return
    try:
        folder.mkdir(exist_ok=True)
        os.rmdir(tempfile.mkdtemp(prefix="meshmuon-doctor-", dir=folder))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"--folder {folder} cannot be used: {reason}. Name a folder that all ranks see and may write to; it is made if the "
            "folder above it exists."
        ) from None


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        with printing():
            print("\n".join(f"{check.name:<17} {check.title}" for check in CHECKS))
        return 0
    options = DoctorOptions(**{field.name: getattr(arguments, field.name) for field in fields(DoctorOptions)})
    chosen_checks(options)  # a wrong name is refused before ranks wait for each other
    if os.environ.get("RANK", "0") == "0":  # which writes the files; other nodes need not have the folder
        for option, path in (("--json", options.json_file), ("--save", options.save_file)):
            _check_file(option, path)
    _check_folder(options.folder)
    try:
        context = Context.from_environment(options)
    except RuntimeError as error:  # the store of the launcher, or a device that does not exist
        reason = str(error).rstrip(".")
        print(f"meshmuon doctor: this rank could not start: {reason}. Start all ranks of WORLD_SIZE at once.", file=sys.stderr)
        return 1
    if code := run_doctor(context):
        # At once: a thread may still wait for a lost rank, and a launcher terminates this rank when it sees another's exit code.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # its reader has stopped
                stream.flush()
        os._exit(code)
    return 0
