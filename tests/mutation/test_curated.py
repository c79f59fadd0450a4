"""The curated mutants still fit the sources, and the systematic ones are valid Python. Running them: ``run.py``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .curated import CURATED, EQUIVALENT, Curated
from .patterns import PatternError
from .run import NOT_SYSTEMATIC, SYSTEMATIC_FOLDERS, TESTS
from .systematic import changes, lines

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", CURATED, ids=lambda mutant: f"{mutant.module}:{mutant.function}: {mutant.replacement[:40]}")
def test_curated_mutant_changes_one_place(mutant: Curated) -> None:
    try:
        mutated = mutant.mutate(ROOT)
    except PatternError as error:
        pytest.fail(f"{error}\nUpdate tests/mutation/curated.", pytrace=False)
    before, after = ast.parse((ROOT / mutant.file).read_text()), ast.parse(mutated.source)
    assert ast.dump(before) != ast.dump(after), f"{mutant} changes nothing"


def test_no_curated_mutant_is_listed_twice() -> None:
    assert len(set(CURATED)) == len(CURATED)


def test_tests_and_folders_of_the_run_exist() -> None:
    """A test that was renamed would silently stop catching mutants."""
    named = {test for _, tests in TESTS for test in tests} | {prefix for prefix, _ in TESTS}
    missing = [path for path in sorted(named) if not (ROOT / path).exists()]
    assert not missing, f"update TESTS in tests/mutation/run.py: {missing}"
    rooms = {path.parent.name for path in (ROOT / "meshmuon").glob("*/__init__.py")}
    assert {*SYSTEMATIC_FOLDERS, *NOT_SYSTEMATIC} == rooms


def test_declared_equivalents_are_still_there() -> None:
    for equivalent in EQUIVALENT:
        assert equivalent.line in set(lines((ROOT / equivalent.file).read_bytes())), equivalent
        assert equivalent.reason


@pytest.mark.parametrize("path", sorted((ROOT / "meshmuon").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_systematic_mutations_are_small_and_valid(path: Path) -> None:
    source = path.read_bytes()
    mutations = changes(source)
    for change in mutations[
        :: 1 + len(mutations) // 20
    ]:  # parsing takes long; twenty of each file show what is wrong with a kind
        mutated = change.apply(source)
        assert mutated != source
        ast.parse(mutated)


def test_systematic_mutations_of_a_line() -> None:
    assert {change.apply(SAMPLE).decode()[4:-1] for change in changes(SAMPLE)} == {
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
