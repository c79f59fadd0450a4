"""The command: exit codes, text in a pipe, JSON, files, and a launcher that ends all ranks when one has died."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import meshmuon
from meshmuon.cli.main import main
from meshmuon.doctor import CHECKS, DoctorOptions
from meshmuon.plan import Calibration, cost_model_from
from tests.support.processes import results_of, run_ranks

from .faults import Ended, doctor_rank

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_one_process_in_a_pipe(tmp_path: Path) -> None:
    """Plain text without a terminal's codes; the JSON has the same; the exit code is 0."""
    written = tmp_path / "report.json"
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    command = [sys.executable, "-m", "meshmuon", "doctor", "--only", "products,pairs", "--json", str(written)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == f"meshmuon doctor {meshmuon.__version__} on 1 rank"
    assert any(line.startswith("  ✔ products ") for line in lines)
    assert any(line.startswith("  - pairs ") and "needs 2 ranks" in line for line in lines)
    assert lines[-1].startswith("2 passed, 1 skipped in ")
    check_schema(json.loads(written.read_text()), ranks=1)


def check_schema(report: dict[str, Any], ranks: int) -> None:
    """Names and types of everything in the report."""
    assert set(report) == {"format", "version", "passed", "ranks", "seconds", "environment", "checks", "calibration"}
    assert (report["format"], report["version"], report["ranks"]) == ("meshmuon doctor", 1, ranks)
    assert type(report["passed"]) is bool
    assert report["seconds"] > 0
    expected = {"meshmuon", "torch", "python", "CPU", "devices", "links", "backends", "triton", "missing", "variables"}
    assert set(report["environment"]) >= expected
    assert all(type(value) is str and value for value in report["environment"].values())
    for check in report["checks"]:
        assert set(check) == {"name", "title", "status", "seconds", "detail", "advice", "figures"}
        assert check["status"] in {"passed", "failed", "skipped", "not run"}
        assert check["detail"]
        assert bool(check["advice"]) is (check["status"] == "failed")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """A whole quick run on two ranks; what rank 0 wrote, and the file of its measurements."""
    folder = tmp_path_factory.mktemp("doctor")
    options = DoctorOptions(quick=True, save_file=folder / "saved.json", limit=100.0)
    first, second = results_of(run_ranks(2, doctor_rank, folder, {}, options))
    assert (first.code, second.code, first.stuck, second.stuck) == (0, 0, False, False), first.text
    return first, folder / "saved.json"


def test_all_checks_pass_on_two_ranks(healthy: tuple[Ended, Path]) -> None:
    ended, _ = healthy
    check_schema(ended.report, ranks=2)
    assert ended.report["passed"]
    assert {check["name"]: check["status"] for check in ended.report["checks"]} == {check.name: "passed" for check in CHECKS}
    assert "the bits of one device" in ended.detail("fsdp2")
    assert "one device's result within rounding" in ended.detail("bf16")
    assert "40 steps" in ended.detail("stress")
    assert not list(ended.text.split("✘")[1:])


def test_what_was_measured_becomes_a_cost_model(healthy: tuple[Ended, Path]) -> None:
    ended, saved = healthy
    calibration = Calibration.load(saved)
    assert json.loads(saved.read_text()) == ended.report["calibration"]
    assert (calibration.device, calibration.ranks, calibration.ranks_per_node) == ("cpu", 2, 2)
    assert calibration.between is None
    assert calibration.inside is not None
    cost = cost_model_from(saved)
    assert cost is not None
    assert cost.flops_per_byte > 0
    step = ended.check("step")["figures"]
    assert step["predicted_seconds"] == pytest.approx(sum(step["prediction"].values()))
    assert {rate.dtype for rate in calibration.products} >= {"float32"}
    assert [rate.size for rate in calibration.orthogonalisation][:2] == [128, 256]


def test_a_rank_that_dies_under_torchrun(tmp_path: Path) -> None:
    """torchrun terminates rank 0 at once; it still reports, and names the rank that is gone. No process is left."""
    script = str(Path(__file__).parent / "faulty_rank.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    arguments = ["dies_in_an_exchange", "1", "doctor", "--only", "ragged,distmuon", "--json", str(tmp_path / "report.json")]
    done = subprocess.run(
        [*launcher, script, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT
    )
    assert done.returncode == 1
    assert "✘ ragged" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    failed = next(check for check in report["checks"] if check["name"] == "ragged")
    assert failed["status"] == "failed"
    assert "rank 1: no sign of life" in failed["detail"]
    assert [check["status"] for check in report["checks"]] == ["passed", "failed", "not run"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["doctor", "--only", "produce"], "there is no check 'produce'; the checks are join, versions, "),
        (["doctor", "--skip", "x"], "there is no check 'x'"),
        (["doctor", "--skip", "links", "--save", "file"], "--save needs the measurements rates, links, host, step"),
        (["doctor", "--limit", "0"], "0 is not between 1 and 86400 seconds"),
        (["doctor", "--limit", "soon"], "invalid _seconds value"),
        (["physician"], "invalid choice"),
        ([], "the following arguments are required: command"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_the_list_of_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [check.name for check in CHECKS]
