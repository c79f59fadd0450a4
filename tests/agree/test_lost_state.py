"""Which state counts as lost where only the owner of a parameter keeps it."""

from __future__ import annotations

from meshmuon.agree.differences import ABSENT, ELSEWHERE, PRESENT, lost_by_owners


def test_only_parameters_that_are_stepped_can_have_lost_their_state() -> None:
    states = {0: ABSENT + ELSEWHERE, 1: ELSEWHERE + PRESENT}  # rank 0 owns the first parameter, rank 1 the second
    assert lost_by_owners(states, [True, True]) == {1: [0]}
    assert lost_by_owners(states, [False, True]) == {}  # idle: nothing restarts in this step


def test_nothing_is_lost_where_no_owner_has_state() -> None:
    assert lost_by_owners({0: ABSENT + ELSEWHERE, 1: ELSEWHERE + ABSENT}, [True, True]) == {}
