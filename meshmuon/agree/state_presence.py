"""Which state a rank has. Ranks compare it, since momentum that one rank has lost would silently restart there from zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..execute import UpdateRule
from ..params.groups import rounds_stochastically
from ..params.rules import resolve_rule
from ..state.param_state import ADAMW_KEYS, COUNTER, MOMENTUM, RULE_STATE
from ..torch_compat import local_part
from .differences import ABSENT, ELSEWHERE, PRESENT

if TYPE_CHECKING:
    from ..params.named_params import NamedParam


def has_all_state(state: Mapping[str, Any] | None, named: NamedParam, rule: UpdateRule | None) -> bool:
    """Whether a parameter has all state that a step needs, so that none of it would start at zero."""
    if not state or (rounds_stochastically(named.param, named.param_group) and COUNTER not in state):
        return False
    if not named.param_group["use_muon"]:
        return all(key in state for key in ADAMW_KEYS)
    return MOMENTUM in state and (rule is None or not rule.remembers() or RULE_STATE in state)


@dataclass(frozen=True, slots=True)
class StatePresence:
    """The state of all parameters on this rank, read only where ranks differ."""

    params: Sequence[NamedParam]
    states: Mapping[Tensor, dict[str, Any]]  # the optimizer's ``state``
    keeps: Callable[[NamedParam], bool]  # whether this rank is one that keeps the state of a parameter

    def presence(self, index: int) -> str:
        """PRESENT or ABSENT for a parameter whose state this rank keeps, ELSEWHERE for all others and for empty shards."""
        named = self.params[index]
        if not self.keeps(named) or not local_part(named.param).numel():
            return ELSEWHERE
        rule = resolve_rule(named.param_group["rule"]) if named.param_group["use_muon"] else None
        return PRESENT if has_all_state(self.states.get(named.param), named, rule) else ABSENT

    def begun(self, index: int) -> bool:
        """Whether the state is more than the zeros that a first step starts with. Reading it waits for the device."""
        entries = self.states.get(self.params[index].param, {}).items()
        values = (value[1:] if key == COUNTER else value for key, value in entries if isinstance(value, Tensor))
        return any(bool(local_part(value).count_nonzero()) for value in values)
