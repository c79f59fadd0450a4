"""Plans by default against the fastest that a search has found: ``plans/best.json``.

``write_plans.py`` has written it; ``python -m tests.spine.write_plans --compare`` shows all rows.
"""

from __future__ import annotations

import json

import pytest

from .write_plans import FILE, report_of

BEST = json.loads(FILE.read_text())
SLOWER = 1.10
QUICK = (4, 5, 7, 8, 14, 15, 25, 27, 29, 30)  # of 32 rows, those that take no more than a second or two


@pytest.mark.parametrize(
    "number", QUICK, ids=lambda number: f"{BEST['rows'][number]['model']} {BEST['rows'][number]['mesh']}"
)
def test_plans_by_default_are_nearly_as_fast_as_the_best(number: int) -> None:
    row = BEST["rows"][number]
    report = report_of(row)
    assert report["mesh"]["ranks"] == row["ranks"]
    assert report["step"]["seconds"] <= SLOWER * row["best"]["seconds"]


def test_the_file_is_complete() -> None:
    """32 rows; the best is the fastest whose buffers are allowed; the rates of each row are there."""
    assert len({(row["model"], row["mesh"]) for row in BEST["rows"]}) == len(BEST["rows"]) == 32
    for row in BEST["rows"]:
        allowed = [seconds for seconds, buffers in row["others"].values() if buffers <= row["allowed"]]
        assert row["best"]["seconds"] == min([row["default"]["seconds"], *allowed])
        assert BEST["rates"][row["rates"]]["compute_dtype"] == "float16"
