"""Which state a rank has: momentum that only one rank has lost would restart there in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..agree.differences import ABSENT, ELSEWHERE, PRESENT
from ..execute import UpdateRule
from ..params.rules import resolve_rule
from ..state.adamw_state import STATE_KEYS as ADAMW_KEYS
from ..state.param_state import MEMORY, MOMENTUM
from ..torch_compat import local_part

if TYPE_CHECKING:
    from ..params.named_params import NamedParam

__all__ = ["StatePresence", "is_kept"]


def is_kept(entry: Mapping[str, Any] | None, use_muon: bool, rule: UpdateRule | None) -> bool:
    """Whether a parameter has the state that a step needs, so that none is begun with zeros."""
    if not entry:
        return False
    if not use_muon:
        return all(key in entry for key in ADAMW_KEYS)
    return MOMENTUM in entry and (rule is None or not rule.remembers() or MEMORY in entry)


@dataclass(frozen=True, slots=True)
class StatePresence:
    """The state of all parameters, for the moment in which ranks compare.

    Attributes:
        parameters: all parameters.
        states: the optimizer's state.
        here: whether this rank is one that keeps the state of a parameter.
    """

    parameters: Sequence[NamedParam]
    states: Mapping[Tensor, dict[str, Any]]
    here: Callable[[NamedParam], bool]

    def presence(self, k: int) -> str:
        """Whether the state of parameter ``k`` is here, is not but should be, or is another rank's affair."""
        one = self.parameters[k]
        if not self.here(one) or not local_part(one.param).numel():
            return ELSEWHERE
        rule = resolve_rule(one.param_group["rule"]) if one.param_group["use_muon"] else None
        return PRESENT if is_kept(self.states.get(one.param), one.param_group["use_muon"], rule) else ABSENT

    def begun(self, k: int) -> bool:
        """Whether it is more than the zeros that a first step would begin with; reads the state, and so waits for a device."""
        values = self.states.get(self.parameters[k].param, {}).values()
        return any(bool(local_part(value).count_nonzero()) for value in values if isinstance(value, Tensor))
