"""Muon: the optimizer that users hold."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.profiler import record_function

from ..errors import ConfigError, GradientError, RoutingWarning, UnsupportedError
from ..execute import DEFAULT_MEMORY_BUDGET, ExecutorSettings, LocalExecutor, Work, WorkSettings
from ..matrices import check_expert_keys, matrices_inside
from ..ortho import SchemeLike, default_compute_dtype, resolve_scheme
from . import state
from .adamw import adamw_step
from .groups import check_group, check_options, check_placement, normalise_group, normalise_params, storable_scheme
from .lr import AdjustLR, lr_factor
from .table import RoutingTable, build_routing_table

__all__ = ["Muon"]

_logger = logging.getLogger("meshmuon")

_Active: TypeAlias = tuple[dict[str, Any], list[tuple[str, Tensor]]]


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of a model, AdamW for everything else, in one optimizer.

    A step does, for each parameter of the groups with ``use_muon=True``:

    1. momentum: ``M ← momentum·M + G``, and with Nesterov the update is ``G + momentum·M``, else ``M``;
    2. orthogonalisation: the update's singular values are driven to 1 by ``ns_steps`` steps of ``scheme``, for all
       matrices of one shape at once, within ``memory_budget``;
    3. ``p ← p·(1 − lr·weight_decay) − lr·adjust_lr_fn(rows, cols)·update``.

    Groups with ``use_muon=False`` take ``torch.optim.AdamW``'s fused step. A group may carry its own lr, momentum, nesterov,
    ns_steps, weight_decay, betas, eps, none_grad, expert_keys, scheme, adjust_lr_fn, maximize, conv, compute_dtype and
    momentum_dtype; groups are read at every step.

    Args:
        params: groups, each with ``params``, ``use_muon`` and, best, ``names``; see ``get_default_muon_param_groups``.
        lr: learning rate; a one-element tensor works too.
        momentum: momentum of the Muon groups, in [0, 1).
        nesterov: look ahead by one momentum step.
        ns_steps: number of Newton–Schulz steps.
        weight_decay: decoupled weight decay of all groups.
        adamw_betas: betas of the AdamW groups (a group may also say ``betas``).
        adamw_eps: epsilon of the AdamW groups (a group may also say ``eps``).
        none_grad: free the gradients of Muon parameters as soon as the step has used them.
        debug: log each parameter's route whenever the plan changes.
        clip_config: QK-clip; not available in this version, leave it at None.
        warmup_step: waves of exchanges kept in flight when matrices are sharded; without effect on plain tensors.
        chunk_size: most matrices per batch; -1 lets ``memory_budget`` decide.
        use_distributed_muon: the all-gather reference path for sharded matrices; plain tensors are whole, so that both
            settings do the same.
        expert_keys: a 3-D parameter whose name contains one of these is a stack of independent matrices.
        scheme: ``"polar_express"``, ``"keller"``, a list of (a, b, c), a Scheme, or a callable on a batch.
        adjust_lr_fn: ``"match_rms_adamw"``, ``"original"``, ``"spectral"`` or a function of (rows, cols).
        maximize: ascend instead of descend.
        conv: ``"flatten"`` lets Muon take convolution filters as (out, in·kernel) matrices.
        compute_dtype: dtype of the Newton–Schulz products; float32 on CPU and bfloat16 on GPU unless given.
        momentum_dtype: dtype of new momentum buffers; the parameter's unless given.
        memory_budget: bytes of scratch that one batch may use (default 64 MiB).
        form: ``"auto"`` (fewest FLOPs that are safe in the dtype), ``"standard"`` or ``"gram"``.
        deterministic: no batching of products, so that the bits do not depend on what shares a batch.
        compile: compile the orthogonalisation of each shape with torch.compile.
        cuda_graphs: replay the orthogonalisation of each batch as a CUDA graph.

    Example::

        optimizer = Muon(get_default_muon_param_groups(model), lr=1e-3, weight_decay=0.1)
    """

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
        compute_dtype: torch.dtype | None = None,
        momentum_dtype: torch.dtype | None = None,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
        form: str = "auto",
        deterministic: bool = False,
        compile: bool | str = False,
        cuda_graphs: bool = False,
    ) -> None:
        if clip_config:
            raise UnsupportedError("clip_config: QK-clip is not available in this version of meshmuon; pass None.")
        if warmup_step < 0:
            raise ConfigError(f"warmup_step={warmup_step} must be at least 0.")
        resolve_scheme(scheme, ns_steps)
        self._debug = debug
        self._settings = ExecutorSettings(chunk_size, memory_budget, form, deterministic, compile, cuda_graphs)
        self._reset()
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "weight_decay": weight_decay,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "none_grad": none_grad,
            "expert_keys": check_expert_keys(expert_keys),
            "scheme": storable_scheme(scheme),
            "adjust_lr_fn": adjust_lr_fn,
            "maximize": maximize,
            "conv": conv,
            "compute_dtype": compute_dtype,
            "momentum_dtype": momentum_dtype,
        }
        super().__init__(normalise_params(params), defaults)
        for warning in self.routing_table().warnings:
            warnings.warn(warning, RoutingWarning, stacklevel=2)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, checked like those of the constructor; the next step plans with it."""
        index = len(self.param_groups)
        group = normalise_group(param_group, index)
        check_group({**self.defaults, **group}, index)
        if "scheme" in group:
            group["scheme"] = storable_scheme(group["scheme"])
        super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, qk_logits: Any = None) -> Any:
        """Performs one step.

        Args:
            closure: evaluates the model again and returns the loss.
            qk_logits: largest attention logits per head; not available in this version, leave it at None.

        Returns:
            What ``closure`` returned, or None.
        """
        if qk_logits is not None:
            raise UnsupportedError("qk_logits: QK-clip is not available in this version of meshmuon; pass None.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = self._active()  # checks everything; nothing is written before it returns
        self._log_routes(active)
        self._executor.run(self._muon_work(active))
        with record_function("meshmuon::adamw"):
            for group, named in active:
                if not group["use_muon"]:
                    adamw_step(group, [p for _, p in named], [self.state[p] for _, p in named])
        return loss

    def routing_table(self) -> RoutingTable:
        """Where each parameter goes and how large its steps will be; ``print`` it."""
        return build_routing_table(self.param_groups)

    def workspace_bytes(self) -> int:
        """Scratch memory held between steps, beside the state."""
        return self._executor.workspace_bytes()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict``; refuses one that does not fit before anything is overwritten."""
        adapted = state_dict
        routes = [group["use_muon"] for group in self.param_groups]

        def check(_: torch.optim.Optimizer, final: dict[str, Any]) -> None:
            nonlocal adapted
            adapted = final
            state.check(self.param_groups, final)

        # The last hook, so that a user's own hooks may first turn a foreign state into one that fits.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, use_muon in zip(self.param_groups, routes, strict=True):
            group["use_muon"] = use_muon
            for key, value in self.defaults.items():  # options that the saving optimizer did not know or left open
                if group.get(key) is None:
                    group[key] = value
        state.restore(self.param_groups, self.state, adapted)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_settings": self._settings, "_debug": self._debug}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()

    def _reset(self) -> None:
        self._executor = LocalExecutor(self._settings)
        self._logged: tuple[str, ...] | None = None

    def _active(self) -> list[_Active]:
        """The parameters that have a gradient, group by group."""
        active: list[_Active] = []
        for index, group in enumerate(self.param_groups):
            check_options(group, index)
            named = []
            for name, param in zip(group["param_names"], group["params"], strict=True):
                if param.grad is not None:
                    _check_gradient(name, param, param.grad)
                    if param in self.state:
                        state.check_current(name, param, self.state[param], group["use_muon"])
                    named.append((name, param))
            active.append((group, named))
        return active

    def _muon_work(self, active: list[_Active]) -> list[Work]:
        work = []
        for group, named in active:
            if not group["use_muon"] or not named:
                continue
            scheme = resolve_scheme(group["scheme"], group["ns_steps"])
            settings = _work_settings(group)
            expert_keys = check_expert_keys(group["expert_keys"])
            for name, param in named:
                matrices = matrices_inside(name, param.shape, expert_keys=expert_keys, conv=group["conv"])
                dtype = group["compute_dtype"] or default_compute_dtype(param.device, param.dtype)
                buffer = state.momentum_buffer(self.state[param], param, group["momentum_dtype"])
                work.append(Work(param, buffer, matrices, scheme, dtype, settings))
        return work

    def _log_routes(self, active: list[_Active]) -> None:
        if not self._debug:
            return
        names = tuple(name for _, named in active for name, _ in named)
        if names != self._logged:
            self._logged = names
            _show_debug()
            for row in self.routing_table().rows:
                _logger.debug("%s%s", row, "" if row.name in names else " (no gradient)")


