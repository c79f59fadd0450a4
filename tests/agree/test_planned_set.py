"""Which parameters a plan covers: those with gradients join at once, those without leave after long, if it is worth
it.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmuon.agree.planned_set import IDLE_SHARE, LONG_IDLE_STEPS, NOT_PLANNED, PlannedSet

SHARED: Mapping[int, float] = dict.fromkeys(range(4), 10.0)
PRIVATE: Mapping[int, float] = {4: 1.0, 5: 1.0}


def stepped(planned: PlannedSet, *steps: set[int]) -> PlannedSet:
    for active in steps:
        planned = planned.covering(frozenset(active)).after_step(frozenset(active))
    return planned


def idle_for(steps: int, idle: set[int], everyone: set[int], flops: Mapping[int, float]) -> PlannedSet:
    return stepped(PlannedSet((flops, {})), everyone, *[everyone - idle] * steps)


def test_what_is_inside_changes_nothing() -> None:
    planned = stepped(PlannedSet((SHARED, PRIVATE)), {0, 1, 2})
    for active in (frozenset({0, 1, 2}), frozenset({1}), frozenset[int]()):
        assert planned.covering(active) is planned


@pytest.mark.parametrize("steps", [LONG_IDLE_STEPS - 1, LONG_IDLE_STEPS])
def test_what_was_idle_for_long_leaves(steps: int) -> None:
    everyone = set(SHARED)
    planned = idle_for(steps, {3}, everyone, SHARED)
    long = steps == LONG_IDLE_STEPS
    assert planned.covering(frozenset({0, 1, 2})).indices == (everyone - {3} if long else everyone)
    assert planned.covering(frozenset({0, 1, 3})).indices == everyone  # it is back just in time
    back = stepped(planned, everyone, everyone - {3})
    assert back.covering(frozenset({0})).indices == everyone  # the count begins anew
    assert back.idle_steps([3]) == (1,)


@pytest.mark.parametrize("worth", [True, False])
def test_only_a_considerable_part_of_the_work_leaves(worth: bool) -> None:
    small = 90 * IDLE_SHARE / (1 - IDLE_SHARE)  # together with 90 it is just that share
    flops = {0: 90.0, 1: small if worth else 0.99 * small}
    planned = idle_for(LONG_IDLE_STEPS + 5, {1}, {0, 1}, flops)
    assert planned.indices == ({0} if worth else {0, 1})


def test_several_small_ones_leave_together() -> None:
    """7 and 7 of 114: each is less than a tenth, both are more. The second one has to wait for long, too."""
    flops = {0: 100.0, 1: 7.0, 2: 7.0}
    planned = stepped(PlannedSet((flops, {})), {0, 1, 2}, {0, 2}, *[{0}] * (LONG_IDLE_STEPS - 1))
    assert planned.covering(frozenset({0})).indices == {0, 1, 2}
    assert stepped(planned, {0}).covering(frozenset({0})).indices == {0}


def test_what_only_this_rank_knows_is_judged_by_itself() -> None:
    """Other ranks know nothing of it: neither may it decide on shared parameters, nor they on it."""
    everyone = {*SHARED, *PRIVATE}
    for idle, left in (({4, 5}, set(SHARED)), ({4}, everyone - {4}), ({0}, everyone - {0})):
        planned = stepped(PlannedSet((SHARED, PRIVATE)), everyone, *[everyone - idle] * (LONG_IDLE_STEPS + 1))
        assert planned.indices == left
    heavy = {4: 1e6}
    planned = stepped(PlannedSet((SHARED, heavy)), {*SHARED, 4}, *[{1, 2, 3, 4}] * (LONG_IDLE_STEPS + 1))
    assert planned.indices == {1, 2, 3, 4}


def test_ranks_with_different_histories_end_with_the_same_set() -> None:
    """One has just begun, one has dropped parameter 3, one has planned everything and has 2 idle for a while."""
    begun = stepped(PlannedSet((SHARED, PRIVATE)), {0, 4})
    dropped = stepped(PlannedSet((SHARED, {})), set(SHARED), *[{0, 1, 2}] * (LONG_IDLE_STEPS + 1), {0, 1})
    full = stepped(PlannedSet((SHARED, {})), set(SHARED), *[{0, 1, 3}] * 7)
    ranks = [begun, dropped, full]
    told = [planned.idle_steps(list(SHARED)) for planned in ranks]
    assert told == [(0, -1, -1, -1), (0, 0, 1, -1), (0, 0, 7, 0)]
    merged = [planned.merged(list(SHARED), told) for planned in ranks]
    assert [planned.idle_steps(list(SHARED)) for planned in merged] == [(0, 0, 1, 0)] * 3
    assert merged[0].indices == {0, 1, 2, 3, 4}  # what only it knows stays


@settings(max_examples=60)
@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=12), st.integers(0, 11))
def test_a_merge_of_equals_changes_nothing(steps: list[set[int]], later: int) -> None:
    planned = stepped(PlannedSet((SHARED, PRIVATE)), *steps)
    told = planned.idle_steps(list(SHARED))
    merged = planned.merged(list(SHARED), [told] * 3)
    assert merged.indices is planned.indices
    more = steps[: later + 1]
    assert stepped(merged, *more).idle_steps(range(6)) == stepped(planned, *more).idle_steps(range(6))


@settings(max_examples=60)
@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=12))
def test_counts_are_those_of_the_history(steps: list[set[int]]) -> None:
    planned = stepped(PlannedSet((SHARED, PRIVATE)), *steps)
    assert planned.indices == set().union(*steps)
    for index, count in enumerate(planned.idle_steps(range(6))):
        last = max((k for k, active in enumerate(steps) if index in active), default=None)
        assert count == (NOT_PLANNED if last is None else len(steps) - 1 - last)
