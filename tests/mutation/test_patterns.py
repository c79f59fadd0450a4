"""Patterns match code by what it does, not by names and layout, and say what they saw where they do not match."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from .curated import Curated
from .patterns import PatternError, apply, places, single_place

SOURCE = dedent(
    """
    SIZE = 4

    def scale(x, *, rate: float = 0.1, flip=False):
        for item in x:
            item.mul_(rate, alpha=1.0, out=item)
            item.add_(rate)
        return x if rate > 0 and flip and x else f(x, 2)

    class Owner:
        def cost(self, size):
            def inner():
                return size - 1
            return self.weight * size + inner()
    """
)


def mutated(function: str, pattern: str, replacement: str, source: str = SOURCE) -> str:
    tree = ast.parse(source)
    apply(tree, single_place(tree, function, pattern, replacement), replacement)
    return ast.unparse(tree)


def changed(old: str, new: str) -> str:
    return ast.unparse(ast.parse(SOURCE)).replace(old, new)


@pytest.mark.parametrize(
    ("function", "pattern", "replacement", "old", "new"),
    [
        ("Owner.cost", "self.weight * $size", "self.weight", "self.weight * size", "self.weight"),
        ("Owner.cost.inner", "$size - 1", "$size", "size - 1", "size"),
        (
            "scale",
            "$item.mul_($rate, ..., alpha=$a)",
            "$item.mul_($rate, ..., alpha=2.0)",
            "alpha=1.0, out=item",
            "alpha=2.0, out=item",
        ),
        ("scale", "f(...)", "f(..., 3)", "f(x, 2)", "f(x, 2, 3)"),
        ("scale", "... and flip and ...", "... and ...", "rate > 0 and flip and x", "rate > 0 and x"),
        ("scale", "... and flip and ...", "flip and ...", "rate > 0 and flip and x", "flip and rate > 0"),
        ("scale", "$item.add_($rate)", "", "item.add_(rate)", "pass"),
        ("scale", "for $item in $x: ...", "for $item in $x[:1]: ...", "in x:", "in x[:1]:"),
        ("scale", "rate: $type = 0.1", "rate: $type = 0.2", "rate: float=0.1", "rate: float=0.2"),
        ("scale", "flip = False", "flip = True", "flip=False", "flip=True"),
        ("", "SIZE = 4", "SIZE = 5", "SIZE = 4", "SIZE = 5"),
    ],
)
def test_replacement(function: str, pattern: str, replacement: str, old: str, new: str) -> None:
    assert mutated(function, pattern, replacement) == changed(old, new) != changed("", "")


def test_renamed_locals_and_another_layout_match_as_well() -> None:
    pattern, replacement = "$item.mul_($rate, ..., alpha=$a)", "$item.mul_($rate, ..., alpha=2.0)"
    source = (
        "def scale(tensors, *, lr):\n"
        "    for tensor in tensors:\n"
        "        tensor.mul_(\n"
        "            lr, out=tensor,  # why\n"
        "            alpha=(1.0))\n"
    )
    assert "tensor.mul_(lr, alpha=2.0, out=tensor)" in mutated("scale", pattern, replacement, source)


def test_a_name_twice_is_the_same_code_twice() -> None:
    tree = ast.parse("a.b + a.b\na.b + a.c")
    assert [place.line for place in places(tree, "$x + $x", "$x")] == [1]
    assert [place.line for place in places(tree, "$x + $y", "$x")] == [1, 2]


def test_a_pattern_that_matches_one_place_in_two_ways_is_ambiguous() -> None:
    assert len(list(places(ast.parse("a and b and c"), "... and $x and ...", "$x"))) == 3


def test_numbers_match_by_type_and_value() -> None:
    assert not list(places(ast.parse("x * 1.0"), "$x * 1", "$x"))
    assert list(places(ast.parse("x * 1e-3"), "$x * 0.001", "$x"))


def test_a_pattern_that_matches_twice_lists_both_places() -> None:
    with pytest.raises(
        PatternError, match=r"matches 2 places in scale\(\), not one:\n +line 6: item.mul_.*\n +line 7: item.add_"
    ):
        single_place(ast.parse(SOURCE), "scale", "$item.$method($rate, ...)", "$item")


def test_a_pattern_that_matches_nowhere_shows_the_nearest_code() -> None:
    with pytest.raises(
        PatternError, match=r"(?s)matches nowhere in scale\(\)\.\nThe nearest code there:\n +line 7: item.add_\(rate\)"
    ):
        single_place(ast.parse(SOURCE), "scale", "$item.sub_($rate)", "$item")


def test_a_renamed_function_is_named() -> None:
    with pytest.raises(
        PatternError, match=r"(?s)there is no Owner.price\(\).*There are: scale, Owner, .*It matches in Owner.cost\(\)"
    ):
        single_place(ast.parse(SOURCE), "Owner.price", "self.weight * $size", "$size")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "meshmuon").mkdir()
    (tmp_path / "meshmuon" / "sample.py").write_text(SOURCE)
    return tmp_path


def test_a_mutant_of_a_moved_module_names_where_it_went(package: Path) -> None:
    with pytest.raises(PatternError, match=r"there is no meshmuon/old.py(?s:.*)matches in: meshmuon/sample.py:Owner.cost"):
        Curated("meshmuon.old", "Owner.cost", "self.weight * $size", "$size").mutate(package)


def test_a_replacement_with_a_renamed_local_is_refused(package: Path) -> None:
    """It would be caught by a NameError, whatever the tests look at."""
    with pytest.raises(PatternError, match="names that do not exist there: factor"):
        Curated("meshmuon.sample", "Owner.cost", "self.weight * $size", "factor * $size").mutate(package)
    assert Curated("meshmuon.sample", "Owner.cost", "self.weight * $n", "size * SIZE").mutate(package).line == 14
