"""Which state a rank has: momentum that only one rank has lost would restart there in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..execute import UpdateRule, local_part
from .adamw import STATE_KEYS as ADAMW_KEYS
from .differences import ABSENT, ELSEWHERE, PRESENT
from .rules import resolve_rule
from .state import MEMORY, MOMENTUM

if TYPE_CHECKING:
    from .collect import Parameter

__all__ = ["Keeping", "is_kept"]


def is_kept(entry: Mapping[str, Any] | None, use_muon: bool, rule: UpdateRule | None) -> bool:
    """Whether a parameter has the state that a step needs, so that none is begun with zeros."""
    if not entry:
        return False
    if not use_muon:
        return all(key in entry for key in ADAMW_KEYS)
    return MOMENTUM in entry and (rule is None or not rule.remembers() or MEMORY in entry)


@dataclass(frozen=True, slots=True)
class Keeping:
    """The state of all parameters, for the moment in which ranks compare.

    Attributes:
        parameters: all parameters.
        states: the optimizer's state.
        here: whether this rank is one that keeps the state of a parameter.
    """

    parameters: Sequence[Parameter]
    states: Mapping[Tensor, dict[str, Any]]
    here: Callable[[Parameter], bool]

    def presence(self, k: int) -> str:
        """Whether the state of parameter ``k`` is here, is not but should be, or is another rank's affair."""
        one = self.parameters[k]
        if not self.here(one) or not local_part(one.param).numel():
            return ELSEWHERE
        rule = resolve_rule(one.group["rule"]) if one.group["use_muon"] else None
        return PRESENT if is_kept(self.states.get(one.param), one.group["use_muon"], rule) else ABSENT

    def begun(self, k: int) -> bool:
        """Whether it is more than the zeros that a first step would begin with; reads the state, and so waits for a device."""
        values = self.states.get(self.parameters[k].param, {}).values()
        return any(bool(local_part(value).count_nonzero()) for value in values if isinstance(value, Tensor))
