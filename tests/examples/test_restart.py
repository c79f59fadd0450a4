"""Checkpoints of the demo: a run that was killed goes on as if nothing had happened, on any number of processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import train_gpt
from demo import checkpoints, progress
from tests.support.injector import await_files
from tests.support.scripts import run_script, run_script_on_ranks

from .conftest import DEMO, REPOSITORY, log_of, run_folder, write_sources

KILLED = REPOSITORY / "tests" / "examples" / "killed_worker.py"
TORCHRUN = ("-m", "torch.distributed.run")
# 12 sequences divide over 1, 2, 3 and 4 processes. Checkpoints after steps 3, 6, 9 and 12, evaluations after 4, 8 and
# 12.
TINY = (
    "--d-model 16 --layers 1 --heads 2 --d-ff 32 --seq-len 16 --batch-size 12 --steps 12 --warmup-steps 1 "
    "--eval-every 4 --eval-windows 4 --valid-fraction 0.3 --device cpu --threads 1 --no-plot --checkpoint-every 3"
)
KILLED_BEFORE = 7  # counted from 0: seven steps are done, the last checkpoint holds six

Log = dict[str, Any]
LAST_CALL = "last_call_timeout=8"  # seconds in which a second launcher may still come

pytestmark = pytest.mark.timeout(400)  # several starts of several processes each; half a minute on a quiet machine


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("restart") / "source")


@pytest.fixture(scope="module")
def uninterrupted(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of meshmuon on two processes, from start to end."""
    out = tmp_path_factory.mktemp("uninterrupted")
    codes, _ = together(2, *flags(sources, out), "--only", "muon")
    assert codes == [0, 0]
    return losses(log_of(out), "muon")


def flags(sources: Path, out: Path) -> list[str]:
    return [*TINY.split(), "--data", str(sources), "--out", str(out)]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **more}


def together(count: int, *arguments: str) -> tuple[list[int], str]:
    """So many processes of one run, as a launcher would start them; their exit codes and what the first one printed."""
    ranks = run_script_on_ranks(count, DEMO, *arguments, environment=environment())
    return [rank.returncode for rank in ranks], ranks[0].stdout


def losses(log: Log, name: str) -> list[float]:
    """Every training loss and every validation loss, as written: JSON keeps all bits of a Python float."""
    run = log["runs"][name]
    assert run["status"] == "finished"
    assert len(run["train_loss"]) == len(run["step_seconds"]) == 12
    assert [point["step"] for point in run["evals"]] == [0, 4, 8, 12]
    return [*run["train_loss"], *(point["loss"] for point in run["evals"])]


def resumed(log: Log) -> dict[str, list[tuple[int, int]]]:
    return {
        name: [(point["step"], point["processes"]) for point in run["resumed"]] for name, run in log["runs"].items()
    }


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# A worker is killed


def test_torchrun_starts_again_and_the_curve_is_the_same_bit_for_bit(
    uninterrupted: list[float], sources: Path, tmp_path: Path
) -> None:
    launcher = (*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    accident = (str(KILLED), str(tmp_path / "happened"), "muon", str(KILLED_BEFORE), "1")
    done = python(*launcher, *accident, *flags(sources, tmp_path / "runs"), "--only", "muon")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "happened").exists()
    assert "meshmuon: goes on after step 6" in done.stdout
    assert "meshmuon  step 7/12" in done.stdout  # after the accident; before it, if the process had time to say so
    assert done.stdout.count("meshmuon  step 6/12") == 1
    log = log_of(tmp_path / "runs")  # of one folder: the second attempt went on in the first one's
    assert resumed(log) == {"muon": [(6, 2)]}
    assert losses(log, "muon") == uninterrupted
    page = (run_folder(tmp_path / "runs") / "report.md").read_text()
    assert "Resumed from a checkpoint: meshmuon after step 6 on 2 processes" in page


