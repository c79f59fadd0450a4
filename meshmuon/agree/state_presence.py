"""Which state a rank has, and of which step. Ranks compare both.

Momentum that one rank has lost would silently restart there from zero, and replicas that count different steps would
diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..execute import rule_memories
from ..params.groups import rounds_stochastically
from ..params.param_record import ParamRecord
from ..state.param_state import ADAMW_KEYS, COUNTER, MOMENTUM
from ..torch_compat import local_part
from .differences import ABSENT, ELSEWHERE, PRESENT


def has_all_state(state: Mapping[str, Any] | None, named: ParamRecord) -> bool:
    """Whether a parameter has all state that a step needs, so that none of it would start at zero."""
    if not state or (rounds_stochastically(named.param, named.param_group) and COUNTER not in state):
        return False
    if not named.param_group["use_muon"]:
        return all(key in state for key in ADAMW_KEYS)
    return MOMENTUM in state and all(key in state for key in rule_memories(named.rules, (1, 1)))


def has_begun(state: Mapping[str, Any]) -> bool:
    """Whether the state of a parameter is more than the zeros that a first step starts with. Reading it waits for
    the device.
    """
    values = (value[1:] if key == COUNTER else value for key, value in state.items() if isinstance(value, Tensor))
    return any(bool(local_part(value).count_nonzero()) for value in values)


@dataclass(frozen=True, slots=True)
class StatePresence:
    """The state of all parameters on this rank, read only where ranks differ."""

    params: Sequence[ParamRecord]
    states: Mapping[Tensor, dict[str, Any]]  # the optimizer's ``state``
    keeps: Callable[[ParamRecord], bool]  # whether this rank is one that keeps the state of a parameter

    def presence(self, index: int) -> str:
        """PRESENT or ABSENT for a parameter whose state this rank keeps, ELSEWHERE for all others and for empty
        shards.
        """
        named = self.params[index]
        if not self.keeps(named) or not local_part(named.param).numel():
            return ELSEWHERE
        return PRESENT if has_all_state(self.states.get(named.param), named) else ABSENT

    def begun(self, index: int) -> bool:
        """Whether the state is more than the zeros that a first step starts with. Reading it waits for the device."""
        return has_begun(self.states.get(self.params[index].param, {}))

    def progress(self, indices: Sequence[int]) -> tuple[str, ...]:
        """How far each of these parameters has come: "step 3", "rounding_counter 12345/3" (key/count); "" before both.

        Reading the numbers waits for their device.
        """
        return tuple(map(self._progress, indices))

    def _progress(self, index: int) -> str:
        entry = self.states.get(self.params[index].param, {})
        numbers = {
            key: entry[key].reshape(-1).tolist() for key in ("step", COUNTER) if isinstance(entry.get(key), Tensor)
        }
        return ", ".join(
            f"{key} {'/'.join(str(int(part)) for part in parts)}" for key, parts in numbers.items() if parts[-1]
        )
