"""``meshmuon doctor``: what is refused at once, and how the process ends."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

from ...errors import ConfigError
from ..doctor import CHECKS, Context, DoctorOptions, chosen_checks, run_doctor
from .output import is_standard_output, printing


@contextmanager
def _refusing(what: str, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror or error}. {advice}") from None


def _check_file(option: str, path: Path) -> None:
    """Refuses a file that could not be written at the end, after minutes."""
    if is_standard_output(path):
        raise ConfigError(f"{option} - is not possible: the tables go to standard output. Name a file.")
    with _refusing(f"{option} {path} cannot be written", "Name a file in a folder that you may write to."):
        is_new = not path.exists()
        if is_new or not path.is_fifo():
            path.open("a", encoding="utf-8").close()
        if is_new:
            path.unlink()


def _check_folder(folder: Path) -> None:
    """Refuses a folder in which no checkpoint could be written, on every rank that it is refused for."""
    advice = "Name a folder that all ranks see and may write to; it is made if the folder above it exists."
    with _refusing(f"--folder {folder} cannot be used", advice):
        folder.mkdir(exist_ok=True)
        os.rmdir(tempfile.mkdtemp(prefix="meshmuon-doctor-", dir=folder))


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        with printing():
            print("\n".join(f"{check.name:<17} {check.title}" for check in CHECKS))
        return 0
    options = DoctorOptions(**{field.name: getattr(arguments, field.name) for field in fields(DoctorOptions)})
    chosen_checks(options)  # a wrong name is refused before ranks wait for each other
    if os.environ.get("RANK", "0") == "0":  # which writes the files; other nodes need not have the folder
        for option, path in (("--json", options.json_file), ("--save", options.save_file)):
            if path is not None:
                _check_file(option, path)
    if options.folder is not None:
        _check_folder(options.folder)
    try:
        context = Context.from_environment(options)
    except RuntimeError as error:  # the store of the launcher, or a device that does not exist
        reason = str(error).rstrip(".")
        print(
            f"meshmuon doctor: this rank could not start: {reason}. Start all ranks of WORLD_SIZE at once.",
            file=sys.stderr,
        )
        return 1
    if code := run_doctor(context):
        # At once: a thread may still wait for a lost rank, and a launcher terminates this rank when it sees another's
        # exit code.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # its reader has stopped
                stream.flush()
        os._exit(code)
    return 0
