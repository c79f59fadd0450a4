"""The mixture-of-experts example: two processes, expert parallel or FSDP2, train as one process does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import train_moe
from tests.support.scripts import run_script

from .conftest import EXAMPLES, REPOSITORY

FLAGS = (
    "--d-model 16 --d-ff 32 --layers 1 --heads 2 --seq-len 16 --batch-size 4 --steps 3 --valid-fraction 0.3 --device "
    "cpu"
)


def losses_of(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d/3  loss ([\d.]+)", printed, re.MULTILINE)]


@pytest.mark.parametrize(
    ("experts", "how"),
    [("--experts 8", "efsdp 1 × ep 2"), ("--experts 7 --ep 1", "efsdp 2 × ep 1")],
    ids=["whole experts", "cut experts"],
)
def test_two_processes_learn_what_one_does(
    experts: str, how: str, source_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*FLAGS.split(), "--data", str(source_folder), *experts.split()]
    assert train_moe.main([*flags, "--nproc", "1"]) == 0
    alone = capsys.readouterr().out
    assert "one process" in alone
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = run_script(EXAMPLES / "train_moe.py", *flags, "--nproc", "2", environment=variables)
    assert done.returncode == 0, done.stderr
    assert f"experts, top 2, 3 steps of 4 × 16 bytes, 2 processes, {how}" in done.stdout
    assert "over 2 ranks" in done.stdout
    assert len(losses_of(alone)) == 3
    assert losses_of(done.stdout) == pytest.approx(losses_of(alone), abs=2e-4)  # printed with four digits


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--batch-size 6", "--batch-size 6 does not divide over 4 processes"),
        ("--experts 6 --d-ff 33", "nor do their 33 and 16 rows over 2"),
    ],
)
def test_bad_flags_are_refused(
    flags: str, message: str, source_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_moe.main([*FLAGS.split(), "--data", str(source_folder), *flags.split()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
