"""A stand-in for Weights & Biases: it keeps what is logged, and refuses what W&B would drop or not take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType, TracebackType


class Run:
    """A run, which ends with its ``with`` block."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.open = True

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open = False

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        """Keeps one row per step; W&B drops rows of steps that are over."""
        assert self.open
        assert step > max(self.rows, default=-1), f"step {step} is over"
        assert all(
            isinstance(name, str) and isinstance(value, float) and math.isfinite(value) for name, value in row.items()
        )
        self.rows[step] = dict(row)


class StandIn(ModuleType):
    """The module; ``runs`` are those that it began."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[Run] = []

    def init(self, *, project: str, mode: str) -> Run:
        """Begins a run."""
        assert project
        assert mode == "offline"
        self.runs.append(Run())
        return self.runs[-1]
