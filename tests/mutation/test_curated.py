"""The curated mutations still fit the sources, and the systematic ones are valid Python. Running them: ``run.py``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .curated import CURATED, EQUIVALENT, Curated
from .systematic import changes, lines

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", CURATED, ids=lambda mutant: f"{Path(mutant.file).name}: {mutant.new.strip()[:40]}")
def test_curated_mutation_applies_once(mutant: Curated) -> None:
    source = (ROOT / mutant.file).read_text()
    assert source.count(mutant.old) == 1, f"{mutant.file}: {mutant.old!r} must be there once; update the list"
    assert mutant.old != mutant.new
    ast.parse(source.replace(mutant.old, mutant.new))


def test_no_curated_mutation_is_listed_twice() -> None:
    assert len(set(CURATED)) == len(CURATED)


def test_declared_equivalents_are_still_there() -> None:
    for equivalent in EQUIVALENT:
        assert equivalent.line in set(lines((ROOT / equivalent.file).read_bytes())), equivalent
        assert equivalent.reason


@pytest.mark.parametrize("path", sorted((ROOT / "meshmuon").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_systematic_mutations_are_small_and_valid(path: Path) -> None:
    source = path.read_bytes()
    found = list(changes(source))
    for change in found[:: 1 + len(found) // 20]:  # parsing takes long; twenty of each file show what is wrong with a kind
        mutated = change.apply(source)
        assert mutated != source
        ast.parse(mutated)


def test_systematic_mutations_of_a_line() -> None:
    found = {change.apply(b"x = a + 2 * f(b, -c) if n < 1.5 and True else y\n").decode()[4:-1] for change in changes(SAMPLE)}
    assert found == {
        "a - 2 * f(b, -c) if n < 1.5 and True else y",
        "a + 3 * f(b, -c) if n < 1.5 and True else y",
        "a + (1) * f(b, -c) if n < 1.5 and True else y",
        "a + 2 / f(b, -c) if n < 1.5 and True else y",
        "a + 2 * f(-c, b) if n < 1.5 and True else y",
        "a + 2 * f(b, (c)) if n < 1.5 and True else y",
        "a + 2 * f(b, -c) if n <= 1.5 and True else y",
        "a + 2 * f(b, -c) if n < 1.6500000000000001 and True else y",
        "a + 2 * f(b, -c) if n < 1.5 or True else y",
        "a + 2 * f(b, -c) if n < 1.5 and False else y",
    }


SAMPLE = b"x = a + 2 * f(b, -c) if n < 1.5 and True else y\n"
