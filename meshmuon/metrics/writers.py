"""Writers of measurements: lines of JSON, a table, TensorBoard. Each is given what ``optimizer.metrics()`` returns.

A measurement that was written before is not written again, so that a loop may call ``write(optimizer.metrics())`` after
every step. Give them to one rank only.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError
from .report import flat

_W = TypeVar("_W", bound="Writer")


class Writer:
    """Writes measurements somewhere; closes at the end of a ``with``."""

    _last: object = None
    _sink: Any = None  # what ``close`` closes

    def write(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Writes a measurement, unless it is empty or was written before.

        Args:
            metrics: what ``optimizer.metrics()`` returned.
            step: the step number to write; by default that of the measurement.
        """
        if metrics and metrics["step"] != self._last:
            self._last = metrics["step"]
            self._write(metrics, metrics["step"] if step is None else step)

    def _write(self, metrics: Mapping[str, Any], step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Writes what is still in memory, and closes what this writer has opened."""
        if self._sink is not None:
            self._sink.close()

    def __enter__(self: _W) -> _W:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class JsonlWriter(Writer):
    """Appends one line of JSON per measurement, with everything that was measured. Infinities and NaN become null."""

    def __init__(self, path: str | Path) -> None:
        self._file = self._sink = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  # closed by ``close``

    def _write(self, metrics: Mapping[str, Any], step: int) -> None:
        self._file.write(json.dumps({**_finite(metrics), "step": step}, allow_nan=False) + "\n")
        self._file.flush()


class CsvWriter(Writer):
    """Writes one row per measurement, with the columns that the first one has; ``matrices`` adds those of single
    matrices.
    """

    def __init__(self, path: str | Path, *, matrices: bool = False) -> None:
        self._file = self._sink = Path(path).open("w", newline="", encoding="utf-8")  # noqa: SIM115  # closed by ``close``
        self._matrices = matrices
        self._table: csv.DictWriter[str] | None = None

    def _write(self, metrics: Mapping[str, Any], step: int) -> None:
        row: dict[str, float] = {"step": step, **flat(metrics, prefix="", matrices=self._matrices)}
        if self._table is None:
            self._table = csv.DictWriter(self._file, list(row), extrasaction="ignore")
            self._table.writeheader()
        self._table.writerow(row)
        self._file.flush()


class TensorBoardWriter(Writer):
    """Writes scalars for TensorBoard.

    Args:
        target: a folder, or a ``torch.utils.tensorboard.SummaryWriter`` that the training already has.
        matrices: also those of single matrices.
    """

    def __init__(self, target: Any, *, matrices: bool = False) -> None:
        self._matrices = matrices
        self._board = target
        if isinstance(target, (str, Path)):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigError(f"TensorBoardWriter needs TensorBoard ({error}): pip install tensorboard.") from error
            self._board = self._sink = SummaryWriter(str(target))

    def _write(self, metrics: Mapping[str, Any], step: int) -> None:
        for name, value in flat(metrics, matrices=self._matrices).items():
            self._board.add_scalar(name, value, step)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
