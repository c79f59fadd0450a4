"""``meshmuon sweep`` as a command: what it trains, keeps, prints and refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshmuon import Muon
from meshmuon.tools.cli.main import main

HERE = "tests.tools.cli.test_sweep"
BUILT: list[torch.optim.Optimizer] = []
Make = Callable[..., torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def built() -> list[torch.optim.Optimizer]:
    BUILT.clear()
    return BUILT


def train(make_optimizer: Make, seed: int) -> Iterator[float]:
    """Losses that depend on the lr as if 0.002 were the best, without a training."""
    BUILT.append(make_optimizer(nn.Conv2d(3, 8, 3), conv="flatten", betas=(0.8, 0.9)))
    lr = BUILT[-1].param_groups[0]["lr"]
    yield 9.0
    for _ in range(9):
        yield math.log2(lr / 0.002) ** 2 + isinstance(BUILT[-1], torch.optim.AdamW) + seed


def train_validated(make_optimizer: Make, seed: int) -> Any:
    make_optimizer(nn.Linear(2, 2))
    yield torch.tensor(1.0)
    return 0.25


def train_rising(make_optimizer: Make, seed: int) -> Iterator[float]:
    """The larger the lr the better, until it diverges at 0.1."""
    BUILT.append(make_optimizer(nn.Linear(2, 2)))
    lr = BUILT[-1].param_groups[0]["lr"]
    yield math.nan if lr > 0.1 else 1 - lr
    assert lr <= 0.1, "a run that has diverged goes on"


def train_words(make_optimizer: Make, seed: int) -> Iterator[Any]:
    yield "much"


def train_alone(make_optimizer: Make, seed: int) -> Iterator[float]:
    yield 1.0


def train_no_step(make_optimizer: Make, seed: int) -> Iterator[float]:
    make_optimizer(nn.Linear(2, 2))
    yield from ()


def train_with_lr(make_optimizer: Make, seed: int) -> Iterator[float]:
    make_optimizer(nn.Linear(2, 2), lr=0.1)
    yield 1.0


def train_at_once(make_optimizer: Make, seed: int) -> float:
    return 1.0


def sweep(function: str, out: Path, *arguments: str) -> int:
    return main(["sweep", f"{HERE}:{function}", "--out", str(out), *arguments])


def lrs(optimizer: str, out: Path) -> list[float]:
    return [run["lr"] for run in json.loads((out / "sweep.json").read_text())["runs"] if run["optimizer"] == optimizer]


def test_both_are_trained_and_the_best_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("train", tmp_path, "--seeds", "1", "2") == 0
    printed = capsys.readouterr().out
    assert "Best: Muon(model, lr=0.002) with 1.5000, beside AdamW(model, lr=0.001) with 3.5000." in printed
    assert printed.startswith((tmp_path / "sweep.txt").read_text())
    assert (tmp_path / "sweep.png").stat().st_size > 1000
    assert lrs("AdamW", tmp_path) == [0.001] * 2
    assert lrs("Muon", tmp_path) == [lr for lr in (0.001, 0.002, 0.004, 0.008) for _ in range(2)]
    adamw, muon = BUILT[0], BUILT[-1]
    assert isinstance(adamw, torch.optim.AdamW)
    assert isinstance(muon, Muon)
    assert (adamw.param_groups[0]["betas"], adamw.param_groups[0]["weight_decay"]) == ((0.8, 0.9), 0.1)
    assert [group["use_muon"] for group in muon.param_groups] == [True, False], "conv= reached Muon"


def test_a_run_that_is_saved_is_not_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep("train", tmp_path, "--lrs", "0.004", "0.002")
    assert len(BUILT) == 3
    sweep("train", tmp_path, "--lrs", "0.002", "0.016", "--adamw-lrs", "0.001")
    assert [optimizer.param_groups[0]["lr"] for optimizer in BUILT[3:]] == [0.016]
    assert "lr=0.002) with 0.0000" in capsys.readouterr().out.splitlines()[-2]
    sweep("train", tmp_path, "--seeds", "0", "3", "--lrs", "0.016")
    assert capsys.readouterr().out.splitlines()[2:4] == [
        "AdamW      0.001  3.5000                 best",
        "Muon       0.016  10.5000                best",
    ], "only those with both seeds"
    with pytest.raises(SystemExit):
        sweep("train_validated", tmp_path)
    assert f"holds runs of other code than {HERE}:train_validated now has" in capsys.readouterr().err


def test_learning_rates_beyond_the_best_are_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("train_rising", tmp_path, "--lr", "0.01") == 0
    assert lrs("Muon", tmp_path) == [0.01, 0.02, 0.04, 0.08, 0.16]
    printed = capsys.readouterr().out
    assert "Muon       0.16  diverged" in printed
    assert "Best: Muon(model, lr=0.08)" in printed
    assert sweep("train_rising", tmp_path / "adamw", "--adamw-lrs", "0.2", "--lrs", "0.01") == 0
    assert "with 0.9900, beside AdamW, which diverged with every lr." in capsys.readouterr().out


def test_a_returned_loss_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("train_validated", tmp_path, "--lrs", "0.1") == 0
    assert (
        "Best: Muon(model, lr=0.1) with 0.2500, beside AdamW(model, lr=0.001) with 0.2500." in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("train_words", "train_words yielded str, not a number: write loss.item()."),
        ("train_alone", "train_alone never called make_optimizer(model), so that every run is the same."),
        ("train_no_step", "train_no_step never yielded a loss."),
        ("train_with_lr", "make_optimizer sets the lr itself: leave lr= out"),
        ("train_at_once", "train_at_once returned float. It must yield the loss of every step"),
        ("nothing", "has no function nothing."),
    ],
)
def test_functions_that_cannot_be_swept(
    function: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        sweep(function, tmp_path)
    assert ending.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "sweep.json").exists()


def test_files_and_launches_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweep.json").write_text("{")
    (tmp_path / "file").write_text("")
    for out, message in ((tmp_path, "delete it, or name another --out"), (tmp_path / "file", "cannot be written")):
        with pytest.raises(SystemExit):
            sweep("train", out)
        assert message in " ".join(capsys.readouterr().err.split())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        sweep("train", tmp_path)
    assert "runs in one process" in capsys.readouterr().err
