"""TorchMuon: the arguments, the update and the state of ``torch.optim.Muon``, on any mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import ConfigError, KeptError, StateError, shown
from ..params.checks import check_range
from ..params.groups import are_placeholders
from ..params.option_table import group_options
from .muon import Muon
from .muon_step import StepContext

_OWN = ("ns_coefficients", "eps")  # options that Muon has under other names
_OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr_fn", *_OWN)
_NOT_STORED = {option.name for option in group_options()} - {*_OPTIONS} | {"use_muon", "norm_floor"}


class TorchMuon(Muon):
    """``torch.optim.Muon`` on any mesh: the same arguments, the same update within rounding, the same ``state_dict``.

    It takes matrices only; give embeddings, heads, norms and biases to AdamW, or all of a model to ``Muon``. Each matrix is
    orthogonalised as a whole, however it is sharded. Gradients stay, momentum is the mean ``M ← momentum·M + (1 − momentum)·G``,
    and there are no warnings about routes.

    What differs: products are in float32 on a CPU and in float16 on a GPU instead of bfloat16; ``momentum`` must be below 1 and
    ``ns_steps`` from 1 to 64; state is created for all parameters that train.

    Args:
        params: matrices, (name, matrix) pairs, or param groups of these.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        momentum: momentum.
        nesterov: whether momentum looks ahead.
        ns_coefficients: the quintic of every step of Newton–Schulz.
        eps: the smallest norm by which a matrix is divided before it.
        ns_steps: number of these steps.
        adjust_lr_fn: ``"original"``, which None stands for, or ``"match_rms_adamw"``.

    Example::

        optimizer = TorchMuon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    """

    _keeps_means = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        own = {"ns_coefficients": ns_coefficients, "eps": eps}
        adjusted: Any = _translated({**own, "adjust_lr_fn": adjust_lr_fn})["adjust_lr_fn"]
        numbers = lr, momentum, nesterov, ns_steps, weight_decay
        groups = [{**own, **group} if isinstance(group, dict) else group for group in _as_groups(params)]
        super().__init__(groups, *numbers, adjust_lr_fn=adjusted, none_grad=False, allow_inactive=True)
        self.defaults.update(own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group of matrices. The next step plans with it."""
        if isinstance(param_group, dict):
            own = {key: self.defaults[key] for key in _OWN if key in self.defaults}
            param_group = _translated({**own, **param_group, "use_muon": True})
            params = param_group.get("params", ())
            if isinstance(params, Iterable) and not isinstance(params, (Tensor, set)):
                param_group["params"] = params = list(params)
            for param in [params] if isinstance(params, Tensor) else params:
                tensor = param[-1] if isinstance(param, tuple) else param
                if isinstance(tensor, Tensor) and tensor.dim() != 2:
                    raise ConfigError(
                        f"TorchMuon takes matrices, as torch.optim.Muon does, not a parameter of shape {tuple(tensor.shape)}: "
                        "give it to AdamW, or write meshmuon.Muon(model, lr=...), which does so."
                    )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """What ``torch.optim.Muon.state_dict()`` returns; either class loads it."""
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            for key in _NOT_STORED & group.keys():
                del group[key]
            if are_placeholders(group["param_names"]):
                del group["param_names"]
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads a ``state_dict`` of this class or of ``torch.optim.Muon``, checked as that of ``Muon``."""
        groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
        if isinstance(groups, (list, tuple)) and all(isinstance(group, Mapping) for group in groups):
            for index, group in enumerate(groups):
                if "ns_coefficients" not in group and group.keys() > {"params"}:
                    raise StateError(
                        f"group {index} of the state_dict is not from TorchMuon or torch.optim.Muon, which keep momentum as a "
                        "mean of the gradients. Load it into the class that it is from."
                    )
            translated = [_translated({**group, "use_muon": True}) for group in groups]
            state_dict = {**state_dict, "param_groups": translated}
        super().load_state_dict(state_dict, strict)

    def _inspect(self, qk_logits: Any, failure: KeptError) -> StepContext:
        with failure:  # groups may have been changed by hand
            for group in self.param_groups:
                group.update(_translated(group))
        return super()._inspect(qk_logits, failure)

    def _warn_of_routes(self, first: int) -> None:
        """Says nothing: the user has chosen the matrices."""


def _translated(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group with its options under the names of ``Muon`` as well."""
    group = dict(group)
    if "adjust_lr_fn" in group:
        rule = group["adjust_lr_fn"]
        if rule not in (None, "original", "match_rms_adamw", "spectral_unclamped"):  # the last from torch 2.14 on
            raise ConfigError(f'adjust_lr_fn={shown(rule)} is none of torch\'s: write "original", "match_rms_adamw" or None.')
        group["adjust_lr_fn"] = rule or "original"
    if "ns_coefficients" in group:
        coefficients = group["ns_coefficients"]
        if not isinstance(coefficients, (list, tuple)) or len(coefficients) != 3:
            raise ConfigError(f"ns_coefficients={shown(coefficients)} must be three numbers (a, b, c).")
        group["scheme"] = (tuple(coefficients),)
    if "eps" in group:
        check_range(group["eps"], "eps", "TorchMuon", low=0.0)
        group["norm_floor"] = float(group["eps"])
    return group


def _as_groups(params: Any) -> Iterable[Any]:
    """Bare matrices and pairs as one param group; param groups as they are."""
    if isinstance(params, (nn.Module, Tensor, Mapping)) or not isinstance(params, Iterable):
        raise ConfigError(
            f"params must be matrices, (name, matrix) pairs or groups of these, got {type(params).__name__}. TorchMuon takes "
            "what torch.optim.Muon takes; meshmuon.Muon takes a whole model."
        )
    entries = list(params)
    return entries if not entries or isinstance(entries[0], dict) else [{"params": entries}]
