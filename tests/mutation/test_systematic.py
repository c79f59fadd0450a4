"""The mutants are valid Python and what they say they are. Running them: ``run.py``."""

from __future__ import annotations

import ast
import random

from .run import FURTHER_TESTS, ROOT, chosen_tests, core_mutants
from .systematic import changes


def test_drawn_mutants_are_valid_and_have_tests() -> None:
    for mutant in random.Random(0).sample(core_mutants(), 60):
        mutated = mutant.change.apply(mutant.source)
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(mutant.source)), mutant
        assert chosen_tests(mutant.file), mutant


def test_named_tests_exist() -> None:
    """A folder that was renamed would silently stop catching mutants."""
    named = {name for names in FURTHER_TESTS.values() for name in names}
    assert not [name for name in named if not (ROOT / "tests" / name).exists()]


def test_mutations_of_a_line() -> None:
    source = b"x = a + 2 * f(b, -c) if n < 1.5 and True else y\n"
    assert {change.apply(source).decode()[4:-1] for change in changes(source)} == {
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
        "a + 2 * f(b, -c) if (not (n < 1.5 and True)) else y",
    }


def test_numbers_for_the_operating_system_are_left_alone() -> None:
    assert changes(b"ASK = 0x8915\n") == []


def test_mutations_of_statements() -> None:
    source = b"if a:\n    f()\n    b += c\n    d = [e for e in g if e]\n"
    assert {change.apply(source).decode() for change in changes(source)} == {
        source.decode().replace("if a", "if (not (a))"),
        source.decode().replace("f()", "pass"),
        source.decode().replace("b += c", "pass"),
        source.decode().replace("if e]", "if True]"),
    }
