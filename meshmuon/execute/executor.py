"""Runs a plan: keeps buffers and views from step to step, makes them anew when the plan changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..device import Streams, streams_for
from ..ortho import Workspace
from ..plan import Plan
from ..transport import Exchange
from .build import LocalBatch, Program, build_program
from .pipeline import guarded, raise_first, run_pipeline
from .settings import ExecutorSettings
from .work import Work

__all__ = ["Executor", "StepExecutor"]


class StepExecutor(Protocol):
    """What runs the Muon part of a step."""

    plan: Plan | None

    def prepare(self, plan: Plan, rank: int, work: Sequence[Work], exchange: Exchange | None) -> None:
        """Makes ready for a plan whose entries are the parameters of ``work``."""
        ...

    def run(self, work: Sequence[Work], *, last: Callable[[], None]) -> None:
        """One step; ``last`` is done in its final wait."""
        ...

    def workspace_bytes(self) -> int:
        """Memory held between steps."""
        ...


class Executor:
    """Executes one plan at a time on this rank."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = settings
        self._workspace = Workspace()
        self._program = Program()
        self._streams: Streams | None = None
        self._exchange: Exchange | None = None
        self.plan: Plan | None = None

    def prepare(self, plan: Plan, rank: int, work: Sequence[Work], exchange: Exchange | None) -> None:
        """Makes the buffers for ``plan``, whose entries are the parameters of ``work``."""
        self.plan = None
        self._program = Program()
        self._workspace.clear()
        with torch.inference_mode(False):  # buffers made inside inference_mode could never be written outside
            self._program = build_program(plan, rank, work, exchange, self._workspace, self._settings)
        self._streams = streams_for(work[0].param.device) if work else None
        self._exchange = exchange
        self.plan = plan

    def run(self, work: Sequence[Work], *, last: Callable[[], None]) -> None:
        """One step of the prepared plan. ``last`` is done in its final wait."""
        program, streams, exchange = self._program, self._streams, self._exchange
        if streams is None or self.plan is None:
            last()
            return
        ready = streams.main_mark()
        waves = [wave.run(work, exchange, streams, ready) for wave in program.waves] if exchange is not None else []
        local = (_bound(batch, work) for batch in program.local)
        run_pipeline(waves, self.plan.options.in_flight, local, guarded(last, program.failures))
        program.rest.free_gradients(work)
        streams.main_waits(streams.side_mark())
        raise_first(program.failures)

    def workspace_bytes(self) -> int:
        """Memory that the executor holds between steps."""
        return self._workspace.bytes()


def _bound(batch: LocalBatch, work: Sequence[Work]) -> Callable[[], None]:
    return lambda: batch.run(work)