def _work_settings(group: Mapping[str, Any]) -> WorkSettings:
    lr = group["lr"]
    if isinstance(lr, Tensor):  # on a device it stays a tensor: reading it would wait for the device
        lr = float(lr) if lr.device.type == "cpu" else lr.reshape(())
    return WorkSettings(
        momentum=float(group["momentum"]),
        nesterov=group["nesterov"],
        decay=1 - lr * group["weight_decay"],
        rate=-lr if group["maximize"] else lr,
        adjust=partial(lr_factor, group["adjust_lr_fn"]),
        free_grad=group["none_grad"],
    )


def _check_gradient(name: str, param: Tensor, grad: Tensor) -> None:
    check_placement(name, param)
    if grad.shape != param.shape:
        raise GradientError(
            f"{name} has shape {tuple(param.shape)}, its gradient {tuple(grad.shape)}: call zero_grad() after resizing."
        )
    if grad.layout != torch.strided:
        raise GradientError(
            f"{name} has a sparse gradient ({grad.layout}). Neither Muon nor fused AdamW takes one: "
            "build the embedding with sparse=False, or call param.grad = param.grad.to_dense() before step()."
        )
    if grad.is_complex():
        raise GradientError(f"{name} has a complex gradient ({grad.dtype}). Optimize the real view: torch.view_as_real(param).")


def _show_debug() -> None:
    """debug=True shows its lines even where logging was never configured."""
    if not _logger.hasHandlers():
        _logger.addHandler(logging.StreamHandler())
    _logger.setLevel(logging.DEBUG)
