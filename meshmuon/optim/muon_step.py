"""One step of Muon, in phases: inspect, agree, prepare, run, finish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from ..agree.descriptions import hyperparameters_of
from ..agree.planner import Planner
from ..agree.state_presence import StatePresence
from ..agree.step_decision import PlanInput, RankStatus, StepDecision
from ..errors import TransportError
from ..execute import UNOBSERVED, StepExecutor, StepParam, advance_counters
from ..metrics.meter import Clipped, Meter
from ..metrics.recorder import StepRecorder
from ..params.checks import adamw_betas, adamw_eps
from ..params.named_params import NamedParam
from ..params.option_table import ParamGroup
from ..qk_clip.clip import QKClip
from ..qk_clip.logits import logits_text
from ..routing.table import build_routing_table
from ..state import param_state
from ..torch_compat import local_part, never_traced
from .activity import ActivityCheck
from .adamw import adamw_step
from .collect import Collector, gradient_of, only_creates_state
from .nonfinite import NO_SCALING, NonFinite, Scaling, gradients_of, zero_if_skipped
from .offload import Offload
from .overwritten import Overwritten
from .route_log import RouteLog
from .step_failures import StepFailures


@dataclass(slots=True)
class StepContext:
    """The data of one call of ``step()``, handed from phase to phase (inspect, agree, prepare, run, finish)."""

    params: list[NamedParam]  # all parameters, param group by param group
    plan_inputs: tuple[PlanInput, ...]  # what the planner must know about each of them, in the same order
    has_grad: tuple[bool, ...]  # whether each of them has a gradient
    qk_logits: Any  # the logits given to ``step()``
    scaling: Scaling = NO_SCALING  # what a GradScaler has told the optimizer
    failure: Exception | None = None  # this rank's first error, until the agreement raises it on all ranks
    nonfinite: bool = False  # the host has found a gradient on this rank that is not finite
    has_work: bool = True  # this rank has more to do than create state
    decision: StepDecision = field(init=False)  # what all ranks have agreed on
    ready_params: list[StepParam] | None = None  # what the executor works on, if it was found out while the ranks agreed
    skip_mask: Tensor | None = None  # a boolean on a device, true if nothing may change; None if no device has to be asked
    recorder: StepRecorder | None = None  # what measures this step; None if it is not measured
    would_diverge: bool = False  # an error at this point would make replicas diverge


class MuonStep(torch.optim.Optimizer):
    """The step. ``Muon`` builds the parts below; ``DistMuon`` overrides the methods at the end of this class."""

    _collector: Collector  # looks at parameters, gradients and state
    _planner: Planner  # agrees with the other ranks on a plan
    _activity: ActivityCheck  # notices steps that would train nothing
    _failures: StepFailures  # remembers what the other ranks must still learn
    _executor: StepExecutor  # runs the plan
    _overwritten: Overwritten  # tells autograd which weights the step has overwritten
    # Each of these serves one option.
    _nonfinite: NonFinite
    _qk_clip: QKClip
    _offload: Offload
    _log: RouteLog
    _meter: Meter

    @never_traced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, qk_logits: Any = None) -> Any:
        """Performs one step.

        Args:
            closure: evaluates the model again and returns the loss.
            qk_logits: layer → tensor of the largest attention logit of each head, the same on all ranks, as ``MaxLogits.collect``
                returns it; needs ``clip_config``.

        Returns:
            What ``closure`` returned, or None.
        """
        self._planner.begin()
        self._meter.begin_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._offload.resident(self.state) as offload_error:
            try:
                step = self._inspect(qk_logits, offload_error)
                self._agree(step)  # nothing is written before this; if one rank fails a check, all ranks raise its error
                if step.decision.nonfinite:
                    self._skip(step)
                elif not step.decision.has_work:
                    # No rank has work: torch.distributed.checkpoint calls step() with lr 0 only to create state.
                    param_state.create(self._groups, self.state)
                else:
                    self._activity.judge(step.decision.activity)
                    self._prepare(step)
                    self._finish(step, self._run(step))
            finally:
                self._planner.end()
                if self._offload.on:
                    self._collector.invalidate_state()
        return loss

    def _inspect(self, qk_logits: Any, offload_error: Exception | None) -> StepContext:
        """Looks at parameters, gradients, state and options. This rank's first error is kept for the agreement."""
        self._failures.refuse_step()
        params, plan_inputs, failure = self._collector.plan_inputs(self._groups)
        unreported = self._failures.to_report()
        has_grad = self._collector.has_grad
        failure = (
            failure
            or self._misuse(params)
            or self._meter.refusal(params)
            or self._activity.replaced(params, has_grad)
            or unreported
            or offload_error
        )
        step = StepContext(params, plan_inputs, has_grad, qk_logits)
        if failure is None:
            try:
                step.scaling = Scaling.of(self)
                self._collector.check(self._groups, self.state)
                self._qk_clip.check(params, qk_logits)
                step.nonfinite = self._nonfinite.known_to_host(params, step.scaling)
                step.has_work = bool(self.state) or not only_creates_state(self._groups)
            except Exception as error:  # raised in the agreement, once the other ranks know
                failure = error
        step.failure = failure
        # An error refers to this frame through its traceback. Here and below, a variable that still held the error would close a
        # cycle, and the optimizer would outlive its last user.
        del failure, unreported
        return step

    def _agree(self, step: StepContext) -> None:
        """Decides together with all ranks what this step does. If one rank failed a check, all ranks raise its error."""
        clip = logits_text(step.qk_logits)
        status = RankStatus(
            has_grad=step.has_grad,
            prepared_plan=self._executor.plan,
            nonfinite=step.nonfinite,
            has_work=step.has_work,
            activity=self._activity.of(step.params, step.has_grad),
            hyperparameters=lambda: [f"{text}, {clip}" for text in hyperparameters_of(self._groups)],
            without_state=self._without_state(step.params),
            presence=StatePresence(step.params, self.state, self._keeps),
        )
        failure, step.failure = step.failure, None
        try:
            pending = self._planner.propose(step.plan_inputs, failure, status)
        finally:
            del failure
        try:
            if pending.expected is not None:  # while the votes travel
                step.ready_params = self._ready_params(pending.expected, pending.advance)
        except BaseException:  # Ctrl-C: the other ranks may already count on this one
            pending.abandon()
            raise
        try:
            step.decision = pending.wait()
            as_expected = step.decision is pending.expected
        except BaseException:
            self._collector.release_state()
            raise
        if not as_expected:
            step.ready_params = None
            self._collector.release_state()

    def _prepare(self, step: StepContext) -> None:
        """Creates state and buffers if the plan is new. Nothing is sent before all ranks have theirs."""
        decision = step.decision
        self._log.tell(step.params, lambda: build_routing_table(self._groups))
        if not decision.prepares:
            return
        failure: Exception | None = None
        try:
            step_params = self._step_params(step)
            if decision.plan is not self._executor.plan:
                self._executor.prepare(decision.plan, decision.rank, step_params, decision.exchange)
            self._meter.prepare(decision, step.params, self._planner.plan_inputs, self._planner.layouts)
        except TransportError:
            raise
        except Exception as error:
            failure = error
        try:
            self._planner.confirm(failure)
        finally:
            del failure

    def _run(self, step: StepContext) -> Exception | None:
        """Steps all parameters, as all ranks have agreed.

        Returns this rank's first error, if all exchanges took place in spite of it; raises any other.
        """
        params, decision = step.params, step.decision
        step.would_diverge = decision.repeats  # if one of several ranks that compute a matrix fails, their replicas diverge

        def adamw() -> None:
            before = step.would_diverge
            step.would_diverge = True  # if AdamW fails here, the other ranks have stepped and this one has not
            self._adamw_step(step)
            step.would_diverge = before

        try:
            step.skip_mask = self._nonfinite.reduce_skip_mask(params, step.scaling, decision.exchange)
            if step.scaling.scale is not None:
                step.scaling.remove(gradients_of(params))
            if step.skip_mask is not None:
                zero_if_skipped(gradients_of(params), step.skip_mask)
            step_params = step.ready_params
            if step_params is None or step.skip_mask is not None:
                step_params = self._step_params(step)
            if step.skip_mask is not None:
                # Gradients that this rank lacks are made as +0, and −0 + (+0) is +0: a momentum of −0 would lose its sign in a
                # step that must change nothing. If the step is skipped they become −0, like the gradients above.
                made_zeros = [step_param.zeros for step_param in step_params if step_param.zeros is not None]
                zero_if_skipped([local_part(zeros) for zeros in made_zeros], step.skip_mask)
            if self._meter.is_due(self._planner.steps):
                step.recorder = self._meter.begin(step_params, decision, gradients_here=not self._averages_gradients)
            observer = step.recorder or UNOBSERVED
            failure = self._executor.run(step_params, idle=decision.idle, during_last_scatter=adamw, observer=observer)
            # Counters and QK-clip also after a failure: the other ranks count this step and clip.
            advance_counters((step_param.counter for step_param in step_params), step.skip_mask)
            logits = self._qk_clip.apply(params, step.qk_logits, step.skip_mask)
            measuring_failure = self._measured(step, logits)  # likewise: the other ranks wait for the numbers of this one
            return failure or measuring_failure
        except BaseException as error:  # also Ctrl-C: the other ranks wait for what this rank will never send
            if decision.exchange is not None:
                self._failures.left_half_done(error)
                decision.exchange.abandon()
            raise
        finally:
            failure = measuring_failure = None
            self._collector.release_state()
            clipped = frozenset() if step.qk_logits is None else self._qk_clip.clipped
            self._overwritten.mark(params, step.has_grad, decision.zeros, clipped)

    def _measured(self, step: StepContext, logits: Mapping[Any, Tensor] | None) -> Exception | None:
        """Ends the measurement of a measured step. Returns this rank's first error in it."""
        if step.recorder is None:
            return None
        return self._meter.finish(
            step.recorder,
            step.decision,
            self._groups,
            {k for k, has_grad in enumerate(step.has_grad) if has_grad} | step.decision.zeros,
            skipped=self._nonfinite.counted,
            skip_mask=step.skip_mask,
            clipped=Clipped(logits or {}, self._qk_clip.threshold),
        )

    def _finish(self, step: StepContext, failure: Exception | None) -> None:
        """Raises the error of this rank, if there was one. The other ranks learn of it at the next step."""
        if failure is None:
            return
        if step.decision.exchange is not None:
            self._failures.completed_with(failure, diverged=step.would_diverge)
        try:
            raise failure
        finally:
            del failure

    def _skip(self, step: StepContext) -> None:
        """Counts a skipped step, because a gradient is not finite, and frees the gradients that the step would have freed."""
        self._nonfinite.count()
        for named in step.params:
            if named.param_group["use_muon"] and named.param_group["none_grad"]:
                named.param.grad = None

    @property
    def _groups(self) -> list[ParamGroup]:
        """``param_groups``, typed. The public attribute keeps torch's type, since users may add keys of their own."""
        return cast("list[ParamGroup]", self.param_groups)

    def _adamw_step(self, step: StepContext) -> None:
        indices_by_group: dict[int, list[int]] = {}
        for k, named in enumerate(step.params):
            if not named.param_group["use_muon"] and (named.param.grad is not None or k in step.decision.zeros):
                indices_by_group.setdefault(named.group_index, []).append(k)
        recorder = step.recorder
        with (recorder or UNOBSERVED).phase("adamw"):
            for group_index, indices in indices_by_group.items():
                params, group = [step.params[k].param for k in indices], self._groups[group_index]
                grads, states = self._adamw_gradients(params), [self.state[param] for param in params]
                if recorder is not None:
                    recorder.before_adamw(self._meter.adamw_starts(indices), params, grads)
                adamw_step(group, params, grads, states, step.skip_mask)
                if recorder is not None:
                    recorder.after_adamw(self._meter.adamw_starts(indices), states, adamw_betas(group), adamw_eps(group))

    # DistMuon overrides what follows.

    @property
    def _averages_gradients(self) -> bool:
        """Whether ranks have different gradients of the same weights, which the step averages."""
        return False

    def _misuse(self, params: Sequence[NamedParam]) -> Exception | None:
        """Why this kind of optimizer cannot step these parameters; None if it can."""
        return None

    def _without_state(self, params: Sequence[NamedParam]) -> Sequence[int]:
        """Indices of the parameters whose state this rank would start at zero."""
        return self._collector.without_state

    def _keeps(self, named: NamedParam) -> bool:
        """Whether this rank keeps the state of a parameter."""
        return True

    def _step_params(self, step: StepContext) -> list[StepParam]:
        """What the executor works on."""
        return self._collector.step_params(self._planner.plan_inputs, step.decision, self.state, skip_mask=step.skip_mask)

    def _ready_params(self, expected: StepDecision, meanwhile: Callable[[], None]) -> list[StepParam] | None:
        """What the executor will work on if the ranks decide as expected, if it can be told without writing; else None."""
        return self._collector.ready_step_params(expected, self.state, meanwhile)

    def _adamw_gradients(self, params: Sequence[Tensor]) -> list[Tensor]:
        """The gradients with which AdamW steps ``params``."""
        return [gradient_of(param) for param in params]
