"""Reads the command line and hands over to a command.

Arguments are in a module without torch, so that ``--help`` and mistakes are answered at once. A command is a module of the same
name with ``run(arguments)``, which returns the exit code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ...errors import ConfigError
from .arguments import make_parser
from .output import OutputError, printing

_NOT_READ = 128 + 13  # SIGPIPE
_INTERRUPTED = 128 + 2  # SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code.

    2 for a wrong command line, 1 if standard output cannot be written, 141 if nobody reads it any more, 130 if interrupted.
    """
    parser = make_parser()
    if sys.stdout is None:
        parser.error("standard output is closed. Redirect it to a file or to /dev/null.")
    try:
        try:
            parsed = parser.parse_args(arguments)
            code: int = import_module(f".{parsed.command}", __package__).run(parsed)
        finally:
            with printing():
                pass  # what was printed, also by --help, gets there now, or the exit code says so
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
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _print_no_more() -> None:
    """Drops what is still to be printed, or Python would fail again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
