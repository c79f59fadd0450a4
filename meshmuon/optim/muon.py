"""Muon: the optimizer that users hold."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.profiler import record_function

from ..agree.identity import enrol
from ..agree.planner import Planner, RankStatus
from ..agree.state_presence import StatePresence
from ..errors import ConfigError, RoutingWarning, TransportError
from ..execute import DEFAULT_MEMORY_BUDGET, Executor, ExecutorSettings, ReferenceExecutor, StepExecutor, StepParam
from ..matrices import Split
from ..ortho import SchemeLike, resolve_scheme
from ..params.arguments import defaults_from, optimizer_options_from
from ..params.checks import check_replica_group
from ..params.dtensors import ReplicaGroup
from ..params.groups import check_group, normalise_group, normalise_params
from ..params.lr import AdjustLR
from ..params.named_params import NamedParam
from ..params.option_docs import with_options
from ..params.option_table import ParamGroup, group_options
from ..params.rules import RuleLike
from ..plan import Plan, PlanOptions, cost_model_for
from ..qk_clip.clip import QKClip
from ..routing.table import RoutingTable, build_routing_table
from ..state import param_state as state
from ..torch_compat import local_part
from .adamw import adamw_step
from .collect import Collector, gradient_of, hyperparameters_of, only_creates_state
from .nonfinite import NonFinite, Scaling, asked_by_scaler, gradients_of, silence
from .offload import Offload
from .overwritten import Overwritten
from .route_log import RouteLog
from .step_context import StepContext
from .step_failures import StepFailures

__all__ = ["Muon"]


@with_options
class Muon(torch.optim.Optimizer):
    """Muon for the matrices of a model, AdamW for everything else, in one optimizer.

    A step does, for each parameter of the groups with ``use_muon=True``:

    1. momentum: ``M ← momentum·M + G``, and with Nesterov the update is ``G + momentum·M``, else ``M``;
    2. orthogonalisation: the update's singular values are driven to 1 by ``ns_steps`` steps of ``scheme``, for all
       matrices of one shape at once, within ``memory_budget``. A matrix that is cut over ranks goes to one of them, its owner,
       and the result comes back;
    3. ``p ← p·(1 − lr·weight_decay) − lr·adjust_lr_fn(rows, cols)·update``.

    Groups with ``use_muon=False`` take ``torch.optim.AdamW``'s fused step. Each param group may have its own value of every
    option marked "per group"; the optimizer reads them at every step.

    Args:
        params: param groups, each with ``params``, ``use_muon`` and, best, ``names``; see ``get_default_muon_param_groups``.
        {options}

    Example::

        optimizer = Muon(get_default_muon_param_groups(model), lr=1e-3, weight_decay=0.1)
    """

    _constructed = True

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float = 0.1,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        none_grad: bool = True,
        debug: bool = False,
        clip_config: Mapping[str, Any] | None = None,
        warmup_step: int = 5,
        chunk_size: int = -1,
        use_distributed_muon: bool = False,
        expert_keys: Sequence[str] | None = None,
        *,
        scheme: SchemeLike = "polar_express",
        adjust_lr_fn: AdjustLR = "match_rms_adamw",
        maximize: bool = False,
        conv: str | None = None,
        split: Split | None = None,
        expert_dims: str = "out_in",
        compute_dtype: torch.dtype | None = None,
        momentum_dtype: torch.dtype | None = None,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
        form: str = "auto",
        deterministic: bool = False,
        compile: bool | str = False,
        cuda_graphs: bool = False,
        comm_dtype: torch.dtype | None = None,
        replicas: str = "auto",
        replica_group: ReplicaGroup | None = None,
        nonfinite: str = "propagate",
        rule: RuleLike = "plain",
        cautious_weight_decay: bool = False,
        waves_ahead: int | None = None,
        reference_path: bool | None = None,
    ) -> None:
        arguments = dict(locals())  # by the names in the table of options
        options = optimizer_options_from(arguments)
        resolve_scheme(scheme, ns_steps)  # also if no group uses the default
        self._debug = debug
        self._settings = ExecutorSettings(chunk_size, memory_budget, form, deterministic, compile, cuda_graphs)
        in_flight = options["waves_ahead"] + 1
        self._plan_options = PlanOptions(cost_model_for("cpu"), replicas, chunk_size, memory_budget, in_flight)
        self._comm_dtype = comm_dtype
        self._reference: bool = options["reference_path"]
        self._replica_group = replica_group
        self._qk_clip = QKClip(clip_config)
        self._nonfinite = NonFinite(nonfinite)
        self._offload = Offload()
        self._failures = StepFailures()
        self._reset()
        self._constructed = False  # torch adds the groups one by one; their warnings come together, at the end
        super().__init__(normalise_params(params), defaults_from(arguments))
        self._constructed = True
        self._descent = enrol(self)
        self._warn_of_routes(0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, checked like those of the constructor; the next step plans with it."""
        index = len(self.param_groups)
        group = normalise_group(param_group, index)
        check_group(cast(ParamGroup, {**self.defaults, **group}), index)
        for option in group_options():
            if option.name in group:
                group[option.name] = option.kept_as(group[option.name])
        try:
            super().add_param_group(group)
        except ValueError as error:  # what only torch checks: leaves, and parameters in two groups
            raise ConfigError(str(error)) from None
        if self._constructed:
            self._warn_of_routes(index)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, qk_logits: Any = None) -> Any:
        """Performs one step.

        Args:
            closure: evaluates the model again and returns the loss.
            qk_logits: layer → tensor of the largest attention logit of each head, the same on all ranks, as ``MaxLogits.collect``
                gives it; needs ``clip_config``.

        Returns:
            What ``closure`` returned, or None.
        """
        self._planner.begin()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._offload.resident(self.state) as offload_error:
            try:
                step = self._inspect(qk_logits, offload_error)
                self._agree(step)  # until here nothing is written, and one rank's error is raised on all ranks
                if step.decision.nonfinite:
                    self._skip(step)
                elif not step.decision.busy:
                    state.create(self._groups, self.state)  # all that checkpointing wants of a first step at lr 0
                else:
                    self._prepare(step)
                    self._finish(step, self._run(step))
            finally:
                if self._offload.on:
                    self._collector.forget()
        return loss

    @property
    def _groups(self) -> list[ParamGroup]:
        """``param_groups``, typed. The public attribute keeps torch's type, since users may add keys of their own."""
        return cast("list[ParamGroup]", self.param_groups)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``step`` unscales and skips by itself: a GradScaler that asks leaves both to it, and the host need not wait.

        Everyone else hears no. Trainers read this too, and refuse to clip where an optimizer unscales in its step. Here they may:
        gradients that ``GradScaler.unscale_`` has divided already are not divided again.
        """
        return asked_by_scaler()

    @property
    def skipped_steps(self) -> int:
        """How many steps were left out because a gradient was not finite. On a GPU reading it waits for the device."""
        return self._nonfinite.skipped

    @property
    def nonfinite_logits(self) -> int:
        """How many logits given to ``step`` were +∞ or NaN; their heads were not clipped. On a GPU it waits for the device."""
        return self._qk_clip.nonfinite_logits

    def turn_on_cpu_offload(self) -> None:
        """Keeps the state in host memory between steps, from now on; device memory that it took is free meanwhile."""
        self._collector.forget()
        self._offload.turn_on(self.state)

    def turn_off_cpu_offload(self) -> None:
        """Brings the state back and keeps it on its devices."""
        self._offload.turn_off(self.state)

    @property
    def replica_group(self) -> ReplicaGroup | None:
        """Over which ranks plain tensors are replicated. A copy of an optimizer has none until it is set again."""
        return self._replica_group

    @replica_group.setter
    def replica_group(self, group: ReplicaGroup | None) -> None:
        check_replica_group(group, "replica_group")
        self._replica_group = group
        self._reset()

    def plan(self) -> Plan:
        """The plan of the last step: ``print(optimizer.plan().describe())``, or ``.to_json()`` for tools.

        Plans are made at the first step, when gradients and layouts are known.
        """
        if self._executor.plan is None:
            raise ConfigError("there is no plan yet: it is made at the first step().")
        return self._executor.plan

    def routing_table(self) -> RoutingTable:
        """Where each parameter goes and how large its steps will be; ``print`` it."""
        return build_routing_table(self._groups)

    def workspace_bytes(self) -> int:
        """Scratch memory held between steps, beside the state."""
        return self._executor.workspace_bytes()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, as ``torch.optim.Optimizer`` gives it: the same keys on every rank, values that can be stored.

        Once there is any state, parameters that train and never had a gradient appear with zeros. Dtypes are stored by name; of
        functions only the name is stored, and the loading optimizer keeps its own.
        """
        self._failures.refuse_checkpoint()
        if self.state:
            state.create(self._groups, self.state)
            self._offload.put_away(self.state)
            self._offload.settle()
        return state.storable(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict``; refuses one that does not fit before anything is overwritten."""
        adapted = state_dict
        earlier = [dict(group) for group in self.param_groups]

        def check(_: torch.optim.Optimizer, final: dict[str, Any]) -> None:
            nonlocal adapted
            adapted = final
            state.check(self._groups, final)

        # The last hook, so that a user's own hooks may first turn a foreign state into one that fits.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, old, saved in zip(self.param_groups, earlier, adapted["param_groups"], strict=True):
            state.restore_options(group, old, saved, self.defaults)
        state.restore(self._groups, self.state, adapted)
        self._offload.put_away(self.state)
        self._failures.clear()
        self._planner.begin_anew()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_settings", "_plan_options", "_comm_dtype", "_reference", "_debug", "_qk_clip", "_failures", "_descent")
        self._offload.settle()
        options = {"_nonfinite_policy": self._nonfinite.policy, "_offloaded": self._offload.on}
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}, **options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it here; it is no option of ours and must not enter the groups
        if "_executor" not in self.__dict__:  # a copy, not an optimizer that loads a state
            self._replica_group = None  # process groups cannot be copied
            self._nonfinite = NonFinite(state["_nonfinite_policy"])
            self._offload = Offload(on=state["_offloaded"])
            self._reset()
            self._descent = enrol(self, state["_descent"])

    def _reset(self) -> None:
        path = f"reference_path={self._reference}"
        self._planner = Planner(self._plan_options, self._settings.form, path, self._replica_group, weakref.ref(self))
        self._executor: StepExecutor = (ReferenceExecutor if self._reference else Executor)(self._settings)
        self._collector = Collector(self._wire_dtype())
        self._overwritten = Overwritten()
        self._log = RouteLog(on=self._debug)

    def _inspect(self, qk_logits: Any, offload_error: Exception | None) -> StepContext:
        """Looks at parameters, gradients, state and options; keeps this rank's first error for the agreement."""
        self._failures.refuse_step()
        params, plan_inputs, failure = self._collector.plan_inputs(self._groups)
        unreported = self._failures.to_report()
        failure = failure or self._misuse(params) or unreported or offload_error
        step = StepContext(params, plan_inputs, qk_logits)
        if failure is None:
            try:
                step.scaling = Scaling.of(self)
                self._collector.check(self._groups, self.state)
                self._qk_clip.check(params, qk_logits)
                step.nonfinite = self._nonfinite.known(params, step.scaling)
                step.busy = bool(self.state) or not only_creates_state(self._groups)
            except Exception as error:  # raised in the agreement, once the other ranks know
                failure = error
        step.failure = failure
        del failure, unreported  # here and below: an error that its own traceback holds would keep the optimizer alive
        return step

    def _agree(self, step: StepContext) -> None:
        """Decides with all ranks what to do in this step; one rank's failed check is raised on all of them."""
        clip = self._qk_clip.signature(step.qk_logits)
        status = RankStatus(
            prepared_plan=self._executor.plan,
            nonfinite=step.nonfinite,
            busy=step.busy,
            hyperparameters=[f"{text}, {clip}" for text in hyperparameters_of(self._groups)],
            without_state=self._without_state(step.params),
            presence=StatePresence(step.params, self.state, self._keeps),
        )
        failure, step.failure = step.failure, None
        try:
            step.decision = self._planner.decide(step.plan_inputs, failure, status)
        finally:
            del failure

    def _prepare(self, step: StepContext) -> None:
        """Makes state and buffers if the plan is new; all ranks have theirs before anything travels."""
        decision = step.decision
        self._log.tell(step.params, self.routing_table)
        if not decision.prepares:
            return
        failure: Exception | None = None
        try:
            step_params = self._step_params(step)
            if decision.plan is not self._executor.plan:
                self._executor.prepare(decision.plan, decision.rank, step_params, decision.exchange)
        except TransportError:
            raise
        except Exception as error:
            failure = error
        try:
            self._planner.confirm(failure)
        finally:
            del failure

    def _run(self, step: StepContext) -> Exception | None:
        """Steps all parameters, as all ranks have agreed; what went wrong on this rank alone, if all exchanges were completed."""
        params, decision = step.params, step.decision
        step.diverged = decision.repeats  # where ranks compute the same matrix, an error on one of them leaves replicas unequal

        def adamw() -> None:
            before, step.diverged = step.diverged, True  # an error leaves other ranks with a step that this one has not made
            self._adamw_step(step)
            step.diverged = before

        try:
            step.skip_mask = self._nonfinite.mask_on_device(params, step.scaling, decision.exchange)
            if step.scaling.scale is not None:
                step.scaling.remove(gradients_of(params))
            if step.skip_mask is not None:
                silence(gradients_of(params), step.skip_mask)
            step_params = self._step_params(step)
            if step.skip_mask is not None:
                silence([local_part(one.zeros) for one in step_params if one.zeros is not None], step.skip_mask)
            failure = self._executor.run(step_params, last=adamw)
            self._qk_clip.apply(params, step.qk_logits, step.skip_mask)  # also after a failure: the other ranks clip too
            return failure
        except BaseException as error:  # also Ctrl-C: the other ranks wait for what this rank will not send any more
            if decision.exchange is not None:
                self._failures.left_half_done(error)
                decision.exchange.abandon()
            raise
        finally:
            failure = None
            self._collector.let_go()
            clipped = frozenset() if step.qk_logits is None else self._qk_clip.members
            self._overwritten.mark(params, self._planner.plan_inputs, decision.zeros, clipped)

    def _finish(self, step: StepContext, failure: Exception | None) -> None:
        """Raises what went wrong on this rank; the other ranks learn of it at the next step."""
        if failure is None:
            return
        if step.decision.exchange is not None:
            self._failures.completed_with(failure, diverged=step.diverged)
        try:
            raise failure
        finally:
            del failure

    def _skip(self, step: StepContext) -> None:
        """A gradient is not finite: counts the step, and frees the gradients that it would have freed."""
        self._nonfinite.count()
        for named in step.params:
            if named.param_group["use_muon"] and named.param_group["none_grad"]:
                named.param.grad = None

    def _warn_of_routes(self, first: int) -> None:
        """Warns of the groups from ``first`` on, at the line that called the method which calls this."""
        for warning in build_routing_table(self._groups[first:], first).warnings:
            warnings.warn(warning, RoutingWarning, stacklevel=3)

    def _wire_dtype(self) -> Callable[[Tensor], torch.dtype | None]:
        """The dtype in which a parameter travels. It knows nothing of the optimizer, which must be freed with its last user."""
        comm_dtype = self._comm_dtype
        return lambda param: comm_dtype

    def _without_state(self, params: Sequence[NamedParam]) -> Sequence[int]:
        """Indices of the parameters whose state this rank would start at zero."""
        return self._collector.without_state

    def _keeps(self, named: NamedParam) -> bool:
        """Whether this rank keeps the state of a parameter."""
        return True

    def _misuse(self, params: Sequence[NamedParam]) -> Exception | None:
        """Why this kind of optimizer cannot step these parameters."""
        return None

    def _step_params(self, step: StepContext) -> list[StepParam]:
        return self._collector.step_params(self._planner.plan_inputs, step.decision, self.state, skip_mask=step.skip_mask)

    def _adamw_step(self, step: StepContext) -> None:
        by_group: dict[int, list[Tensor]] = {}
        for k, named in enumerate(step.params):
            if not named.param_group["use_muon"] and (named.param.grad is not None or k in step.decision.zeros):
                by_group.setdefault(named.group_index, []).append(named.param)
        with record_function("meshmuon::adamw"):
            for index, params in by_group.items():
                grads, states = self._adamw_gradients(params), [self.state[param] for param in params]
                adamw_step(self._groups[index], params, grads, states, step.skip_mask)

    def _adamw_gradients(self, params: Sequence[Tensor]) -> list[Tensor]:
        return [gradient_of(param) for param in params]
