"""The learning-rate sweep: complete, resumable, and careful not to mix settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sweep_lr
from demo import train
from demo.progress import Progress

SIZES = "--d-model 16 --layers 1 --heads 2 --seq-len 16 --batch-size 4 --warmup-steps 1 --eval-windows 4"


def flags(source: Path, out: Path, rest: str) -> list[str]:
    data = ["--data", str(source), "--valid-fraction", "0.3", "--out", str(out), "--device", "cpu"]
    return [*SIZES.split(), *data, *rest.split()]


def test_sweep_writes_a_row_per_combination_and_continues(
    source_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sweep"
    first = "--optimizer adamw --steps 3 --lrs 0.001 0.01 --weight-decays 0 0.1"
    assert sweep_lr.main(flags(source_folder, out, first)) == 0
    rows = json.loads((out / "sweep.json").read_text())["rows"]
    assert [(row["weight_decay"], row["lr"]) for row in rows] == [
        (0, 0.001),
        (0, 0.01),
        (0.1, 0.001),
        (0.1, 0.01),
    ]
    assert len({row["valid_loss"] for row in rows}) == 4

    trained: list[str] = []
    real_train = train.Run.train

    def counting(run: train.Run, progress: Progress) -> train.RunResult:
        trained.append(run.result.name)
        return real_train(run, progress)

    monkeypatch.setattr(train.Run, "train", counting)
    more = "--optimizer muon --steps 3 --lrs 0.01 --schemes keller polar_express --seeds 1 2"
    assert sweep_lr.main(flags(source_folder, out, first)) == 0
    assert trained == []
    assert sweep_lr.main(flags(source_folder, out, more)) == 0
    assert trained == ["muon"] * 4
    table = (out / "sweep.md").read_text().splitlines()
    assert len(table) == 2 + 8 + 1 + 2 + 2  # runs, and the means over seeds
    assert sum("| meshmuon | keller | plain | 0.01 | 0.1 |" in line for line in table) == 2 + 1


def test_results_of_another_setting_are_not_mixed_in(
    source_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    sweep_lr.main(flags(source_folder, out, "--optimizer adamw --steps 2 --lrs 0.01"))
    with pytest.raises(SystemExit) as stopped:
        sweep_lr.main(flags(source_folder, out, "--optimizer adamw --steps 2 --lrs 0.01 --d-model 32"))
    assert stopped.value.code == 2
    assert "other model options" in capsys.readouterr().err
