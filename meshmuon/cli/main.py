"""Reads the command line and hands over to a command.

A command is a module with ``add_arguments(parser)`` and ``run(arguments)``, which returns the exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import meshmuon

from ..errors import ConfigError
from . import doctor, plan
from .output import OutputError, printing

_NOT_READ = 128 + 13  # SIGPIPE
_COMMANDS = {"doctor": doctor, "plan": plan}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code.

    2 for a wrong command line, 1 if standard output cannot be written, 141 if nobody reads it any more.
    """
    parser = argparse.ArgumentParser(prog="meshmuon", description="Tools of the meshmuon optimizer.")
    parser.add_argument("--version", action="version", version=f"meshmuon {meshmuon.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, module in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION))
    parsed = parser.parse_args(arguments)
    if sys.stdout is None:
        parser.error("standard output is closed. Redirect it to a file or to /dev/null.")
    try:
        code: int = _COMMANDS[parsed.command].run(parsed)
        with printing():
            pass  # what a command has printed gets there now, or the exit code says so
    except ConfigError as error:
        parser.error(str(error))
    except BrokenPipeError:
        # As with other tools before "| head": not a word, and the exit code of a process that the signal has ended.
        _print_no_more()
        return _NOT_READ
    except OutputError as error:
        _print_no_more()
        print(f"meshmuon: error: {error}", file=sys.stderr)
        return 1
    return code


def _print_no_more() -> None:
    """Drops what is still to be printed, or Python would fail again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
