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

_LR_RULES = (None, "original", "match_rms_adamw", "spectral_unclamped")  # the last from torch 2.14 on
_OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
_NOT_STORED = {"use_muon", "norm_floor", *(option.name for option in group_options())} - {*_OPTIONS}


class TorchMuon(Muon):
    """``torch.optim.Muon`` on any mesh: the same arguments, the same update within rounding, the same ``state_dict``.

    It takes matrices only; give embeddings, heads, norms and biases to AdamW, or all of a model to ``Muon``. Gradients
    stay, momentum is a mean, ``M ← momentum·M + (1 − momentum)·G``, and nothing warns of routes. What differs: products
    are in float32 on a CPU and in float16 on a GPU instead of bfloat16; ``momentum`` must be below 1 and ``ns_steps``
    from 1 to 64.

    Args:
        params: matrices, (name, matrix) pairs, or param groups of these.
        lr, weight_decay, momentum, nesterov, ns_steps: as for ``Muon``.
        ns_coefficients: the quintic of every step.
        eps: the smallest norm by which a matrix is divided before the steps.
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
        own = {"ns_coefficients": ns_coefficients, "eps": eps, "adjust_lr_fn": adjust_lr_fn}
        groups = [{**own, **group} for group in _as_groups(params)]
        super().__init__(groups, lr, momentum, nesterov, ns_steps, weight_decay, none_grad=False, allow_inactive=True)
        self.defaults.update(own, adjust_lr_fn=adjust_lr_fn or "original")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group of matrices. The next step plans with it."""
        params = param_group.get("params", ())
        params = [params] if isinstance(params, Tensor) else params if isinstance(params, set) else list(params)
        for tensor in (entry[-1] if isinstance(entry, tuple) else entry for entry in params):
            if isinstance(tensor, Tensor) and tensor.dim() != 2:
                raise ConfigError(
                    "TorchMuon takes matrices, as torch.optim.Muon does, not a parameter of shape "
                    f"{tuple(tensor.shape)}: give it to AdamW, or write meshmuon.Muon(model, lr=...), which does so."
                )
        own = {key: self.defaults[key] for key in _OPTIONS if key in self.defaults}
        super().add_param_group(_translated({**own, **param_group, "params": params, "use_muon": True}))

    def state_dict(self) -> dict[str, Any]:
        """What ``torch.optim.Muon.state_dict()`` returns; either class loads it."""
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            unnamed = {"param_names"} if are_placeholders(group["param_names"]) else set[str]()
            for key in group.keys() & (_NOT_STORED | unnamed):
                del group[key]
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads a ``state_dict`` of this class or of ``torch.optim.Muon``, checked as that of ``Muon``."""
        groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
        if isinstance(groups, (list, tuple)) and all(isinstance(group, Mapping) for group in groups):
            if any("ns_coefficients" not in group and group.keys() > {"params"} for group in groups):
                raise StateError(
                    "the state_dict is not from TorchMuon or torch.optim.Muon, which keep momentum as a mean of the "
                    "gradients. Load it into the class that it is from."
                )
            state_dict = {**state_dict, "param_groups": [_translated({**group, "use_muon": True}) for group in groups]}
        super().load_state_dict(state_dict, strict)

    def _inspect(self, qk_logits: Any, failure: KeptError, *, only_prepares: bool = False) -> StepContext:
        with failure:  # groups may have been changed by hand
            for group in self.param_groups:
                _translated(group)
        return super()._inspect(qk_logits, failure, only_prepares=only_prepares)

    def _warn_of_routes(self, first: int) -> None:
        """Says nothing: the user has chosen the matrices."""


def _translated(group: dict[str, Any]) -> dict[str, Any]:
    """The param group, with its options under the names of ``Muon`` as well."""
    if (coefficients := group.get("ns_coefficients", group)) is not group:
        if not isinstance(coefficients, (list, tuple)) or len(coefficients) != 3:
            raise ConfigError(f"ns_coefficients={shown(coefficients)} must be three numbers (a, b, c).")
        if (rule := group.get("adjust_lr_fn")) not in _LR_RULES:
            raise ConfigError(f"adjust_lr_fn={shown(rule)} is none of torch's: write one of {_LR_RULES}.")
        eps: Any = group.get("eps")
        check_range(eps, "eps", "TorchMuon", low=0.0)
        group |= {"adjust_lr_fn": rule or "original", "scheme": (tuple(coefficients),), "norm_floor": float(eps)}
    return group


def _as_groups(params: Any) -> list[dict[str, Any]]:
    """Bare matrices and pairs as one param group; param groups as they are."""
    if isinstance(params, (nn.Module, Tensor, Mapping)) or not isinstance(params, Iterable):
        raise ConfigError(
            f"params must be matrices, (name, matrix) pairs or groups of these, got {type(params).__name__}. "
            "TorchMuon takes what torch.optim.Muon takes; meshmuon.Muon takes a whole model."
        )
    entries = list(params)
    return entries if not entries or isinstance(entries[0], dict) else [{"params": entries}]
