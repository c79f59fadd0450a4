"""What is declared of an option: the columns of the table in ``option_table.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .checks import Check

__all__ = ["Compared", "Option", "Scope", "Stored"]


class Scope(Enum):
    """Where an option may be given, and which param groups use it."""

    ALL_GROUPS = "all groups"
    MUON_GROUPS = "Muon groups"
    ADAMW_GROUPS = "AdamW groups"
    OPTIMIZER = "optimizer"


class Compared(Enum):
    """How ranks find out that they were given different values."""

    NEVER = "ranks may differ in it"
    IN_PLAN = "it shapes the plan, whose digest ranks compare"
    BY_VALUE = "ranks compare its value at every step"


class Stored(Enum):
    """How a checkpoint holds an option of a param group. Options of the optimizer are not stored."""

    PLAIN = "numbers, strings and tuples as they are; of a function or an object only the name"
    DTYPE_NAME = "the name of the dtype"


@dataclass(frozen=True)
class Option:
    """A row of the table.

    Attributes:
        name: keyword of the constructor, and for options of param groups also the key in a group.
        default: its value if not given.
        scope: where it may be given.
        check: refuses wrong values, at every step for options of param groups; None if it is checked with another option, or by
            the object that is built from it.
        help: what it does, for ``help(Muon)`` and docs/optimizer.md.
        compared: how ranks compare it.
        stored: how a checkpoint holds it.
        kept_as: turns an accepted value into the form that groups and defaults keep: one that can be compared and stored.
        defines_matrices: it decides which matrices there are and what is remembered of them, so that loading a checkpoint with
            another value warns.
        aliases: other names. For an optimizer-wide option, an older keyword of the constructor; for an option of param groups,
            torch's own key in a group.
    """

    name: str
    default: Any
    scope: Scope
    check: Check | None
    help: str
    compared: Compared = Compared.NEVER
    stored: Stored = Stored.PLAIN
    kept_as: Callable[[Any], Any] = lambda value: value
    defines_matrices: bool = False
    aliases: tuple[str, ...] = ()
