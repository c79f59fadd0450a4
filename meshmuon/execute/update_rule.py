"""What an update rule is to the executor: ``UpdateRule``, and what it remembers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from ..ortho import Orthogonalizer, Scheme


class UpdateRule(Protocol):
    """Changes matrices before and after they are orthogonalised. Users may write their own.

    A rule is an option of a param group, the same on every rank. Who calls it:

    1. ``remembers``: the optimizer, on every rank, while it checks parameters and creates state, at any step. It must
       always return the same. A rule that remembers may have two attributes. ``memory_name`` is the key of its numbers
       in the state of a parameter, ``"rule_memory_"`` and the name of its class unless given. ``axis`` says what has
       one number each: ``"rows"`` (outputs, unless given), ``"columns"`` (inputs), or ``"longer"``: whichever are more,
       the rows if there are as many.
    2. ``before``: the executor, at every step, once per batch, before the batch is orthogonalised.
    3. ``after``: the executor, in the same step, once the whole batch is orthogonalised.

    ``before`` and ``after`` are called only where the matrices are whole: at their owner or, for a matrix that is not
    exchanged, on every rank that holds it. They change their arguments in place, must treat each matrix independently
    of the others in the batch, and must not communicate. Batches are (batch, outputs, inputs). The matrices of a batch,
    and their number, may change from run to run; with ``deterministic=True`` it has one.

    Rules are compared and hashed to decide which parameters may share a batch; equal rules must do the same. Ranks
    compare the ``repr`` of their rules, which must therefore be the same on every rank and must not contain an address.
    """

    def remembers(self) -> bool:
        """Whether the rule keeps a number per row between steps. They start at zero and are part of the optimizer's
        state.
        """
        ...

    def before(self, momentum: Tensor) -> None:
        """Changes ``momentum``, (batch, outputs, inputs), before it is orthogonalised."""
        ...

    def after(self, update: Tensor, memory: Tensor | None) -> None:
        """Changes the orthogonalised ``update``, (batch, outputs, inputs).

        ``memory``, (batch, outputs, 1), is what the rule left there at the step before; None unless the rule
        ``remembers``. With a number per column it is (batch, 1, inputs).
        """
        ...


RULE_STATE = "rule_memory"
"""How the keys of rule state begin."""


def rule_memories(rules: Iterable[UpdateRule], lr_shape: tuple[int, int]) -> dict[str, bool]:
    """Of those rules that remember, in their order, the key in the state, and whether they keep a number per input.

    ``lr_shape`` is (outputs, inputs) of a matrix.
    """
    axes = {"rows": False, "columns": True, "longer": lr_shape[1] > lr_shape[0]}
    remembering = [rule for rule in rules if rule.remembers()]
    names = [getattr(rule, "memory_name", f"{RULE_STATE}_{type(rule).__name__}") for rule in remembering]
    return {name: axes[getattr(rule, "axis", "rows")] for name, rule in zip(names, remembering, strict=True)}


def may_fail(scheme: Scheme | Orthogonalizer | None, rules: Iterable[UpdateRule]) -> bool:
    """Whether a scheme or a rule is code of the user."""
    own = __name__.partition(".")[0]
    return not isinstance(scheme, Scheme) or any(type(rule).__module__.partition(".")[0] != own for rule in rules)
