"""Parts of fused weights that take turns: what may be written, and which rows each part has."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmuon import ConfigError, Interleaved
from meshmuon.matrices import MatrixOptions, ParamMatrices, StridedRange, check_matrix_options, find_matrices


@pytest.mark.parametrize("sizes", [(), (0, 1), (1, -1), (1, 1.0), (1, True), 3, None, "ab"])
def test_sizes_are_positive_whole_numbers(sizes: Any) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"Interleaved(sizes={sizes!r}, repeats=4) must have positive whole numbers")
    ):
        Interleaved(sizes, 4)


@pytest.mark.parametrize("repeats", [0, -1, 2.0, True, None, (2,)])
def test_repeats_are_a_positive_whole_number(repeats: Any) -> None:
    with pytest.raises(ConfigError, match=r"such as Interleaved\(\(64, 64, 64\), 12\)"):
        Interleaved((2, 1), repeats)


def test_a_list_of_sizes_is_the_same_as_a_tuple() -> None:
    assert Interleaved([4, 2, 2], 3) == Interleaved((4, 2, 2), 3)  # type: ignore[arg-type]
    assert hash(Interleaved([4, 2, 2], 3)) == hash(Interleaved((4, 2, 2), 3))  # type: ignore[arg-type]
    assert Interleaved((4, 2, 2), 3).outputs == 24


def indices(part: StridedRange) -> list[int]:
    return [part.start + block * part.period + k for block in range(part.count) for k in range(part.size)]


@st.composite
def strided_ranges(draw: Any) -> StridedRange:
    start, size, count = draw(st.integers(0, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return StridedRange(start, size, count, size + draw(st.integers(1, 5))) if count > 1 else StridedRange(start, size)


@given(strided_ranges(), st.integers(-2, 60), st.integers(-2, 60))
def test_a_strided_range_between_two_indices(part: StridedRange, start: int, stop: int) -> None:
    assert part.length == len(indices(part))
    assert part.stop == indices(part)[-1] + 1
    assert part.before(start) == sum(index < start for index in indices(part))
    inside = part.between(start, max(start, stop))
    assert [index for piece in inside for index in indices(piece)] == [
        i for i in indices(part) if start <= i < max(start, stop)
    ]
    assert len(inside) <= 3
    assert all(piece.count == 1 or piece.size == part.size for piece in inside)
    assert indices(part.moved(3)) == [index + 3 for index in indices(part)]


@given(strided_ranges(), st.integers(0, 6), strided_ranges())
def test_joined_ranges_have_the_indices_of_both(part: StridedRange, gap: int, other: StridedRange) -> None:
    following = other.moved(part.stop + gap - other.start)
    joined = part.joined(following)
    assert joined is None or indices(joined) == indices(part) + indices(following)


def test_what_continues_regularly_is_joined() -> None:
    assert StridedRange(2, 3).joined(StridedRange(5, 2)) == StridedRange(2, 5)
    assert StridedRange(2, 3).joined(StridedRange(7, 3)) == StridedRange(2, 3, 2, 5)
    assert StridedRange(2, 3, 2, 5).joined(StridedRange(12, 3)) == StridedRange(2, 3, 3, 5)
    assert StridedRange(2, 3, 2, 5).joined(StridedRange(12, 3, 4, 5)) == StridedRange(2, 3, 6, 5)
    assert StridedRange(2, 3).joined(StridedRange(7, 3, 4, 5)) == StridedRange(2, 3, 5, 5)


@pytest.mark.parametrize(
    ("shape", "split", "options", "expected"),
    [
        ((14, 5), Interleaved((1, 1), 7), {}, [(7, 5, "(0, 1) every 2, 7 times"), (7, 5, "(1, 2) every 2, 7 times")]),
        (
            (12, 5),
            Interleaved((2, 1, 1), 3),
            {},
            [(6, 5, "(0, 2) every 4, 3 times"), (3, 5, "(2, 3) every 4, 3 times"), None],
        ),
        ((12, 5), Interleaved((2, 4), 2), {}, [(4, 5, "(0, 2) every 6, 2 times"), (8, 5, "(2, 6) every 6, 2 times")]),
        ((12, 5), Interleaved((5, 7), 1), {}, [(5, 5, "(0, 5)"), (7, 5, "(5, 12)")]),
        ((12, 5), Interleaved((3,), 4), {}, [(12, 5, "(0, 12)")]),
        ((12, 2, 3), Interleaved((1, 3), 3), {"conv": "flatten"}, [(3, 6, "(0, 1) every 4, 3 times"), None]),
    ],
)
def test_which_rows_each_part_has(
    shape: tuple[int, ...], split: Interleaved, options: dict[str, Any], expected: Any
) -> None:
    for way in (split, (split.sizes, split.repeats), lambda name, shape: split):
        found = find_matrices("w", shape, MatrixOptions(split=way, **options))
        shown = [(one.rows, one.cols, repr((one.window or ("",))[0])) for one in found]
        assert all(one == wanted for one, wanted in zip(shown, expected, strict=True) if wanted is not None), shown
        assert sum(one.rows for one in found) == shape[0]


def test_experts_that_are_stored_as_inputs_by_outputs() -> None:
    options = MatrixOptions(
        ("experts",), split=Interleaved((1, 1), 4), matrices={"experts": ParamMatrices(dims="in_out")}
    )
    gate, up = find_matrices("experts", (3, 5, 8), options)
    assert (gate.count, gate.rows, gate.cols, gate.lr_shape) == (3, 5, 4, (4, 5))
    assert gate.window == (StridedRange(0, 5), StridedRange(0, 1, 4, 2))
    assert up.window == (StridedRange(0, 5), StridedRange(1, 1, 4, 2))
    assert up.rule_state_window((3, 1, 16)) == (StridedRange(0, 1), StridedRange(1, 1, 4, 2))


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (
            Interleaved((1, 1), 4),
            r"w: split=Interleaved\(\(1, 1\), 4\) is for 4 times 2 outputs.*has 6 outputs. Write Interleaved\(\(1, "
            r"1\), 3\)",
        ),
        (
            Interleaved((3, 2), 1),
            r"is for 1 times 5 outputs, 5 in all, but it has 6 outputs. Give sizes that divide it into whole copies",
        ),
        (((1, 0), 3), r"Interleaved\(sizes=\(1, 0\), repeats=3\) must have positive whole numbers"),
    ],
)
def test_interleaved_parts_that_do_not_fit(split: Any, message: str) -> None:
    for way in (split, lambda name, shape: split):
        with pytest.raises(ConfigError, match=message):
            find_matrices("w", (6, 5), MatrixOptions(split=way))


def test_the_pair_that_groups_keep_is_checked_like_the_object() -> None:
    check_matrix_options(MatrixOptions(split=((1, 1), 3)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must have positive whole numbers"):
        check_matrix_options(MatrixOptions(split=((1, 1), 0)))  # type: ignore[arg-type]