def test_torchrun_goes_on_with_fewer_processes_when_a_node_is_lost(
    sources: Path, tmp_path: Path, alone: list[str]
) -> None:
    """Two launchers of one process each; one is killed with its process, and the other goes on alone. Half of it is
    waiting.

    The first to come waits for the second for a few seconds only: it is started when the second has imported torch.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"--rdzv-endpoint=127.0.0.1:{probe.getsockname()[1]}"
    nodes = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", meeting, "--rdzv-id=1")
    awake = "import pathlib, sys; from torch.distributed.run import main; pathlib.Path(sys.argv.pop(1)).touch(); main()"
    command = [*flags(sources, tmp_path / "runs"), "--only", "muon"]
    accident = (str(KILLED), str(tmp_path / "happened"), "muon", str(KILLED_BEFORE), "node")
    other = subprocess.Popen(
        [
            sys.executable,
            "-c",
            awake,
            tmp_path / "awake",
            *nodes,
            f"--rdzv-conf=is_host=0,{LAST_CALL}",
            *accident,
            *command,
        ],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await_files(tmp_path, "awake", 1)
        done = python(*TORCHRUN, *nodes, f"--rdzv-conf=is_host=1,{LAST_CALL}", str(DEMO), *command)
        assert other.wait(timeout=100) == -signal.SIGKILL
    finally:
        other.kill()
    assert done.returncode == 0, done.stderr
    log = log_of(tmp_path / "runs")
    assert resumed(log) == {"muon": [(6, 1)]}
    assert_within_rounding(losses(log, "muon"), whole_run(alone, tmp_path / "whole"))


def test_a_killed_run_goes_on_with_another_number_of_processes(
    uninterrupted: list[float], sources: Path, tmp_path: Path, alone: list[str]
) -> None:
    """Two processes by the demo's own launcher; then the same command with one, and with three."""
    accident = (str(tmp_path / "happened"), "muon", str(KILLED_BEFORE), "1")
    done = run_script(KILLED, *accident, *alone, "--nproc", "2", environment=environment())
    assert done.returncode == 1
    assert "error: process 1 of 2 was killed by signal 9" in done.stderr
    assert "The same command goes on from the last checkpoint" in done.stderr
    before = log_of(tmp_path / "runs")["runs"]["muon"]
    assert (before["status"], len(before["train_loss"])) == ("running", KILLED_BEFORE)
    shutil.copytree(tmp_path / "runs", tmp_path / "three", symlinks=True)

    assert train_gpt.main(alone) == 0
    codes, text = together(3, *alone, "--out", str(tmp_path / "three"))
    assert codes == [0, 0, 0]
    assert "meshmuon: goes on after step 6" in text
    for out, processes in (("runs", 1), ("three", 3)):
        log = log_of(tmp_path / out)
        assert resumed(log) == {"muon": [(6, processes)]}
        assert_within_rounding(losses(log, "muon"), uninterrupted)
        assert losses(log, "muon")[:6] == before["train_loss"][:6] == uninterrupted[:6]


# One process: what is kept, what is refused


Stop = Callable[..., None]


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Stop:
    """Runs the demo until Ctrl-C, when meshmuon has done so many steps."""

    def main(arguments: list[str], after: int = KILLED_BEFORE) -> None:
        def step(shown: progress.PlainProgress, done: int, *_: float | None) -> None:
            if (shown.title, done) == ("meshmuon", after):
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(progress.PlainProgress, "step", step)
            assert train_gpt.main(arguments) == train_gpt.INTERRUPTED

    return main


@pytest.fixture
def alone(sources: Path, tmp_path: Path) -> list[str]:
    """Flags of meshmuon's run in one process."""
    return [*flags(sources, tmp_path / "runs"), "--nproc", "1", "--only", "muon"]


def whole_run(alone: list[str], out: Path) -> list[float]:
    assert train_gpt.main([*alone, "--out", str(out), "--checkpoint-every", "0"]) == 0
    assert not (run_folder(out) / checkpoints.FOLDER).exists()
    return losses(log_of(out), "muon")


def assert_within_rounding(found: list[float], expected: list[float]) -> None:
    """Sums over another number of processes are taken in another order; measured was 1e-6. Lost state is off by 0.1."""
    assert found == pytest.approx(expected, abs=0.005)


def kept(out: Path) -> list[str]:
    return sorted(path.name for path in (run_folder(out) / checkpoints.FOLDER / "muon").iterdir())


