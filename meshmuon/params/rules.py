"""Update rules: what a step does to matrices beside orthogonalising them.

A rule is a small object. The owner of a matrix calls it with the whole matrix, so its result does not depend on the
layout. To write a rule of your own, implement the three methods of ``UpdateRule``::

    @dataclass(frozen=True)
    class Halved:
        def remembers(self) -> bool:
            return False

        def before(self, momentum: Tensor) -> None: ...

        def after(self, update: Tensor, memory: Tensor | None) -> None:
            update.mul_(0.5)

    optimizer = Muon(groups, rule=Halved())

A list of rules is applied in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, cast

import torch
from torch import Tensor

from ..dropped import NAMES
from ..errors import ConfigError, shown
from ..execute import RULE_STATE, rule_memories
from ..execute import UpdateRule as UpdateRule  # users import both from here, beside the rules
from .checks import check_range, refuse_dropped

RuleName: TypeAlias = Literal["plain", "normuon", "muon_plus", "muoneq"]
RuleLike: TypeAlias = RuleName | UpdateRule | Sequence[RuleName | UpdateRule]
"""A rule by name or as an object, or several of these in the order in which they are applied."""

_METHODS = ("remembers", "before", "after")
_AXES = ("rows", "columns", "longer")


def _check_axis(rule: object) -> None:
    if (axis := getattr(rule, "axis", "rows")) not in _AXES:
        raise ConfigError(f"{type(rule).__name__}: axis={shown(axis)} must be one of {', '.join(map(repr, _AXES))}.")


class _Rule:
    """A rule that remembers and does nothing."""

    __slots__ = ()

    def remembers(self) -> bool:
        """It remembers nothing."""
        return False

    def before(self, momentum: Tensor) -> None:
        """Does nothing."""

    def after(self, update: Tensor, memory: Tensor | None) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True)
class NorMuon(_Rule):
    """Divides each output (row) of the update O by the root of a running mean of its squares, and keeps the norm of O.

    v ← β₂·v + (1 − β₂)·mean of O² over the inputs; the update is O/√v, rescaled to the Frobenius norm of O. For
    matrices of (batch, outputs, inputs), v is (batch, outputs, 1). With ``axis="columns"`` it does so for each input,
    (batch, 1, inputs), with ``axis="longer"`` for outputs or inputs, whichever are more.
    """

    beta2: float = 0.95
    axis: Literal["rows", "columns", "longer"] = "rows"
    memory_name: ClassVar[str] = RULE_STATE

    def __post_init__(self) -> None:
        check_range(self.beta2, "beta2", "NorMuon", low=0.0, below=1.0)
        _check_axis(self)

    def remembers(self) -> bool:
        """It remembers the running mean."""
        return True

    def after(self, update: Tensor, memory: Tensor | None) -> None:
        """Divides and rescales."""
        assert memory is not None
        outputs, inputs = update.shape[-2:]
        (per_input,) = rule_memories([self], (outputs, inputs)).values()
        along, across = (-2, -1) if per_input else (-1, -2)
        squares = torch.linalg.vector_norm(update, dim=along, keepdim=True).square().div_(max(1, update.size(along)))
        memory.mul_(self.beta2).add_(squares * (1 - self.beta2))
        root = memory.sqrt()
        root.masked_fill_(root == 0, 1.0)  # an output whose updates were all zero
        # The norms before and after follow from the means alone, since every row has equally many inputs.
        before, after = (means.sum(across, keepdim=True).sqrt() for means in (squares, squares / root.square()))
        after.masked_fill_(after == 0, 1.0)
        update.mul_(before / after / root)


@dataclass(frozen=True, slots=True)
class MuonPlus(_Rule):
    """Sets the Frobenius norm of every update to that of an orthogonal matrix, √min(outputs, inputs)."""

    def after(self, update: Tensor, memory: Tensor | None) -> None:
        """Rescales."""
        norm = torch.linalg.vector_norm(update, dim=-1, keepdim=True).square().sum(-2, keepdim=True).sqrt()
        norm.masked_fill_(norm == 0, 1.0)  # a matrix of zeros stays zero
        update.mul_(min(update.size(-2), update.size(-1)) ** 0.5 / norm)


@dataclass(frozen=True, slots=True)
class MuonEq(_Rule):
    """Gives all outputs (rows) of the momentum the same norm before it is orthogonalised."""

    def before(self, momentum: Tensor) -> None:
        """Divides each output by its largest element and then by its norm.

        Without the first division, squares of tiny or huge elements would underflow or overflow.
        """
        if not momentum.size(-1):
            return
        largest = torch.maximum(momentum.amax(-1, keepdim=True), -momentum.amin(-1, keepdim=True))
        momentum.div_(largest.masked_fill_(largest == 0, 1.0))
        norm = torch.linalg.vector_norm(momentum, dim=-1, keepdim=True)
        momentum.div_(norm.masked_fill_(norm == 0, 1.0))


_BY_NAME: dict[str, UpdateRule] = {
    "plain": _Rule(),
    "normuon": NorMuon(),
    "muon_plus": MuonPlus(),
    "muoneq": MuonEq(),
}


def check_rule(rule: object) -> None:
    """Refuses anything but the name of a rule, an object with its methods, or a list of these."""
    if (chain := chain_of(rule)) is not None:
        _check_chain(chain)
        return
    if isinstance(rule, str):
        refuse_dropped("rule", rule, "Muon")
        if rule not in _BY_NAME:
            raise ConfigError(
                f"rule={shown(rule)} is unknown; write one of {', '.join(map(repr, _BY_NAME))}, or an object."
            )
        return
    missing = [name for name in _METHODS if not callable(getattr(rule, name, None))]
    if missing or isinstance(rule, type):
        raise ConfigError(
            f"rule={shown(rule)} must be one of {', '.join(map(repr, _BY_NAME))}, or an object with the methods "
            f"{', '.join(_METHODS)} (see meshmuon.UpdateRule)."
        )

    try:
        hash(rule)
    except TypeError:
        raise ConfigError(
            f"rule={shown(rule)} cannot be hashed, by which parameters that share a rule are found: make it a frozen "
            "dataclass."
        ) from None
    if hasattr(rule, "scale"):
        raise ConfigError(f"rule={shown(rule)}: scale() is gone: {NAMES['WeightNumbers']}.")
    _check_axis(rule)
    if not str(getattr(rule, "memory_name", RULE_STATE)).startswith(RULE_STATE):
        raise ConfigError(
            f'rule={shown(rule)}: its memory_name must begin with "{RULE_STATE}", by which rule state is found.'
        )


def chain_of(rule: object) -> tuple[Any, ...] | None:
    """The rules of a list; None for a single rule, which may be a tuple with methods."""
    return tuple(rule) if isinstance(rule, (list, tuple)) and not hasattr(rule, "remembers") else None


def _check_chain(rules: Sequence[Any]) -> None:
    for rule in rules:
        if chain_of(rule) is not None or (isinstance(rule, str) and rule == "plain"):
            raise ConfigError(f'rule={shown(rules)}: a list holds rules other than "plain", and no lists.')
        check_rule(rule)
    if not rules:
        raise ConfigError('rule=[] names no rule: write rule="plain".')
    keys = [key for rule in rules for key in rule_memories(resolve_rules(rule), (1, 1))]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(
            f"rule={shown(rules)}: two rules would keep their numbers under the key {twice[0]!r} of the state. Leave "
            "one out, or make one a subclass with another memory_name."
        )


def resolve_rules(rule: RuleLike) -> tuple[UpdateRule, ...]:
    """The rules as objects, in their order; none for ``"plain"``."""
    check_rule(rule)
    if (chain := chain_of(rule)) is not None:
        return tuple(member for each in chain for member in resolve_rules(each))
    if isinstance(rule, str):
        return () if rule == "plain" else (_BY_NAME[rule],)
    return (cast(UpdateRule, rule),)
