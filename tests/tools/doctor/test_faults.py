"""Ranks with faults, as real processes: each fault ends in the right ✘ or figure, on every rank with exit code 1,
and soon.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from meshmuon.tools.doctor import DoctorOptions
from tests.support.processes import RankOutcome, results_of, run_ranks

from .faults import DELAY, TICK, Ended, doctor_rank

LIMIT = 200.0  # seconds of a check: nobody waits for it
EXCHANGES = DoctorOptions(only=("pairs", "ragged", "distmuon"), limit=LIMIT)


def run(world: int, folder: Path, faults: dict[int, str], options: DoctorOptions, *more: Any) -> list[RankOutcome]:
    return run_ranks(world, doctor_rank, folder, faults, options, *more)


def ended(outcomes: list[RankOutcome]) -> list[Ended]:
    return results_of(outcomes)


def test_a_broken_kernel(tmp_path: Path) -> None:
    """One rank alone has it: the report names the product and the rank, and the checks that do not need it pass."""
    options = DoctorOptions(only=("products", "orthogonalisation", "pairs"))
    first, second = ended(run(2, tmp_path, {1: "broken_kernel"}, options))
    assert (first.code, second.code) == (1, 1)
    assert first.status("products") == first.status("orthogonalisation") == "failed"
    assert first.detail("products").startswith(
        "rank 1: the symmetric product of 2×33×47 in float32 differs from torch by"
    )
    assert "a kernel gives wrong results" in first.check("products")["advice"]
    assert "rank 0" not in first.detail("products")
    assert first.status("pairs") == "passed"
    assert "✘ products" in first.text
    assert "What to do: Do not train" in first.text
    assert second.text == ""


def test_a_wrong_exchange(tmp_path: Path) -> None:
    """Wrong data does not stop the doctor: every check that sees it says so."""
    first, *others = ended(run(3, tmp_path, {2: "wrong_exchange"}, EXCHANGES))
    assert [first.code, *(other.code for other in others)] == [1, 1, 1]
    assert first.detail("pairs").startswith("rank 2: from rank ")
    assert "instead of [" in first.detail("pairs")
    assert re.match(r"rank 2: exchange \d: 1 of \d+ elements from rank [01] are wrong", first.detail("ragged"))
    assert first.status("distmuon") == "failed"
    assert "rank 0:" not in first.detail("ragged")
    assert "rank 1:" not in first.detail("ragged")


def test_a_dead_rank(tmp_path: Path) -> None:
    """The others hear of it from the connection; the report says who is missing, and what was not run."""
    outcomes = run(3, tmp_path, {1: "dies_in_an_exchange"}, EXCHANGES)
    assert outcomes[1].trouble == "killed"
    first, last = ended([outcomes[0], outcomes[2]])
    assert (first.code, last.code) == (1, 1)
    assert first.status("pairs") == "passed"
    assert first.status("ragged") == "failed"
    assert "rank 1: no sign of life" in first.detail("ragged")
    assert "ranks lost each other in the exchange" in first.detail("ragged")
    assert first.status("distmuon") == "not run"
    assert not first.report["passed"]


def test_rank_0_is_dead(tmp_path: Path) -> None:
    """Nobody reports then: each of the others says what it knows."""
    faults = {0: "dies_in_an_exchange", 1: "misses_rank_0", 2: "misses_rank_0"}
    outcomes = run(3, tmp_path, faults, EXCHANGES)
    assert outcomes[0].trouble == "killed"
    for rank, survivor in zip((1, 2), ended(outcomes[1:]), strict=True):
        assert survivor.code == 1
        assert f"meshmuon doctor, rank {rank}: rank 0 gives no sign of life" in survivor.errors


def test_a_stalled_rank(tmp_path: Path) -> None:
    """The others time out; the report names the phase and the function that the stalled rank is in, and all
    processes end.
    """
    faults = {0: "misses_a_rank_in_a_step", 1: "stalls_in_a_step"}
    options = DoctorOptions(only=("distmuon", "stress"), limit=LIMIT)
    first, stalled = ended(run(2, tmp_path, faults, options))
    assert (first.code, stalled.code) == (1, 1)
    assert first.status("distmuon") == "failed"
    assert "rank 1: still in step 1 of 3, in " in first.detail("distmuon")
    assert "ranks lost each other in the" in first.detail("distmuon")
    assert "✘ distmuon" in first.text
    assert "--only distmuon, and with a larger --limit" in first.check("distmuon")["advice"]
    assert first.status("stress") == "not run"


def test_an_error_on_one_rank(tmp_path: Path) -> None:
    """The others wait for it in vain; they are given up long before the limit."""
    options = DoctorOptions(only=("ragged", "distmuon"), limit=LIMIT)
    first, second = ended(run(2, tmp_path, {1: "raises_in_a_step"}, options))
    assert (first.code, second.code) == (1, 1)
    assert "rank 1: ragged exchange 1 of 6 in torch.float32: ZeroDivisionError: out of luck" in first.detail("ragged")
    assert "rank 0: still in ragged exchange 1 of 6" in first.detail("ragged")
    assert "took longer than its limit" not in first.detail("ragged")
    assert first.status("distmuon") == "not run"


def test_a_slow_link(tmp_path: Path) -> None:
    """It is measured and named, inside and between nodes that the test pretends."""
    faults = {0: "quick links", 1: "slow link to 2", 2: "slow link to 1", 3: "quick links"}
    options, nodes = DoctorOptions(only=("links",), quick=True), ("a", "a", "b", "b")
    first = ended(run(4, tmp_path, faults, options, nodes))[0]
    assert first.code == 0
    figures = first.check("links")["figures"]
    assert figures["slowest_pair"]["ranks"] == [1, 2]
    assert figures["slowest_pair"]["bytes_per_second"] == pytest.approx(4 * 2**20 / (DELAY + TICK))
    assert figures["pairs_measured"] == 6
    assert figures["inside"]["bytes_per_second"] == pytest.approx(4 * 2**20 / TICK)
    assert "slowest pair 1-2" in first.detail("links")
    assert first.detail("links").startswith("inside a node ")
    assert "between nodes" in first.detail("links")
