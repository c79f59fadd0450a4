"""Mutants written by hand: slips that a reader of the maths would make, all to be caught by the tests.

They are listed by module and function as pairs of a pattern and its replacement (see ``patterns.py``). The pattern must match one
place of the function, which ``test_curated.py`` checks. The function ``""`` stands for the whole module.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..patterns import PatternError, apply, places, scopes, single_place

__all__ = ["CURATED", "EQUIVALENT", "Curated", "Equivalent", "Mutants", "Mutated"]

Mutants = dict[str, dict[str, tuple[tuple[str, str], ...]]]  # module → function → (pattern, replacement)


class Mutated(NamedTuple):
    """A module with one mutant in it."""

    source: str
    line: int  # of the original
    old: str
    new: str


@dataclass(frozen=True)
class Curated:
    """One mutant: in ``function`` of ``module``, what ``pattern`` matches becomes ``replacement``."""

    module: str
    function: str
    pattern: str
    replacement: str

    @property
    def file(self) -> str:
        """The module's path from the root of the repository."""
        return f"{self.module.replace('.', '/')}.py"

    def __str__(self) -> str:
        return f"{self.module}:{self.function}: {self.pattern!r} -> {self.replacement!r}"

    def mutate(self, root: Path) -> Mutated:
        """The module of the repository at ``root`` with this mutant in it.

        Raises:
            PatternError: the mutant does not fit its module; the message says what was looked for, where, and what is there.
        """
        path = root / self.file
        if not path.is_file():
            raise PatternError(f"{self}: there is no {self.file}.{self._elsewhere(root)}")
        source = path.read_text()
        tree = ast.parse(source)
        try:
            place = single_place(tree, self.function, self.pattern, self.replacement)
        except PatternError as error:
            raise PatternError(f"{self.file}: {error}{self._elsewhere(root)}") from None
        new = apply(tree, place, self.replacement)
        mutated = ast.unparse(tree)
        added = set(re.findall(r"\w+", self.replacement)) - set(re.findall(r"\w+", self.pattern))
        if undefined := sorted(_undefined(mutated) & added):
            raise PatternError(
                f"{self}: the replacement uses names that do not exist there: {', '.join(undefined)}. "
                "The mutant would fail for the wrong reason: write the names that the function has now."
            )
        return Mutated(mutated, place.line, place.text, new)

    def _elsewhere(self, root: Path) -> str:
        matching = []
        for path in sorted((root / "meshmuon").rglob("*.py")):
            for name, node in scopes(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and any(True for _ in places(node, self.pattern, self.replacement)):
                    matching.append(f"{path.relative_to(root)}:{name}")
        return f"\nIn the whole package it matches in: {', '.join(matching) or 'nothing'}."


def _undefined(source: str) -> set[str]:
    """Names that are read somewhere in ``source`` and bound neither there nor in the module nor by Python."""
    module = symtable.symtable(source, "mutant", "exec")
    known = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    known |= {symbol.get_name() for symbol in module.get_symbols() if symbol.is_namespace()} | set(dir(builtins))
    undefined: set[str] = set()
    tables = [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        undefined |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return undefined - known


class Equivalent(NamedTuple):
    """A systematic mutation that changes nothing that a test could or should see, and why."""

    file: str
    line: str  # the line before the mutation, stripped
    reason: str
    mutation: str = ""  # only this change, "a -> b"; empty for every change of the line


def _all() -> tuple[Curated, ...]:
    from . import metrics, orthogonalisation, planning, running, step  # they need the names above

    rooms = (orthogonalisation.MUTANTS, step.MUTANTS, planning.MUTANTS, running.MUTANTS, metrics.MUTANTS)
    return tuple(
        Curated(module, function, pattern, replacement)
        for room in rooms
        for module, functions in room.items()
        for function, pairs in functions.items()
        for pattern, replacement in pairs
    )


CURATED = _all()
EQUIVALENT: tuple[Equivalent, ...] = ()
