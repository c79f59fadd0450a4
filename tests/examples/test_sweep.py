"""The example that finds Muon's learning rate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import sweep
from meshmuon import Muon


def printed(capsys: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    sweep.main(**{"lr": 1e-3, "adamw_lrs": [], "lrs": [], "seeds": [0], **options})
    return capsys.readouterr().out.splitlines()


def test_it_trains_with_both(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sweep, "STEPS", 40)
    lines = printed(capsys, lrs=[0.016], adamw_lrs=[1e-9, 0.004])
    assert [line.split()[:2] for line in lines[1:4]] == [["AdamW", "1e-09"], ["AdamW", "0.004"], ["Muon", "0.016"]]
    still, adamw, muon = (float(line.split()[2]) for line in lines[1:4])
    assert muon < still - 0.1
    assert adamw < still - 0.1
    assert lines[4] == f"Best: Muon at lr=0.016 with {muon:.4f}, beside AdamW at lr=0.004 with {adamw:.4f}."


def test_it_goes_on_until_the_best_is_in_the_middle(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(make_optimizer: sweep.MakeOptimizer, seed: int) -> float:
        """As if 0.016 were the best lr, and 1 diverged."""
        optimizer = make_optimizer(nn.Linear(2, 2))
        lr = optimizer.param_groups[0]["lr"]
        assert isinstance(optimizer, Muon if lr != 1e-3 else (Muon, torch.optim.AdamW))
        return math.nan if lr == 1 else math.log2(lr / 0.016) ** 2 + seed

    monkeypatch.setattr(sweep, "train", train)
    lines = printed(capsys, seeds=[1, 2])
    assert [float(line.split()[1]) for line in lines[2:-1]] == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032]
    assert lines[-1] == "Best: Muon at lr=0.016 with 1.5000, beside AdamW at lr=0.001 with 17.5000."
    assert printed(capsys, lrs=[1.0, 0.032, 0.064])[-2:] == [
        "Best: Muon at lr=0.032 with 1.0000, beside AdamW at lr=0.001 with 16.0000.",
        "It is the first or last lr that was tried: try more with --lrs.",
    ]
    assert (
        printed(capsys, lrs=[1.0])[-1]
        == "Best: Muon, which diverged with every lr, beside AdamW at lr=0.001 with 16.0000."
    )
