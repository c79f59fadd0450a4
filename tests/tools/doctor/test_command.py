"""The command: exit codes, text in a pipe, JSON, files, and a launcher that ends all ranks when one has died."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pytest

import meshmuon
from meshmuon.tools.cli.main import main
from meshmuon.tools.doctor import CHECKS, Context, DoctorOptions, run_doctor
from meshmuon.tools.predict.calibration import Calibration
from tests.support.processes import results_of, run_ranks

from .faults import doctor_rank

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_one_process_in_a_pipe(tmp_path: Path) -> None:
    """Plain text without a terminal's codes; the JSON has the same; the exit code is 0."""
    written = tmp_path / "report.json"
    environment = {
        name: value for name, value in ENVIRONMENT.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    }
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


def test_a_whole_quick_run_on_two_ranks(tmp_path: Path) -> None:
    """All checks pass, and what was measured becomes a cost model."""
    saved = tmp_path / "saved.json"
    options = DoctorOptions(quick=True, save_file=saved, limit=100.0, shapes=((96, 32), (32, 96), (48, 48)))
    ended, second = results_of(run_ranks(2, doctor_rank, tmp_path, {}, options))
    assert (ended.code, second.code) == (0, 0), ended.text
    check_schema(ended.report, ranks=2)
    assert ended.report["passed"]
    expected = {**{check.name: "passed" for check in CHECKS}, "offload": "skipped"}
    assert {check["name"]: check["status"] for check in ended.report["checks"]} == expected
    assert ended.detail("offload") == "the weights are in host memory anyway"
    assert "the bits of one device" in ended.detail("fsdp2")
    assert "one device's result within rounding" in ended.detail("bf16")
    assert "40 steps" in ended.detail("stress")
    assert "✘" not in ended.text

    calibration = Calibration.load(saved)
    assert json.loads(saved.read_text()) == ended.report["calibration"]
    assert (calibration.device, calibration.ranks, calibration.ranks_per_node) == ("cpu", 2, 2)
    assert calibration.between is None
    assert calibration.inside is not None
    assert calibration.cost_model().flops_per_byte > 0
    step = ended.check("step")["figures"]
    assert step["predicted_seconds"] == pytest.approx(sum(step["prediction"].values()))
    assert "float32" in {rate.dtype for rate in calibration.products}
    for rates in (calibration.orthogonalisation, calibration.alone):
        assert [(rate.size, rate.length) for rate in rates][:4] == [(32, 96), (48, None), (128, None), (256, None)]
    assert "at 32×96, " in ended.detail("rates")


def test_a_rank_that_dies_under_torchrun(tmp_path: Path) -> None:
    """torchrun terminates rank 0 at once; it still reports, and names the rank that is gone. No process is left."""
    script = str(Path(__file__).parent / "faulty_rank.py")
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
        "--standalone",
    ]
    arguments = ["dies_in_an_exchange", "1", str(tmp_path), "doctor", "--only", "ragged,distmuon"]
    arguments += ["--json", str(tmp_path / "report.json")]
    done = subprocess.run(
        [*launcher, script, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert "✘ ragged" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    failed = next(check for check in report["checks"] if check["name"] == "ragged")
    assert failed["status"] == "failed"
    assert "rank 1: no sign of life" in failed["detail"]
    assert [check["status"] for check in report["checks"]] == ["passed", "failed", "not run"]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    written = capsys.readouterr()
    assert not written.out
    return written.err


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
# of two ranks, whose store is not there
SECOND = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=1"
BACKEND = (
    "does not move the memory of cpu, and the ranks are there. Leave it out, or write one of those that this torch "
    "has (gloo"
)
REFUSALS: list[tuple[str, list[str], str]] = [
    ("", ["physician"], "invalid choice"),
    ("", [], "the following arguments are required: command"),
    *(
        (variables, ["doctor", "--device", "cpu"], text)
        for variables, text in {
            "WORLD_SIZE=abc": "WORLD_SIZE='abc' in the environment must be a whole number of at least 1",
            "WORLD_SIZE=0": "WORLD_SIZE='0' in the environment must be a whole number of at least 1",
            "RANK=-1": "RANK='-1' in the environment must be a whole number of at least 0",
            "RANK=0 LOCAL_RANK=first": "LOCAL_RANK='first' in the environment",
            "RANK=2 WORLD_SIZE=2": "RANK=2 is not below WORLD_SIZE=2",
            "RANK=0 WORLD_SIZE=2": "MASTER_ADDR expected, but not set. Launch with torchrun",
            "RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=abc": "set MASTER_ADDR and MASTER_PORT",
        }.items()
    ),
    *(
        ("", ["doctor", *arguments.split()], text)
        for arguments, text in {
            "--only produce": "there is no check 'produce'; the checks are join, versions, ",
            "--skip x": "there is no check 'x'",
            "--skip links --save file": "--save needs the measurements rates, links, host, step",
            "--limit 0": "'0' is no number of seconds between 1 and 86400",
            "--limit soon": "'soon' is no number of seconds",
            "--only join --skip join": "--only and --skip both name 'join'. Leave it out of one of them",
            "--skip ddp,join": "--skip cannot leave out 'join': all other checks need it",
            "--shapes 64x": "argument --shapes: '64x' must be rows and columns of matrices, such as 256x128",
            "--shapes 64,8x8": "'64,8x8' must be rows and columns",
            "--shapes 0x8": "'0x8' must be rows and columns",
            "--only ,": "argument --only: it names no check",
            "--json -": "the tables go to standard output. Name a file",
            "--json no/file": (
                "cannot be written: No such file or directory. Name a file in a folder that you may write to"
            ),
            "--save .": "cannot be written: Is a directory",
            f"--save {'n' * 300}": "cannot be written: File name too long",
        }.items()
    ),
    *(
        (SECOND, ["doctor", "--device", "cpu", "--backend", backend], f"--backend {backend} {BACKEND}")
        for backend in ("zz", "gloo,zz", "cpu:zz", "fake", "", "cpu:gloo,cpu:gloo", "cpu:gloo,gloo", "cuda:gloo")
    ),
    *(
        (SECOND, ["doctor", "--folder", folder], f"--folder {folder} cannot be used: {reason}")
        for folder, reason in {
            "file": "File exists",
            "file/below": "Not a directory",
            "no/where": "No such file or directory",
            "/proc/self": "",  # where nobody may write, root neither
        }.items()
    ),
]


@pytest.mark.parametrize(("variables", "arguments", "text"), REFUSALS)
def test_what_is_refused_at_once(
    variables: str,
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On every rank before it asks for the store, and without leaving a file behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert text in refusal(capsys, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def closed_pipe() -> TextIO:
    """The end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def test_a_reader_that_has_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The checks run to their end and the file is written; the exit code tells that the report was cut off."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    options = DoctorOptions(only=("join",), json_file=tmp_path / "report.json", device="cpu")
    stream = closed_pipe()
    assert run_doctor(Context.from_environment(options), stream) == 1
    assert json.loads((tmp_path / "report.json").read_text())["passed"]
    assert capsys.readouterr().err.count("has stopped reading. Use --json FILE") == 1
    with suppress(BrokenPipeError):  # what is still in its buffer
        stream.close()


def test_the_list_of_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [check.name for check in CHECKS]
