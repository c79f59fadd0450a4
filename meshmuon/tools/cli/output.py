"""Standard output and the files that commands write."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ...errors import ConfigError


class OutputError(Exception):
    """Standard output takes nothing more, as on a disk that is full."""


def is_standard_output(path: Path | None) -> bool:
    """Whether a user named standard output, with ``-``."""
    return path is not None and str(path) == "-"


@contextmanager
def printing() -> Iterator[TextIO]:
    """Standard output, for what is printed inside.

    Raises:
        OutputError: if it cannot be written. A reader that has gone is a ``BrokenPipeError``, as elsewhere.
    """
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"standard output cannot be written: {reason}. Redirect it to a file that can be.") from None


def write_output(path: Path, write: Callable[[TextIO], object]) -> None:
    """Opens a file, or takes standard output for ``-``, and hands it to ``write``.

    Raises:
        ConfigError: if the file cannot be written.
        OutputError: if standard output cannot be.
    """
    if is_standard_output(path):
        with printing() as output:
            write(output)
        return
    try:
        with path.open("w", encoding="utf-8") as file:
            write(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from None
