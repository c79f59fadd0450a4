"""The figure of README.md is drawn from recorded data."""

from __future__ import annotations

import json
from pathlib import Path

import plot_losses

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_losses_of_a_run_are_drawn(tmp_path: Path) -> None:
    plot_losses.draw(DOCS / "loss.json", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_recorded_run_is_one_of_both_optimizers() -> None:
    runs = json.loads((DOCS / "loss.json").read_text())["runs"]
    assert sorted(runs) == ["adamw", "muon"]
    assert len({tuple(point["step"] for point in run["evals"]) for run in runs.values()}) == 1
