"""The checker bites: without any one synchronisation of the package it reports something, and docs/gpu.md says what."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.happens_before.removals import SCENARIOS, Removal, all_removals, reported, without
from tests.support.happens_before.runs import Outcome, run_program

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
REMOVALS = all_removals()


@cache
def usual(name: str) -> Outcome:
    outcome = run_program(SCENARIOS[name])
    assert not outcome.errors
    return outcome


def documented() -> dict[tuple[str, str], str]:
    """What the table of the page says about each removal: site and source → what is reported."""
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| ([a-z ]+) \|$", PAGE.read_text(), re.MULTILINE)
    return {(site, what): kind for site, what, kind in rows}


def test_the_table_names_every_synchronisation_of_the_package() -> None:
    assert sorted(documented()) == sorted((removal.site, removal.what) for removal in REMOVALS)


@pytest.mark.parametrize("removal", REMOVALS, ids=str)
def test_a_missing_synchronisation_is_reported(removal: Removal) -> None:
    kinds = []
    for name, program in SCENARIOS.items():
        before = usual(name)
        with without(removal):
            kind = reported(program, before)
        if kind:
            kinds.append(kind)
            break
    assert kinds, f"nothing is reported without {removal}: it is redundant and should go, or a scenario is missing"
    assert kinds[0] == documented().get((removal.site, removal.what))


def test_a_removal_is_undone() -> None:
    removal = next(removal for removal in REMOVALS if removal.file == "execute/executor.py")
    with without(removal):
        assert run_program(SCENARIOS["waves"]).errors
    assert not run_program(SCENARIOS["waves"]).errors
