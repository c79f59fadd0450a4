"""One step of Muon, in four methods: ``_inspect``, ``_agree``, ``_prepare``, ``_run``.

What may fail, and what then holds:

| in | an error is raised | what has been written |
|---|---|---|
| inspect, agree | on all ranks, with the same text | nothing |
| prepare | on all ranks, with the same text | new state, all zeros; no rank keeps buffers of the plan |
| run, in a user's scheme or rule | on all ranks, with the same text | all but the matrices that it names |
| run, elsewhere, all exchanges complete | on this rank; on the others at their next step | all but what failed |
| run, between two exchanges | on this rank; the others get a ``TransportError`` | unknown: load a checkpoint |

A rank keeps its first error in ``StepContext.failure`` until all ranks know of it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..agree.descriptions import hyperparameters_of
from ..agree.differences import failure_for_other_ranks
from ..agree.planner import Planner
from ..agree.state_presence import StatePresence
from ..agree.step_decision import Activity, RankStatus, StepDecision
from ..device import gpu_bits, known_to_host
from ..errors import KeptError, KernelError, KernelWarning, MeshmuonError, OrthogonalizeError, StateError
from ..execute import UNOBSERVED, ExecutorSettings, StepExecutor, StepParam, advance_counters
from ..metrics.meter import Meter
from ..metrics.recorder import StepRecorder
from ..params.checks import adamw_betas, adamw_eps
from ..params.dtensors import as_dtensor
from ..params.option_table import ParamGroup
from ..params.param_record import ParamIndex, ParamRecord
from ..plan import PartIndex
from ..qk_clip.clip import QKClip
from ..qk_clip.logits import logits_text
from ..routing.table import build_routing_table
from ..state import param_state
from ..torch_compat import FSDP2Weights, local_part, mark_overwritten, never_traced
from .activity import ActivityCheck
from .adamw import adamw_step
from .collect import Collector, gradient_of, only_creates_state
from .nonfinite import NO_SCALING, NonFinite, Scaling, gradients_of
from .offload import Offload
from .step_params import StepParams

logger = logging.getLogger("meshmuon")


@dataclass(slots=True)
class StepContext:
    """The data of one call of ``step()``, handed from method to method."""

    records: tuple[ParamRecord, ...]  # all parameters that are awake (``Collector``), param group by param group
    has_grad: tuple[bool, ...]  # whether each of them has a gradient, or in ``prepare()`` may get one
    qk_logits: Any  # the logits given to ``step()``
    failure: KeptError  # this rank's first error
    scaling: Scaling = NO_SCALING  # what a GradScaler has told the optimizer
    nonfinite: bool = False  # the host has found a gradient on this rank that is not finite
    has_work: bool = True  # this rank has more to do than create state
    decision: StepDecision = field(init=False)  # what all ranks have agreed on
    # a boolean on a device, true if nothing may change; None if no device has to be asked
    skip_mask: Tensor | None = None
    recorder: StepRecorder | None = None  # what measures this step; None if it is not measured
    would_diverge: bool = False  # an error at this point would make replicas diverge
    only_prepares: bool = False  # it is a call of ``prepare()``, and nothing is stepped


class MuonStep(torch.optim.Optimizer):
    """The step. ``Muon`` builds the parts below; ``DistMuon`` overrides the methods at the end of this class."""

    _collector: Collector  # looks at parameters, gradients and state
    _planner: Planner  # agrees with the other ranks on a plan
    _activity: ActivityCheck  # notices steps that would train nothing
    _failures: StepFailures  # remembers what the other ranks must still learn
    _step_params: StepParams  # what the executor works on
    _settings: ExecutorSettings  # how the executor was asked to compute
    _executor: StepExecutor  # runs the plan
    _overwritten: Overwritten  # tells autograd which weights the step has overwritten
    _only_prepared = False  # all state there is are the zeros that ``prepare()`` has made
    _states_in_order = 0  # number of parameters with state when it was last put into their order
    _routes_logged: tuple[object, object] = (None, None)  # the parameters and gradients whose routes were logged last
    # Each of these serves one option.
    _nonfinite: NonFinite
    _qk_clip: QKClip
    _offload: Offload
    _meter: Meter

    @never_traced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, qk_logits: Any = None) -> Any:
        """Performs one step.

        Args:
            closure: evaluates the model again and returns the loss.
            qk_logits: layer → tensor of the largest attention logit of each head, the same on all ranks, as
                ``MaxLogits.collect`` returns it; needs ``clip_config``.

        Returns:
            What ``closure`` returned, or None.
        """
        self._planner.begin()
        self._meter.begin_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        failure = KeptError()
        with self._resident_state(failure):
            step = self._inspect(qk_logits, failure)
            self._agree(step)  # nothing is written before this
            if step.decision.nonfinite:
                self._skip(step)
            elif not step.decision.has_work:
                # No rank has work: torch.distributed.checkpoint calls step() with lr 0 only to create state.
                param_state.create(self._groups, self.state)
            else:
                self._activity.judge(step.decision.activity)
                self._prepare(step)
                self._run(step)
                failure.raise_it()
        return loss

    @contextmanager
    def _resident_state(self, failure: KeptError) -> Iterator[None]:
        """Around a step: has the state on its devices, and ends what the step has begun, also if it fails."""
        with self._offload.resident(self.state, failure, adamw_later=True):
            try:
                yield
            finally:
                failure.take()
                self._planner.end()
                self._step_params.release_state()
                if len(self.state) != self._states_in_order:  # a first gradient came late
                    param_state.put_in_order(self._groups, self.state)
                    self._states_in_order = len(self.state)
                if self._offload.on:
                    self._invalidate_state()

    def _inspect(self, qk_logits: Any, failure: KeptError, *, only_prepares: bool = False) -> StepContext:
        """Looks at parameters, gradients, state and options."""
        self._failures.refuse_step()
        self._collector.inspect(self._groups, self.state, failure, prepares=only_prepares)
        records, has_grad = self._collector.records, self._collector.has_grad
        unreported = self._failures.to_report()
        failure.keep(
            self._misuse(records)
            or self._meter.refusal(records)
            or self._activity.replaced(records, has_grad)
            or unreported
        )
        step = StepContext(records, has_grad, qk_logits, failure, only_prepares=only_prepares)
        if not failure:
            with failure:
                step.scaling = Scaling.of(self)
                self._drop_replaced()
                if not self._collector.check(self._groups, self.state):
                    self._step_params.drop()
                self._qk_clip.check(self._collector.all_records, qk_logits)
                if not only_prepares:
                    step.nonfinite = self._nonfinite.known_to_host(records, step.scaling)
                    begun = bool(self.state) and not self._only_prepared
                    step.has_work = begun or not only_creates_state(self._groups)
        return step

    def _agree(self, step: StepContext) -> None:
        """Decides together with all ranks what this step does."""
        extra, gpu = logits_text(step.qk_logits), self._collector.gpu
        if self._executor.settings is not self._settings:  # other kernels than asked for, on all ranks or on none
            extra += f", {self._executor.settings.bits}"
        extra += ", prepare()" if step.only_prepares else ""

        def hyperparameters() -> list[str]:
            """What ranks compare beside the plan: whatever decides the bits of an update."""
            compared = extra if gpu is None else f"{extra}, {gpu_bits(gpu)}"
            return [f"{text}, {compared}" for text in hyperparameters_of(self._groups)]

        without_state = [k for k in self._collector.without_state if self._keeps(step.records[k])]
        states: Mapping[Tensor, dict[str, Any]] = self.state
        prepared_plan = None if step.only_prepares and without_state else self._executor.plan
        if self._only_prepared:  # its zeros are no state: if another rank has loaded some, this one has lost its own
            with_grad = (ParamIndex(k) for k, has_grad in enumerate(step.has_grad) if has_grad)
            without_state, states = [k for k in with_grad if self._keeps(step.records[k])], {}
        steps = not (step.failure or step.only_prepares)
        status = RankStatus(
            records=step.records,
            failure=step.failure,
            has_grad=step.has_grad,
            prepared_plan=prepared_plan,
            nonfinite=step.nonfinite,
            has_work=step.has_work,
            activity=self._activity.of(self._groups, step.records, step.has_grad) if steps else Activity.NO_MATRIX,
            hyperparameters=hyperparameters,
            without_state=without_state,
            presence=StatePresence(step.records, states, self._keeps),
        )
        step.decision = self._planner.agree(status)

    def _prepare(self, step: StepContext) -> None:
        """Creates state and buffers if the plan is new. Nothing is sent before all ranks have theirs."""
        self._log_routes(step)
        settings, decision = self._executor.settings, step.decision
        if not decision.prepares:
            return
        try:
            self._prepare_plan(step)
        except KernelError as error:  # the same on all ranks
            if settings.kernels != "auto":
                raise
            if decision.exchange is None or decision.rank == decision.exchange.ranks[0]:
                text = "the Triton kernel cannot be used, and all ranks use torch's own products instead"
                warnings.warn(f"{text} ({error})", KernelWarning, stacklevel=2)
            self._executor.settings = settings.without_kernels()
            self._prepare_plan(step)

    def _prepare_plan(self, step: StepContext) -> None:
        """One attempt, confirmed by all ranks. If one fails, none keeps anything: the next step prepares again."""
        decision = step.decision
        try:
            with step.failure:
                step.skip_mask = self._nonfinite.mask_like(step.records, step.scaling)
                step_params = self._params_of(step)
                if step.only_prepares:
                    self._stand_in(step, step_params)
                if decision.plan is not self._executor.plan:
                    self._executor.prepare(decision.plan, decision.rank, step_params, decision.exchange)
                    self._executor.elementwise.compile(partial(self._find_and_mask, step, step_params))
                self._meter.prepare(decision, step.records, self._planner.layouts)
            self._planner.confirm(step.failure)
        except BaseException as error:
            self._executor.discard()
            self._meter.discard()
            # Ctrl-C: the others wait for this rank
            if decision.exchange is not None and not isinstance(error, MeshmuonError):
                decision.exchange.abandon()
            raise

    def _run(self, step: StepContext) -> None:
        """Steps all parameters, as all ranks have agreed.

        Keeps this rank's first error if all exchanges took place in spite of it; raises any other.
        """
        records, decision, failure = step.records, step.decision, step.failure
        self._only_prepared = False
        # if one of several ranks that compute a matrix fails, their replicas diverge
        step.would_diverge = decision.repeats
        try:
            step.skip_mask = self._nonfinite.reduce_skip_mask(
                records, step.scaling, decision.exchange, self._executor.elementwise
            )
            step_params = self._masked_params(step)
            if self._meter.is_due(self._planner.steps):
                step.recorder = self._meter.begin(step_params, decision, gradients_here=not self._averages_gradients)
            adamw, observer = partial(self._adamw_step, step), step.recorder or UNOBSERVED
            failure.keep(
                self._executor.run(step_params, idle=decision.idle, during_last_scatter=adamw, observer=observer)
            )
            self._nonfinite.count(self._executor.checked)
            # Counters and QK-clip also after a failure that the other ranks do not know of: they count this step and
            # clip.
            advance_counters((step_param.counter for step_param in step_params), step.skip_mask)
            alone = decision.exchange is None
            failed_everywhere = (
                isinstance(failure.error, OrthogonalizeError) if alone else self._executor.failed_for_all
            )
            if not failed_everywhere:
                self._qk_clip.apply(self._collector.all_records, step.qk_logits, step.skip_mask)
            if step.recorder is not None:  # also after a failure: the other ranks wait for this rank's numbers
                skips: dict[str, Any] = {"skipped": self._nonfinite.skipped, "skip_mask": step.skip_mask}
                failure.keep(self._meter.finish(step.recorder, decision, self._groups, **skips))
            already_reported = isinstance(failure.error, OrthogonalizeError) and failure.error.known_to_all
            if failure.error is not None and not alone and not already_reported:
                self._failures.completed_with(failure.error, diverged=step.would_diverge)
        except BaseException as interruption:  # also Ctrl-C: the other ranks wait for what this rank will never send
            if decision.exchange is not None:
                self._failures.left_half_done(interruption)
                decision.exchange.abandon()
            raise
        finally:
            clipped = frozenset() if step.qk_logits is None else self._qk_clip.clipped
            self._overwritten.mark(records, lambda k: step.has_grad[k] or k in decision.zeros or k in clipped)

    def _masked_params(self, step: StepContext) -> list[StepParam]:
        """What the executor works on. Gradients are unscaled, and become zeros on a device that must skip the step."""
        if step.scaling.scale is not None:
            step.scaling.remove(gradients_of(step.records))
        step_params = self._params_of(step)
        if step.skip_mask is not None:
            self._mask_gradients(step, step_params)
        return step_params

    def _find_and_mask(self, step: StepContext, step_params: Sequence[StepParam]) -> None:
        """All elementwise work before the executor's, to compile it."""
        if step.skip_mask is not None:
            elementwise = self._executor.elementwise
            self._nonfinite.found(step.records, step.scaling, elementwise, stand_ins=step.only_prepares)
            self._mask_gradients(step, step_params)

    def _mask_gradients(self, step: StepContext, step_params: Sequence[StepParam]) -> None:
        """Fills all gradients with −0 if the step must be skipped, also those that this rank lacks and that are made as
        +0.

        x + (−0) is x bit for bit: a momentum of −0 would lose its sign to +0 in a step that must change nothing.
        """
        assert step.skip_mask is not None
        gradients = gradients_of(step.records, stand_ins=step.only_prepares)
        if not step.only_prepares:
            gradients += [local_part(step_param.zeros) for step_param in step_params if step_param.zeros is not None]
        self._executor.elementwise.fill_if(gradients, step.skip_mask, -0.0)

    def _adamw_step(self, step: StepContext) -> None:
        self._offload.wait_for_adamw()
        # if it fails, the other ranks have stepped and this one has not
        before, step.would_diverge = step.would_diverge, True
        indices_by_group: dict[int, list[int]] = {}
        for k, record in enumerate(step.records):
            if not record.param_group["use_muon"] and (record.param.grad is not None or k in step.decision.zeros):
                indices_by_group.setdefault(record.group_index, []).append(k)
        recorder = step.recorder
        with (recorder or UNOBSERVED).phase("adamw"):
            for group_index, indices in indices_by_group.items():
                params, group = [step.records[k].param for k in indices], self._groups[group_index]
                grads, states = self._adamw_gradients(params), [self.state[param] for param in params]
                if recorder is not None:
                    recorder.before_adamw(indices, params, grads)
                adamw_step(group, params, grads, states, step.skip_mask)
                if recorder is not None:
                    recorder.after_adamw(indices, states, adamw_betas(group), adamw_eps(group))
        step.would_diverge = before  # not in a finally: after an error it must stay true

    def _stand_in(self, step: StepContext, step_params: Sequence[StepParam]) -> None:
        """Creates AdamW's state before any gradient has come, and lets weights stand in for gradients that are not
        there.

        Kernels are compiled for them, which reads the layout of a gradient and writes nothing.
        """
        for record in step.records:
            if not record.param_group["use_muon"] and record.param.requires_grad:
                param_state.start(self.state[record.param], record.name, record.param, record.param_group)
        for step_param in step_params:
            if step_param.param.grad is None:
                step_param.zeros = step_param.param

    def _drop_replaced(self) -> None:
        """Drops what ``prepare()`` made for parameters that a wrapper has replaced since; a state_dict could not
        name them.
        """
        if self._only_prepared:
            own = {param for group in self._groups for param in group["params"]}
            for param in [key for key in self.state if isinstance(key, Tensor) and key not in own]:
                del self.state[param]

    def _skip(self, step: StepContext) -> None:
        """Counts a skipped step, because a gradient is not finite, and frees the gradients that the step would have
        freed.
        """
        self._nonfinite.skipped = self._nonfinite.skipped + 1
        for record in step.records:
            if record.param_group["use_muon"] and record.param_group["none_grad"]:
                record.param.grad = None

    def _log_routes(self, step: StepContext) -> None:
        """Logs where each parameter goes, whenever other parameters have gradients than at the last time."""
        looked_at = step.records, step.has_grad
        if logger.isEnabledFor(logging.DEBUG) and looked_at != self._routes_logged:
            self._routes_logged = looked_at
            with_grad = {record.name for record, has_grad in zip(*looked_at, strict=True) if has_grad}
            for row in build_routing_table(self._groups).rows:
                logger.debug("%s%s", row, "" if row.name in with_grad else " (no gradient)")

    def _invalidate_state(self) -> None:
        """Keeps nothing of the state, which is about to be offloaded: the next step checks it again."""
        self._collector.invalidate_state()
        self._step_params.drop()

    @property
    def _groups(self) -> list[ParamGroup]:
        """``param_groups``, typed. The public attribute keeps torch's type, since users may add other keys."""
        return cast("list[ParamGroup]", self.param_groups)

    # DistMuon overrides what follows.

    @property
    def _averages_gradients(self) -> bool:
        """Whether ranks have different gradients of the same weights, which the step averages."""
        return False

    def _misuse(self, params: Sequence[ParamRecord]) -> Exception | None:
        """Why this kind of optimizer cannot step these parameters; None if it can."""
        return None

    def _keeps(self, record: ParamRecord) -> bool:
        """Whether this rank keeps the state of a parameter."""
        return True

    def _params_of(self, step: StepContext, keeps: Callable[[PartIndex], bool] = lambda part: True) -> list[StepParam]:
        """What the executor works on. Creates missing state."""
        if self._step_params.serve(step.decision, self._collector.lacking_state):
            return self._step_params.current(step.decision, self.state, step.skip_mask)
        return self._step_params.make(step.records, step.decision, self.state, keeps, step.skip_mask)

    def _adamw_gradients(self, params: Sequence[Tensor]) -> list[Tensor]:
        """The gradients with which AdamW steps ``params``."""
        return [gradient_of(param) for param in params]


