"""Runs a plan. Buffers and views are kept from step to step, and rebuilt when the plan changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import cast

import torch

from ..device import Streams, streams_for
from ..errors import OrthogonalizeError, TransportError
from ..ortho import Workspace
from ..plan import Action, Plan, pipeline_order
from ..transport import Exchange
from .build import RankProgram, RankProgramBuilder
from .elementwise import Elementwise
from .fused_elementwise import FusedElementwise
from .local_batch import STAGED_IN_FLIGHT
from .ortho_batch import joined_errors
from .settings import ExecutorSettings
from .step_param import UNOBSERVED, CheckedUpdates, Observer, RunningStep, StepParam


class StepExecutor(ABC):
    """Runs what Muon does in an optimizer's step. The optimizer calls it, on every rank that takes part in the step:

    1. ``prepare``: once per plan, after all ranks have agreed on the plan and before any piece travels. It makes
       buffers and views. When it returns, ``plan`` is the plan. If a rank cannot make something that belongs to the
       plan, the optimizer calls ``discard`` on all ranks, and none of them runs.
    2. ``warm_up``: on all ranks after all of them have prepared the same plan, or on none.
    3. ``run``: once per step after that, until another plan is prepared. All ranks of the plan call it in the same
       step, because they exchange with each other in it. ``step_params`` is in the order of ``plan.params`` at every
       call; the tensors and numbers in it may change, their shapes, dtypes, devices, schemes and rules may not.
       ``idle`` parameters have no gradient on any rank and are not stepped; except for private ones, they are the same
       on all ranks.
    4. ``during_last_scatter``: ``run`` calls it exactly once, after the last matrix has been orthogonalised and before
       the last results are waited for. The optimizer steps AdamW's parameters there; if that communicates, then on all
       ranks.

    ``workspace_bytes`` may be called at any time, on any rank; it does not communicate.
    """

    def __init__(self, settings: ExecutorSettings) -> None:
        self.settings = settings  # the optimizer replaces them, on all ranks, if a kernel does not run on one of them
        self.plan: Plan | None = None
        # whether matrices failed in the last ``run``, and all ranks know it; the same on all ranks
        self.failed_for_all = False
        self.elementwise = Elementwise()  # does the elementwise work; chosen when a plan is prepared
        # by the last ``run``, on this rank; none unless updates are guarded
        self.checked: Sequence[CheckedUpdates] = ()

    @abstractmethod
    def prepare(self, plan: Plan, rank: int, step_params: Sequence[StepParam], exchange: Exchange | None) -> None:
        """Prepares a plan: buffers and views.

        Args:
            plan: the same on all of its ranks, except for parameters that are private to a rank.
            rank: this rank.
            step_params: the parameters of ``plan.params``, in the same order.
            exchange: between the ranks of the plan; None where nothing is exchanged.
        """

    def warm_up(self, attempt: int) -> None:
        """Meets all ranks that ``run`` exchanges with; ``attempt`` is a number that no other call has, equal on all
        ranks.
        """
        return

    def discard(self) -> None:
        """Discards what was prepared, if anything: ``plan`` is None, and no buffer is held."""
        self.plan = None

    @abstractmethod
    def run(
        self,
        step_params: Sequence[StepParam],
        *,
        idle: AbstractSet[int] = frozenset(),
        during_last_scatter: Callable[[], None],
        observer: Observer = UNOBSERVED,
    ) -> Exception | None:
        """One step of all parameters but the ``idle`` ones, which are indices of ``step_params``; ``observer`` sees it.

        Returns:
            The first error on this rank in a step that was completed: all exchanges have taken place, so that no other
            rank waits for this one. An error that is raised instead has left the step half done.
        """

    def workspace_bytes(self) -> int:
        """Bytes that the executor holds between steps."""
        return 0


class Executor(StepExecutor):
    """The ``StepExecutor`` of sharded and local matrices: one owner per matrix, exchanges in overlapping waves."""

    def __init__(self, settings: ExecutorSettings) -> None:
        super().__init__(settings)
        self._workspace = Workspace()
        self._program = RankProgram()
        self._streams: Streams | None = None
        self._exchange: Exchange | None = None
        self._meets_on: torch.device | None = None  # where ranks meet that exchange nothing; the same kind on all ranks

    def prepare(self, plan: Plan, rank: int, step_params: Sequence[StepParam], exchange: Exchange | None) -> None:
        self.discard()  # before the new buffers are made: both at a time might not fit
        with torch.inference_mode(False):  # buffers made inside inference_mode cannot be written outside of it
            self._program = self._builder()(plan, rank, step_params, exchange, self._workspace, self.settings).build()
        devices = sorted(
            (step_param.work_device for step_param in step_params), key=lambda device: device.type == "cpu"
        )
        self._streams = streams_for(devices[0]) if devices else None
        fuses = bool(devices) and self.settings.fuses(devices[0])
        self.elementwise = FusedElementwise(devices[0]) if fuses else Elementwise()
        self._exchange = exchange
        shared = (each.work_device for part, each in zip(plan.params, step_params, strict=True) if not part.private)
        self._meets_on = None if exchange is None else next(shared, None)
        self.elementwise.compile(lambda: self._run(self._dry_step(step_params), lambda: None))
        self.plan = plan

    def warm_up(self, attempt: int) -> None:
        exchanging = (*self._program.waves, *self._program.rule_states)
        prepared = [one for each in exchanging for one in (each.gather, each.scatter)]
        if (exchange := self._exchange) is None or self._meets_on is None:
            return
        # As many on all ranks, which all have these. Without any, metrics and masks are reduced, which connects ranks
        # too.
        for device in dict.fromkeys(one.sent.device for one in prepared) or (self._meets_on,):
            splits = [(one.received_splits, one.sent_splits) for one in prepared if one.sent.device == device]
            nothing = exchange.splits({}), exchange.splits({})
            received, sent = (
                [max(counts) for counts in zip(*each, strict=True)] for each in zip(nothing, *splits, strict=True)
            )
            exchange.warm_up(received, sent, device, attempt)

    def _dry_step(self, step_params: Sequence[StepParam]) -> RunningStep:
        """A step of which only the kernels are compiled, without streams: nothing that it launches writes an
        element.
        """
        idle = frozenset(k for k, each in enumerate(step_params) if each.zeros is None and each.param.grad is None)
        exchange = cast("Exchange", _NoExchange())
        return RunningStep(step_params, idle, UNOBSERVED, exchange, self.elementwise, only_compiles=True)

    def discard(self) -> None:
        super().discard()
        self._program = RankProgram()
        self._workspace.clear()

    def _builder(self) -> type[RankProgramBuilder]:
        return RankProgramBuilder

    def run(
        self,
        step_params: Sequence[StepParam],
        *,
        idle: AbstractSet[int] = frozenset(),
        during_last_scatter: Callable[[], None],
        observer: Observer = UNOBSERVED,
    ) -> Exception | None:
        streams = self._streams or Streams()
        step = RunningStep(step_params, idle, observer, self._exchange, self.elementwise, streams, streams.main_mark())
        self._run(step, during_last_scatter)
        self.checked = step.checked
        self.failed_for_all = any(getattr(failure, "known_to_all", False) for failure in step.failures)
        return take_first(step.failures)

    def _run(self, step: RunningStep, during_last_scatter: Callable[[], None]) -> None:
        program, streams, idle = self._program, step.streams, step.idle
        waves = [wave.run(step) for wave in program.waves]
        rule_states = [rule_state.run(step) for rule_state in program.rule_states if not rule_state.params <= idle]
        # staged batches whose updates the host applies while the last results travel
        unfinished: list[Iterator[None]] = []

        def run_local_batches() -> None:
            advance(rule_states)
            for batch in program.local:
                batch.run(step)
            unfinished.extend(run_ahead([batch.run(step) for batch in program.staged], STAGED_IN_FLIGHT))

        def before_last_results() -> None:
            advance(rule_states)
            guarded(during_last_scatter, step.failures)
            finish_all(unfinished)

        advance(rule_states)
        order = pipeline_order(len(waves), program.in_flight, gathered_ahead=program.gathered_ahead)

        run_pipeline(waves, order, run_local_batches, before_last_results)
        finish_all(rule_states)
        streams.main_waits(streams.side_mark())
        step.free_gradients(program.freed_at_end)  # the main stream may now reuse what the side stream has read

    def workspace_bytes(self) -> int:
        return self._workspace.bytes() + sum(staging.bytes() for staging in self._program.stagings)


class _NoExchange:
    """Stands in for an ``Exchange`` while kernels are compiled."""

    def start(self, *_: object, **__: object) -> _NoExchange:
        return self

    def wait(self) -> None:
        pass

    def tell(self, own: object) -> dict[int, object]:
        return {}


def run_pipeline(
    waves: Sequence[Iterator[None]],
    order: Iterable[tuple[Action, int]],
    local: Callable[[], None],
    during_last_scatter: Callable[[], None],
) -> None:
    """Runs all waves, ``local`` and ``during_last_scatter`` in the order that ``pipeline_order`` found
    (``plan/schedule.py``).

    The waves are generators that yield twice: after sending their pieces, and after sending their results. Four waves,
    three in flight: gather 0, gather 1, local, compute 0, gather 2, compute 1, finish 0, gather 3, compute 2, compute
    3, during last scatter, finish 1 to 3.
    """
    order = iter(order)
    for action, wave in order:
        if action is Action.LOCAL:
            local()
        elif action is Action.DURING_LAST_SCATTER:
            during_last_scatter()
            finish_all([waves[last] for _, last in order])
        elif action is Action.FINISH:
            finish_all([waves[wave]])
        else:
            advance([waves[wave]])


def run_ahead(waves: Sequence[Iterator[None]], in_flight: int) -> list[Iterator[None]]:
    """Runs waves in the same order up to ``during_last_scatter``. Returns the unfinished ones."""
    left = dict(enumerate(waves))
    for action, wave in pipeline_order(len(waves), in_flight):
        if action is Action.DURING_LAST_SCATTER:
            break
        if action is Action.FINISH:
            finish_all([left.pop(wave)])
        elif action is not Action.LOCAL:
            advance([left[wave]])
    return list(left.values())


def advance(generators: Iterable[Iterator[None]]) -> None:
    """Gives each its next turn, which is not its last."""
    for generator in generators:
        next(generator)


def finish_all(generators: Iterable[Iterator[None]]) -> None:
    """Gives each its last turn."""
    for generator in generators:
        for _ in generator:
            raise AssertionError("a wave yields twice")


def guarded(action: Callable[[], None], failures: list[Exception]) -> None:
    """Runs ``action`` and keeps its error for the end of the step: other ranks wait for what this one still has to
    send.
    """
    try:
        action()
    except TransportError:
        raise
    except Exception as error:
        failures.append(error)


def take_first(failures: list[Exception]) -> Exception | None:
    """The first failure of a step, if there is one, and before others one that only this rank knows; clears the list.

    If matrices have failed, it names all that failed in the same way: known to all ranks, or to this one only.
    """
    known = [isinstance(failure, OrthogonalizeError) and failure.known_to_all for failure in failures]
    same_kind = [failure for failure, by_all in zip(failures, known, strict=True) if by_all == all(known)]
    failures.clear()
    if same_kind and isinstance(same_kind[0], OrthogonalizeError):
        return joined_errors([failure for failure in same_kind if isinstance(failure, OrthogonalizeError)])
    return same_kind[0] if same_kind else None
