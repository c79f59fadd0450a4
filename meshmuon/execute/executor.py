"""Runs a plan: keeps buffers and views from step to step, makes them anew when the plan changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch

from ..device import Streams, streams_for
from ..ortho import Workspace
from ..plan import Plan
from ..transport import Exchange
from .build import RankProgram, build_rank_program
from .pipeline import guarded, run_pipeline, take_first
from .settings import ExecutorSettings
from .step_param import StepParam

__all__ = ["Executor", "StepExecutor"]


class StepExecutor(Protocol):
    """What runs the Muon part of a step."""

    plan: Plan | None

    def prepare(self, plan: Plan, rank: int, step_params: Sequence[StepParam], exchange: Exchange | None) -> None:
        """Makes ready for a plan whose entries are the parameters of ``step_params``."""
        ...

    def run(self, step_params: Sequence[StepParam], *, last: Callable[[], None]) -> Exception | None:
        """One step; ``last`` is done in its final wait.

        Returns:
            What went wrong on this rank in a step that was made to its end, so that no other rank waits for this one. What is
            raised instead has left the step half done.
        """
        ...

    def workspace_bytes(self) -> int:
        """Memory held between steps."""
        ...


class Executor:
    """Executes one plan at a time on this rank."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = settings
        self._workspace = Workspace()
        self._program = RankProgram()
        self._streams: Streams | None = None
        self._exchange: Exchange | None = None
        self.plan: Plan | None = None

    def prepare(self, plan: Plan, rank: int, step_params: Sequence[StepParam], exchange: Exchange | None) -> None:
        """Makes the buffers for ``plan``, whose entries are the parameters of ``step_params``."""
        self.plan = None
        self._program = RankProgram()
        self._workspace.clear()
        with torch.inference_mode(False):  # buffers made inside inference_mode could never be written outside
            self._program = build_rank_program(plan, rank, step_params, exchange, self._workspace, self._settings)
        self._streams = streams_for(step_params[0].param.device) if step_params else None
        self._exchange = exchange
        self.plan = plan

    def run(self, step_params: Sequence[StepParam], *, last: Callable[[], None]) -> Exception | None:
        """One step of the prepared plan. ``last`` is done in its final wait."""
        program, streams, exchange = self._program, self._streams, self._exchange
        program.failures.clear()  # a step that was left in the middle may have had some
        if streams is None or self.plan is None:
            guarded(last, program.failures)()
            return take_first(program.failures)
        ready = streams.main_mark()
        waves: list[Iterator[None]] = []
        if exchange is not None:
            for rule_states in program.rule_states:
                rule_states.start(step_params, exchange)
            waves = [wave.run(step_params, exchange, streams, ready) for wave in program.waves]
        local = [rule_states.arrive for rule_states in program.rule_states] + [
            partial(batch.run, step_params) for batch in program.local
        ]

        def finally_() -> None:
            for rule_states in program.rule_states:
                assert exchange is not None
                rule_states.leave(exchange)
            guarded(last, program.failures)()

        run_pipeline(waves, self.plan.options.in_flight, local, finally_)
        for rule_states in program.rule_states:
            rule_states.settle(step_params)
        program.rest.free_gradients(step_params)
        streams.main_waits(streams.side_mark())
        return take_first(program.failures)

    def workspace_bytes(self) -> int:
        """Memory that the executor holds between steps."""
        return self._workspace.bytes()