class StepFailures:
    """The consequences of a failed step on this rank, until the other ranks know of it or a checkpoint is loaded. Four
    states:

    - **Clean**: the last step succeeded, or failed before anything was written.
    - **Unreported**: this rank completed all exchanges of a step, but part of the step failed here. The other ranks
      noticed nothing. The next ``step()`` reports the error to them instead of stepping, and all ranks raise it; then
      the state is clean.
    - **Diverged**: as above, and replicas of the same weights now differ. Every ``step()`` reports it, and
      ``state_dict()`` refuses, until a state is loaded.
    - **Half done**: this rank left a step between two exchanges (an error in transport, Ctrl-C), so it is unknown which
      weights were updated. ``step()`` and ``state_dict()`` refuse on this rank until a state is loaded. Its connections
      are closed, so that the other ranks do not wait for it.
    """

    def __init__(self) -> None:
        self._half_done: str | None = None
        self._unreported: Exception | None = None

    def left_half_done(self, error: BaseException) -> None:
        self._half_done = f"{type(error).__name__}: {error}"

    def completed_with(self, failure: Exception, *, diverged: bool) -> None:
        self._unreported = failure_for_other_ranks(failure, diverged)

    def to_report(self) -> Exception | None:
        """The error to report to the other ranks at the coming agreement; reported once, or at every step while
        diverged.
        """
        failure = self._unreported
        if not isinstance(failure, StateError):
            self._unreported = None
        return failure

    def refuse_step(self) -> None:
        if self._half_done is not None:
            raise StateError(
                f"an earlier step was left half done ({self._half_done}). Load a checkpoint of the model and of this "
                "optimizer first."
            )

    def refuse_checkpoint(self) -> None:
        self.refuse_step()
        if isinstance(self._unreported, StateError):
            raise StateError(str(self._unreported))


