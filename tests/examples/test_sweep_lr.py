"""The example of a training that ``meshmuon sweep`` runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sweep_lr


def test_the_example_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_lr, "STEPS", 3)
    assert sweep_lr.main(["sweep", "sweep_lr:train", "--lrs", "0.004", "--out", str(tmp_path)]) == 0
    runs = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert [(run["optimizer"], run["lr"], run["steps"]) for run in runs] == [("AdamW", 0.001, 3), ("Muon", 0.004, 3)]
    assert all(run["loss"] < run["curve"][0] for run in runs), "the validation loss, below the first of training"
    assert "Best: Muon(model, lr=0.004)" in capsys.readouterr().out
