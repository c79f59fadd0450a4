"""Muon: the optimizer that users hold."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex, cast

import torch
from torch import Tensor, nn

from ..agree.identity import register
from ..agree.local_planner import PlanSettings
from ..agree.planner import Planner
from ..agree.state_presence import has_begun
from ..errors import ConfigError, MeshmuonError, RoutingWarning, StateError, level_of_user
from ..execute import CommDtypeLike, DataParallelExecutor, Executor, ExecutorSettings, ReferenceExecutor
from ..matrices import Conv, Split
from ..metrics.meter import Meter
from ..ortho import SchemeLike
from ..params.arguments import options_from, warn_of_names
from ..params.checks import check_replica_group
from ..params.dtensors import ReplicaGroup
from ..params.groups import check_group, keep_options, normalise_group, normalise_params
from ..params.lr import AdjustLR
from ..params.option_table import NonFinitePolicy, ParamGroup, Rounding, group_options, with_options
from ..params.param_record import named_params
from ..params.rules import RuleLike
from ..plan import CostModelLike, Plan, PlanOptions, Replicas, cost_model_for, cost_model_from
from ..qk_clip.clip import QKClip
from ..routing.param_groups import param_groups_from
from ..routing.table import RoutingTable, build_routing_table, is_first_of_ranks
from ..state import param_state as state
from ..state.loading import Fitted, fit, restore
from .activity import ActivityCheck
from .collect import Collector
from .muon_step import Overwritten, StepFailures, logger
from .nonfinite import NonFinite, asked_by_scaler
from .offload import Offload
from .pickling import refuse_unpicklable
from .preparation import PreparedStep
from .step_params import StepParams


@with_options
class Muon(PreparedStep):
    """Muon for the matrices of a model, AdamW for everything else, in one optimizer.

    For each parameter of the groups with ``use_muon=True``, a step does:

    1. momentum: ``M ← momentum·M + G``, and with Nesterov the update is ``G + momentum·M``, else ``M``;
    2. orthogonalisation: ``ns_steps`` steps of ``scheme`` drive the singular values of the update to 1, for all
       matrices of one shape at once, within ``memory_budget``. The pieces of a sharded matrix go to one rank, its
       owner, and the result comes back;
    3. ``p ← p·(1 − lr·weight_decay) − lr·adjust_lr_fn(rows, cols)·update``.

    Groups with ``use_muon=False`` take the fused step of ``torch.optim.AdamW``. Each param group may have its own value
    of every option marked "per group"; the optimizer reads the groups at every step.

    Args:
        params: a model, which stands for ``get_default_muon_param_groups(model)``, or param groups, each with
            ``params``, ``use_muon`` and preferably ``names``. ``model.named_parameters()`` works too, with a warning:
            names and shapes tell less than the model. The positional arguments after it are those of Motif's optimizer.

    {options}

    Example::

        optimizer = Muon(model, lr=1e-3, weight_decay=0.1)
    """

    _constructed = True  # False while the constructor adds the groups one by one

    def __init__(
        self,
        params: nn.Module | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float = 0.1,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        none_grad: bool = True,
        debug: bool = False,  # sets the level of the logger ``meshmuon`` to DEBUG
        clip_config: Mapping[str, Any] | None = None,
        warmup_step: int = 5,
        chunk_size: int = -1,
        use_distributed_muon: bool = False,
        expert_keys: Sequence[str] | None = None,
        *,
        # Everyday.
        adamw_lr: float | Tensor | None = None,
        betas: tuple[float, float] | None = None,  # torch's name of adamw_betas
        eps: float | None = None,  # torch's name of adamw_eps
        scheme: SchemeLike = "auto",
        adjust_lr_fn: AdjustLR = "match_rms_adamw",
        maximize: bool = False,
        # What is in the model.
        split: Split | None = None,
        matrices: Mapping[str, Mapping[str, Any]] | None = None,
        conv: Conv | None = None,
        # Update rules and rounding.
        rule: RuleLike = "plain",
        cautious_weight_decay: bool = False,
        rounding: Rounding = "nearest",
        momentum_dtype: torch.dtype | None = None,
        nonfinite: NonFinitePolicy = "propagate",
        # Engine.
        compute_dtype: torch.dtype | None = None,
        comm_dtype: CommDtypeLike = None,
        replica_group: ReplicaGroup | None = None,
        replicas: Replicas = "auto",
        memory_budget: int | None = None,
        deterministic: bool = False,
        cuda_graphs: bool = False,
        cost_model: CostModelLike | None = None,
        metrics: int | None = None,
        allow_inactive: bool = False,
        **unknown: NoReturn,  # refused with a hint; type checkers refuse it as well
    ) -> None:
        arguments = dict(locals())  # the parameters above are the options of the table, by name
        options = options_from(arguments)
        warn_of_names(arguments)
        if debug:
            _show_log()
        self._nonfinite = NonFinite(nonfinite)
        engine: dict[str, Any] = {
            "deterministic": deterministic,
            "cuda_graphs": cuda_graphs,
            "guarded": self._nonfinite.guards,
        }
        self._settings = ExecutorSettings(chunk_size, memory_budget, **engine)
        self._cost_model = cost_model_from(cost_model)
        # LocalPlanner replaces cost model and budget: by the user's, or by those of the parameters' device.
        self._plan_options = PlanOptions(cost_model_for("cpu"), replicas, chunk_size, in_flight=warmup_step + 1)
        self._comm_dtype = comm_dtype
        self._reference = use_distributed_muon
        self._replica_group = replica_group
        self._metrics = metrics
        self._adamw_lr = adamw_lr
        self._qk_clip = QKClip(clip_config)
        self._offload = Offload()
        self._failures = StepFailures()
        self._activity = ActivityCheck(allow_inactive)
        self._reset()
        self._constructed = False
        params = param_groups_from(params, expert_keys, conv, split)
        defaults = {option.name: option.kept_as(options[option.name]) for option in group_options()}
        super().__init__(normalise_params(params, arguments), defaults)
        self._constructed = True
        self._activity.refuse_filters_alone(self._groups)
        self._lineage = register(self)
        self._warn_of_routes(0)  # of all groups together

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, checked like those of the constructor. The next step plans with it."""
        index = len(self.param_groups)
        group = normalise_group(param_group, index, dict(named_params(self._groups)))
        if self._adamw_lr is not None and not group["use_muon"]:
            group.setdefault("lr", self._adamw_lr)
        check_group(cast(ParamGroup, {**self.defaults, **group}), index)
        keep_options(group)
        try:
            super().add_param_group(group)
        except ValueError as error:  # torch alone checks for non-leaf tensors
            raise ConfigError(str(error)) from None
        self._activity.watch(param_group.get("names"))
        if self._constructed:
            self._warn_of_routes(index)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``step`` unscales gradients and skips steps by itself, so that the host need not wait for the device.

        The answer is True for a GradScaler, which then leaves both to ``step``, and False for everyone else. Trainers
        read this too, and refuse to clip gradients if an optimizer unscales them in its step. Here they may clip:
        gradients that ``GradScaler.unscale_`` has already divided are not divided again.
        """
        return asked_by_scaler()

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped because a gradient was not finite. On a GPU, reading it waits for the device."""
        return int(self._nonfinite.skipped)

    @property
    def skipped_matrices(self) -> int:
        """How many updates were left out because they were not finite although the gradient was; needs ``nonfinite``.

        It counts the matrices that this rank orthogonalises. On a GPU, reading it waits for the device.
        """
        return int(self._nonfinite.skipped_matrices)

    @property
    def nonfinite_logits(self) -> int:
        """How many logits given to ``step`` were +∞ or NaN; their heads were not clipped. On a GPU, it waits for
        the device.
        """
        return self._qk_clip.nonfinite_logits

    def turn_on_cpu_offload(self) -> None:
        """From now on, keeps the state in host memory between steps, which frees its device memory meanwhile."""
        self._invalidate_state()
        self._offload.turn_on(self.state)

    def turn_off_cpu_offload(self) -> None:
        """Brings the state back to its devices and keeps it there."""
        self._offload.turn_off(self.state)

    @property
    def replica_group(self) -> ReplicaGroup | None:
        """Over which ranks plain tensors are replicated. A copy of an optimizer has none until it is set again."""
        return self._replica_group

    @replica_group.setter
    def replica_group(self, group: ReplicaGroup | None) -> None:
        check_replica_group(group)
        self._replica_group = group
        self._reset()

    def plan(self) -> Plan:
        """The plan of the last step: ``print(optimizer.plan().describe())``.

        The first step makes it, when gradients and layouts are known, or ``prepare()`` for all parameters that train.
        """
        if self._executor.plan is None:
            raise ConfigError("there is no plan yet: it is made by prepare(), or at the first step().")
        return self._executor.plan

    @property
    def measures(self) -> bool:
        """Whether the optimizer was built with ``metrics``."""
        return self._metrics is not None

    def metrics(self, *, wait: bool = False) -> dict[str, Any]:
        """The health of the last measured step as a plain dict, described in docs/metrics.md; needs the option
        ``metrics``.

        It does not communicate. Before the first measured step it is empty.

        Args:
            wait: on a GPU, wait until the device has finished the last measured step. Without it, the dict may be that
                of the measured step before; its ``"step"`` says which one it is.
        """
        return self._meter.read(wait=wait)

    def routing_table(self, full: bool = False) -> RoutingTable:
        """Where each parameter goes and how large its steps will be; ``print`` it.

        Args:
            full: print a row for every parameter, also for those of similar layers.
        """
        return build_routing_table(self._groups, full=full)

    def workspace_bytes(self) -> int:
        """Scratch memory held between steps, beside the state."""
        return self._executor.workspace_bytes()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, in the form of ``torch.optim.Optimizer``: the same keys on every rank, and plain
        values.

        Once there is any state, parameters that train and never had a gradient appear with zeros. Those that are frozen
        and have no state are listed under ``"frozen"``. Dtypes are stored by name. Of a function only the name is
        stored, and the loading optimizer keeps its own function.
        """
        self._failures.refuse_checkpoint()
        self._drop_replaced()
        if self.state:
            state.create(self._groups, self.state)
            self._offload.put_away(self.state)
            self._offload.settle()
        saved = state.storable(super().state_dict())
        keys = (key for group in saved["param_groups"] for key in group["params"])
        params = (param for group in self.param_groups for param in group["params"])
        frozen = [
            key
            for key, param in zip(keys, params, strict=True)
            if not param.requires_grad and key not in saved["state"]
        ]
        return {**saved, state.FROZEN: frozen} if frozen else saved

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads a ``state_dict``. One that does not fit is refused before anything is overwritten.

        Parameters are matched by name where both sides have names, in any order and however they are divided into
        groups. A param group takes the options of the saved group that its parameters were in.

        Args:
            state_dict: what ``state_dict()`` returned.
            strict: whether the checkpoint must have the same parameters. Otherwise parameters that it lacks, or that it
                has for AdamW instead of Muon or the reverse, start from zero, and state of parameters that the
                optimizer lacks is left out.
        """
        if not isinstance(state_dict, Mapping):
            raise StateError(f"this is not the state_dict of an optimizer, but a {type(state_dict).__name__}.")
        fitted: Fitted | None = None
        hooked, groups_before = False, self.param_groups

        def fit_last(_: torch.optim.Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            nonlocal fitted, hooked
            hooked = True
            fitted = fit(self._groups, self.defaults, final, strict=strict)
            return {"state": fitted.state, "param_groups": fitted.param_groups}

        # The last hook: hooks of the user may first convert a foreign state into one that fits.
        handle = self.register_load_state_dict_pre_hook(fit_last)
        try:
            super().load_state_dict(dict(state_dict))
        except Exception as error:
            written = self.param_groups is not groups_before
            if written or not hooked or isinstance(error, MeshmuonError):  # not hooked: an error of a user's hook
                raise
            text = f"the state_dict holds something that cannot be read or copied: {type(error).__name__}: {error}"
            raise StateError(text) from error
        finally:
            handle.remove()
        assert fitted is not None
        for group, overrides in zip(self.param_groups, fitted.overrides, strict=True):
            group.update(overrides)
        restore(self._groups, self.state, fitted)
        state.put_in_order(self._groups, self.state)
        self._offload.put_away(self.state)
        self._failures = StepFailures()
        # Accelerate loads what it has just saved, and exchanges the parameters afterwards.
        self._only_prepared = self._only_prepared and not any(map(has_begun, self.state.values()))
        self._collector.forget()
        self._planner.forget_steps()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        refuse_unpicklable(self.param_groups, self.defaults)
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        kept = (
            "_settings _plan_options _cost_model _metrics _adamw_lr _comm_dtype _reference _qk_clip _failures _lineage "
        )
        kept += "_only_prepared"
        self._offload.settle()
        options = {
            "_nonfinite_policy": self._nonfinite.policy,
            "_offloaded": self._offload.on,
            "_allow_inactive": self._activity.allowed,
            "_was_active": self._activity.active,
        }
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept.split()}, **options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # torch adds it; it is not an option of Muon and must not enter the groups
        self.defaults.pop("differentiable", None)
        if "_executor" not in self.__dict__:  # a copy, not an optimizer that loads a state
            self._replica_group = None  # process groups cannot be copied
            self._nonfinite = NonFinite(state["_nonfinite_policy"])
            self._offload = Offload(on=state["_offloaded"])
            self._activity = ActivityCheck(state["_allow_inactive"])
            self._activity.active = state["_was_active"]
            self._reset()
            self._lineage = register(self, state["_lineage"])

    def _reset(self) -> None:
        """Starts without a plan."""
        averages = self._averages_gradients
        path = "DistMuon" if averages else f"use_distributed_muon={self._reference}"
        path += f", {self._settings.bits}, metrics={self._metrics}, nonfinite={self._nonfinite.policy}"
        budget = self._settings.memory_budget
        settings = PlanSettings(self._plan_options, self._settings.form, path, self._cost_model, budget)
        self._planner = Planner(settings, self._replica_group, weakref.ref(self), reduced=not averages)
        executor = DataParallelExecutor if averages else ReferenceExecutor if self._reference else Executor
        self._executor = executor(self._settings)
        self._collector = Collector(self._comm_dtype, in_own_dtype=averages)
        self._step_params = StepParams()
        self._overwritten = Overwritten()
        self._meter = Meter(self._metrics, by_owners=not self._reference)

    def _warn_of_routes(self, first: int) -> None:
        """Warns about the groups from ``first`` on, at the line of the user's call; on one rank for all."""
        if not is_first_of_ranks(self._groups[first:]):
            return
        for warning in build_routing_table(self._groups, first).warnings:
            warnings.warn(warning, RoutingWarning, stacklevel=level_of_user())


def _show_log() -> None:
    """Turns on the logging of routes, and shows its lines even if logging was never configured."""
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.DEBUG)