class Overwritten:
    """Marks the weights that steps write without autograd's notice: DTensors through their local tensors, and those on
    devices.

    There kernels write. If a backward pass has saved such a weight, or needs FSDP2 to gather it again, it then raises,
    as it does after torch's own in-place operations. Those mark plain tensors in host memory.
    """

    def __init__(self) -> None:
        self._params: Sequence[ParamRecord] = ()
        self._unnoticed: list[tuple[ParamIndex, Tensor]] = []  # those of ``_params`` that need a mark
        self._gathered = FSDP2Weights(())  # of those that are DTensors

    def mark(self, params: Sequence[ParamRecord], is_written: Callable[[ParamIndex], bool]) -> None:
        """Marks the weights that a step has written."""
        if params is not self._params:
            tracked = (
                (ParamIndex(k), record.param) for k, record in enumerate(params) if not record.param.is_inference()
            )
            self._unnoticed = [
                (k, param) for k, param in tracked if as_dtensor(param) is not None or not known_to_host(param)
            ]
            self._gathered = FSDP2Weights([param for _, param in self._unnoticed if as_dtensor(param) is not None])
            self._params = params
        written = [param for k, param in self._unnoticed if is_written(k)]
        if written:
            mark_overwritten([*written, *self._gathered.gathered_again(written)])
