"""Writers: what they write can be read back, each measurement once."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshmuon import ConfigError, Muon
from meshmuon.metrics import CsvWriter, JsonlWriter, TensorBoardWriter, flat


def measurements() -> list[dict[str, Any]]:
    weight = nn.Parameter(torch.randn(6, 4))
    optimizer = Muon([{"params": [weight], "names": ["layers.0.w"], "use_muon": True}], metrics=2)
    found = []
    for _ in range(5):
        weight.grad = torch.randn(6, 4)
        optimizer.step()
        found.append(optimizer.metrics())  # the first is empty, and each other comes twice
    return found


def test_lines_of_json(tmp_path: Path) -> None:
    found = measurements()
    with JsonlWriter(tmp_path / "m.jsonl") as writer:
        for metrics in found:
            writer.write(metrics)
        writer.write({**found[-1], "step": 9, "skipped_steps": math.inf}, step=100)
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert lines[0] == found[1]
    assert [line["step"] for line in lines] == [2, 4, 100]
    assert lines[-1]["skipped_steps"] is None


def test_a_table(tmp_path: Path) -> None:
    found = measurements()
    with CsvWriter(tmp_path / "m.csv", matrices=True) as writer:
        for metrics in found:
            writer.write(metrics)
    with (tmp_path / "m.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4"]
    assert float(rows[0]["matrix/layers.0.w/lr"]) == found[1]["matrices"]["layers.0.w"]["lr"]


class Board:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


def test_tensorboard_of_the_training() -> None:
    found, board = measurements(), Board()
    with TensorBoardWriter(board) as writer:
        for metrics in found:
            writer.write(metrics)
    assert board.scalars == [
        (name, value, metrics["step"]) for metrics in found[1::2] for name, value in flat(metrics).items()
    ]


def test_tensorboard_in_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with TensorBoardWriter(tmp_path) as writer:
        writer.write(measurements()[-1])
    (events,) = tmp_path.iterdir()
    assert b"muon/group/0/update_to_weight" in events.read_bytes()


def test_without_tensorboard_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        TensorBoardWriter(tmp_path)
