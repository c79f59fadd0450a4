"""Notices an optimizer that trains nothing: without matrices or gradients, or with parameters that the model has
replaced.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..agree.step_decision import Activity
from ..errors import ConfigError, GradientError, InactiveWarning, level_of_user
from ..matrices import without_wrappers
from ..models import CONV_ADAMW, SMALL_FILTER
from ..params.option_table import ParamGroup
from ..params.param_record import ParamRecord
from ..routing.param_groups import ModelNames

_INTENDED = "If it is intended, pass allow_inactive=True to the optimizer."
# It names no parameter: it must be the same on all ranks, and some of them may have no matrix.
_NO_GRADIENT = (
    "none of Muon's matrices has had a gradient yet, on any rank, so that this step trains none of them. Either no "
    "backward() came before it, or zero_grad() came between, or the model was wrapped or sharded after the optimizer "
    "was built and has other parameters now: build the optimizer after fully_shard."
)
_MAIN_GRAD = (
    "none of Muon's matrices has a gradient, on any rank, but there are some in main_grad: Megatron's gradient "
    "buffers, which this optimizer does not read. Where every rank has whole weights and whole gradients (no tensor "
    "parallelism, use_distributed_optimizer=False), write before step(): for p in model.parameters(): p.grad = "
    "p.main_grad.to(p.dtype) if p.requires_grad else None. Otherwise shard the model with FSDP2 "
    "(torch.distributed.fsdp.fully_shard), whose gradients are in p.grad."
)


class ActivityCheck:
    """Refuses steps that would silently train nothing, until Muon has had a gradient for the first time.

    A step calls ``replaced`` and ``of`` on its own rank, and ``judge`` once the ranks know the largest activity of all
    of them: they raise together.

    - Parameters that the model has replaced are refused at once. Only groups from ``get_default_muon_param_groups``
      know their model.
    - Steps without any gradient for Muon are otherwise allowed once, with a warning: some programs step before the
      first backward pass. The second one raises.
    """

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.active = False  # whether a matrix had a gradient, on any rank
        self._warned = False
        self._verified = False  # whether the parameters were compared with the model's in a step with gradients
        # names of a param group → the model they are from
        self._models: dict[tuple[str, ...], weakref.ref[nn.Module]] = {}

    def watch(self, names: Any) -> None:
        """Remembers the model of a new param group, if its ``names`` know it."""
        self._verified = False
        if isinstance(names, ModelNames):
            self._models[tuple(names)] = names.model

    def refuse_filters_alone(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises for default groups without a matrix for Muon if the model has filters that could be matrices."""
        reasons = [group["reasons"] for group in groups if _is_default(group)]
        filters = {
            name: why
            for written in reasons
            for name, why in written.items()
            if isinstance(why, str) and why in (CONV_ADAMW, SMALL_FILTER)
        }
        if filters and not self.allowed and not any(group["use_muon"] for group in groups):
            names, why = list(filters), "; ".join(dict.fromkeys(filters.values()))
            fix = f"Leave out {CONV_ADAMW}, or write" if CONV_ADAMW in filters.values() else "Write"
            raise ConfigError(
                f"there is no matrix for Muon: these filters of convolutions go to AdamW ({why}): "
                f"{', '.join(names[:3])}"
                + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                + f'. {fix} Muon(model, conv="flatten"), which makes each of them an (out, in·kernel) matrix; muon_for '
                "and the "
                f'factories for trainers take conv="flatten" as well. {_INTENDED}'
            )

    def of(self, groups: Sequence[ParamGroup], params: Sequence[ParamRecord], has_grad: Sequence[bool]) -> Activity:
        """The activity of this rank; ``params`` are those of the ``groups`` that are awake."""
        if self.active or self.allowed:
            return Activity.ACTIVE
        of_muon = [group for group in groups if group["use_muon"] and group["params"]]
        activity = Activity.NO_MATRIX
        for group in of_muon:
            activity = max(activity, Activity.ALL_FROZEN if _is_default(group) else Activity.FROZEN)
        for record, gradient in zip(params, has_grad, strict=True):
            if record.param_group["use_muon"] and (gradient or record.param.requires_grad):
                activity = max(activity, Activity.ACTIVE if gradient else _without_gradient(record.param))
        return activity

    def judge(self, activity: Activity) -> None:
        """Raises or warns if Muon has nothing to do on any rank; ``activity`` is the largest of all ranks."""
        if activity is Activity.ACTIVE:
            self.active = self._verified = True
        elif activity is Activity.NO_MATRIX:
            raise ConfigError(
                "there is no matrix for Muon: AdamW would step every parameter. Look at optimizer.routing_table(). "
                "If a wrapper has flattened the weights (FSDP1, DeepSpeed ZeRO), shard the model with FSDP2 instead "
                "(torch.distributed.fsdp.fully_shard); else put the matrices into a group with use_muon=True. A "
                f"pipeline stage may have none. {_INTENDED}"
            )
        elif activity is Activity.MAIN_GRAD:
            raise GradientError(f"{_MAIN_GRAD} {_INTENDED}")
        elif activity is Activity.ALL_FROZEN:
            raise ConfigError(
                "there is no matrix for Muon: all that the default param groups have found are frozen "
                "(requires_grad=False), and AdamW would step everything else. optimizer.routing_table() lists them. "
                "Unfreeze some, or train the rest with torch.optim.AdamW. If they are unfrozen later, as in gradual "
                "unfreezing, pass allow_inactive=True to the optimizer."
            )
        elif activity is Activity.NO_GRADIENT and self._warned:
            raise GradientError(f"{_NO_GRADIENT} {_INTENDED}")
        elif activity is Activity.NO_GRADIENT:
            self._warned = True
            warnings.warn(
                f"{_NO_GRADIENT} The next such step raises. {_INTENDED}", InactiveWarning, stacklevel=level_of_user()
            )

    def replaced(self, params: Sequence[ParamRecord], has_grad: Sequence[bool]) -> GradientError | None:
        """The error for parameters without gradients that the model has replaced by others, which have gradients."""
        if self.allowed or not self._models or all(has_grad) or (self._verified and any(has_grad)):
            return None
        own = {id(record.param) for record in params}
        current: dict[int, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}  # param group → what its model has now
        for record, gradient in zip(params, has_grad, strict=True):
            if gradient or not record.param.requires_grad:
                continue
            if record.group_index not in current:
                reference = self._models.get(tuple(record.param_group["param_names"]))
                current[record.group_index] = _params_of(None if reference is None else reference())
            by_name, by_plain_name = current[record.group_index]
            now = by_name.get(record.name, by_plain_name.get(without_wrappers(record.name)))
            if now is not None and id(now) not in own and now.grad is not None:
                return GradientError(
                    f"{record.name}: the model has replaced this parameter since the optimizer was built. The model's "
                    "new one has a gradient, the optimizer's has none and would never be trained. Build the optimizer "
                    "after fully_shard, or whatever else replaces parameters, or put the new ones into "
                    "optimizer.param_groups."
                )
        return None


def _without_gradient(param: Tensor) -> Activity:
    return Activity.NO_GRADIENT if getattr(param, "main_grad", None) is None else Activity.MAIN_GRAD


def _is_default(group: Mapping[str, Any]) -> bool:
    """Whether ``get_default_muon_param_groups`` has made the param group."""
    return isinstance(group.get("reasons"), Mapping)


def _params_of(model: nn.Module | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters that a model has now, tied ones by each of their names; none if the model is gone.

    Second, by their names without what wrappers insert, where only one parameter has such a name.
    """
    by_name = {} if model is None else dict[str, Tensor](model.named_parameters(remove_duplicate=False))
    count = Counter(map(without_wrappers, by_name))
    return by_name, {plain: param for name, param in by_name.items() if count[plain := without_wrappers(name)] == 1}