def test_ctrl_c_goes_on_in_the_same_folder_and_a_finished_run_is_not_touched(
    alone: list[str], stop: Stop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop(alone)
    assert "The same command goes on from the last checkpoint" in capsys.readouterr().out
    assert kept(tmp_path / "runs") == ["step-000003", "step-000006"]
    assert train_gpt.main(alone) == 0
    assert kept(tmp_path / "runs") == ["step-000009", "step-000012"]
    log = log_of(tmp_path / "runs")
    assert losses(log, "muon") == whole_run(alone, tmp_path / "whole")
    assert resumed(log) == {"muon": [(6, 1)]}
    before = files_below(run_folder(tmp_path / "runs"))
    first = run_folder(tmp_path / "runs")
    stop(alone)  # the first has come to its end: this is a new one, from its start
    stop([*alone, "--lr", "0.01"])  # other options: a new one, too
    assert len([path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]) == 3
    assert files_below(first) == before


def cut_short(path: Path) -> None:
    with (path / checkpoints.RESULT_FILE).open("r+b") as file:
        file.truncate(10)


def half_written(path: Path) -> None:
    """As a process killed while it writes leaves it: parts are there, under the name for unfinished ones."""
    (path / checkpoints.RESULT_FILE).unlink()
    path.rename(path.with_name(path.name + checkpoints.UNFINISHED))
    later = path.with_name("step-000012" + checkpoints.UNFINISHED)
    later.mkdir()
    # by more processes than go on: must not end up in the checkpoint that gets this name
    (later / "__7_0.distcp").touch()


@pytest.mark.parametrize("damage", [cut_short, half_written], ids=lambda one: one.__name__)
def test_a_damaged_checkpoint_is_passed_over(
    damage: Any, alone: list[str], stop: Stop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop(alone)
    newest = run_folder(tmp_path / "runs") / checkpoints.FOLDER / "muon" / "step-000006"
    damage(newest)
    capsys.readouterr()
    assert train_gpt.main(alone) == 0
    said = capsys.readouterr()
    assert "meshmuon: goes on after step 3" in said.out
    aside = [] if damage is half_written else ["step-000006.damaged"]
    assert (f"{newest}: this checkpoint is damaged and is passed over" in said.err) == bool(aside)
    assert kept(tmp_path / "runs") == [*aside, "step-000009", "step-000012"]
    assert [file.name for file in (newest.parent / "step-000012").glob("*.distcp")] == ["__0_0.distcp"]
    assert losses(log_of(tmp_path / "runs"), "muon") == whole_run(alone, tmp_path / "whole")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seed 1 --lr 0.5", "train seed was 0, is now 1; optimizer lr was 0.016, is now 0.5"),
        ("--valid-fraction 0.5", "data digest was"),
    ],
)
def test_checkpoints_of_other_options_are_refused_and_left_alone(
    flags: str, message: str, alone: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], stop: Stop
) -> None:
    folder = tmp_path / "kept"
    named = [*alone, "--checkpoint-dir", str(folder)]
    stop(named, after=4)
    before = files_below(tmp_path)
    with pytest.raises(SystemExit) as end:
        train_gpt.main([*named, *flags.split()])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert f"--checkpoint-dir {folder}: its checkpoints were made with other options: {message}" in said
    assert "Use those options, or name another --checkpoint-dir" in said
    assert files_below(tmp_path) == before


def test_other_folders_are_refused(alone: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit):
        train_gpt.main([*alone, "--checkpoint-dir", str(mine)])
    assert "there are other things in this folder" in capsys.readouterr().err
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    with pytest.raises(SystemExit):
        train_gpt.main([*alone, "--checkpoint-dir", str(tmp_path / "new"), "--checkpoint-every", "0"])
    assert "--checkpoint-dir without --checkpoint-every" in capsys.readouterr().err
    with checkpoints.opened(tmp_path / "used", 1, {}), pytest.raises(ValueError, match="another run is using it"):
        checkpoints.opened(tmp_path / "used", 1, {}).__enter__()
    assert not (tmp_path / "runs").exists()
