"""The training demo: its loop, its comparison, its command line and what it leaves on disk."""

from __future__ import annotations

import json
import os
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

import train_gpt
from demo import compare, data, model, optimizers, options, progress, report, train
from tests.examples.conftest import Nudged
from tests.support.bounds import led_astray
from tests.support.scripts import Completed, run_script

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = {
    "--d-model": 16,
    "--layers": 1,
    "--heads": 2,
    "--d-ff": 32,
    "--seq-len": 16,
    "--batch-size": 4,
    "--steps": 6,
    "--warmup-steps": 1,
    "--eval-every": 2,
    "--eval-windows": 4,
    "--device": "cpu",
    "--nproc": 1,
    "--valid-fraction": 0.3,
}
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def tiny(source_folder: Path, tmp_path: Path) -> list[str]:
    """Flags of a run that takes a moment."""
    flags = {**TINY, "--data": source_folder, "--out": tmp_path / "runs"}
    return [str(part) for pair in flags.items() for part in pair]


def only_run(out: Path) -> Path:
    folders = [path for path in out.iterdir() if path.is_dir() and not path.is_symlink()]
    assert len(folders) == 1
    return folders[0]


# Schedule and comparison


def schedule(**changes: Any) -> train.TrainConfig:
    fixed = {"batch_size": 1, "grad_clip": 0.0, "eval_every": 1, "eval_windows": 1, "seed": 0}
    return train.TrainConfig(**{**fixed, "steps": 100, "warmup_steps": 10, "schedule": "linear", **changes})


@pytest.mark.parametrize("kind", train.SCHEDULES)
def test_lr_warms_up_and_decays(kind: str) -> None:
    config = schedule(schedule=kind)
    scales = [train.lr_scale(step, config) for step in range(101)]
    assert scales[0] == pytest.approx(0.1)
    assert scales[:10] == sorted(scales[:10])
    assert scales[9] == scales[10] == 1.0
    assert scales[10:] == sorted(scales[10:], reverse=True)
    assert scales[100] == pytest.approx(1.0 if kind == "constant" else 0.0)
    assert scales[55] == pytest.approx(1.0 if kind == "constant" else 0.5)


def points(*values: tuple[int, float, float]) -> list[train.EvalPoint]:
    return [train.EvalPoint(*value) for value in values]


def test_comparison_reads_equal_steps_and_equal_time() -> None:
    muon = train.RunResult("muon", {}, evals=points((0, 0, 5.0), (10, 12, 3.0), (20, 24, 1.0)))
    adamw = train.RunResult("adamw", {}, evals=points((0, 0, 5.0), (10, 10, 4.0), (20, 20, 2.0)))
    both = compare.compare(muon, adamw)
    assert both is not None
    assert (both.step, both.muon_at_step, both.adamw_at_step) == (20, 1.0, 2.0)
    assert both.seconds == 20
    assert both.muon_at_time == pytest.approx(3.0 - 2.0 * 8 / 12)
    assert both.adamw_at_time == pytest.approx(2.0)
    assert both.muon_steps_to_adamw_best == pytest.approx(15)
    assert both.muon_seconds_to_adamw_best == pytest.approx(18)
    headline = report.headline_of([muon, adamw], both)
    assert "1.0000 lower" in headline
    assert "75% of the steps and 90% of the time" in headline


def test_comparison_of_unfinished_runs_uses_what_both_did() -> None:
    muon = train.RunResult("muon", {}, evals=points((0, 0, 5.0), (10, 12, 3.0), (20, 24, 1.0)))
    adamw = train.RunResult("adamw", {}, evals=points((0, 0, 5.0), (10, 10, 2.5)))
    both = compare.compare(muon, adamw)
    assert both is not None
    assert both.step == 10
    assert both.seconds == 10
    assert "0.5000 higher" in report.headline_of([muon, adamw], both)
    assert compare.compare(muon, train.RunResult("adamw", {}, evals=points((0, 0, 5.0)))) is None


# The whole


def test_entry_point_leaves_all_artefacts(tiny: list[str], tmp_path: Path) -> None:
    done = run_demo(tiny)
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path / "runs")
    assert str(folder / "report.md") in done.stdout
    assert "step 6/6" in done.stdout
    assert "tokens/s" in done.stdout
    log = json.loads((folder / "log.json").read_text())
    assert log["headline"] in done.stdout
    check_log(log)
    assert (folder / "loss.png").read_bytes().startswith(PNG_MAGIC)
    assert (tmp_path / "runs" / "latest").resolve() == folder.resolve()
    page = (folder / "report.md").read_text()
    for part in (log["headline"], "equal steps (6)", "equal training time", "share of the step", "loss.png"):
        assert part in page
    assert log["runs"]["muon"]["routing"].rstrip() in page
    assert "tok_embeddings" in page
    assert torch.__version__ in page
    assert "[plan.html](plan.html)" in page
    check_plan_page((folder / "plan.html").read_text(), log)


def check_plan_page(page: str, log: dict[str, Any]) -> None:
    """It is about this model, and what was measured is the run's own."""
    embedded = re.search(r'<script id="report" type="application/json">(.*?)</script>', page, flags=re.DOTALL)
    assert embedded is not None
    facts, muon = json.loads(embedded[1]), log["runs"]["muon"]
    assert facts["model"]["parameters"] == log["model"]["parameters"]
    assert facts["mesh"]["ranks"] == log["train"]["processes"]
    measured = {row["label"]: row["measured"] for row in facts["measured"]}
    assert measured["optimizer step, median"] == statistics.median(muon["optimizer_seconds"])
    assert all(row["predicted"] > 0 for row in facts["measured"])


def check_log(log: dict[str, Any]) -> None:
    muon, adamw = log["runs"]["muon"], log["runs"]["adamw"]
    for run in (muon, adamw):
        assert run["status"] == "finished"
        assert [point["step"] for point in run["evals"]] == [0, 2, 4, 6]
        assert len(run["train_loss"]) == len(run["step_seconds"]) == len(run["optimizer_seconds"]) == 6
        assert 0 < run["optimizer_share"] < 1
        assert run["evals"][-1]["loss"] < run["evals"][0]["loss"]
    # The same start and the same bytes: nothing may differ before the first update.
    assert muon["evals"][0]["loss"] == adamw["evals"][0]["loss"]
    assert muon["train_loss"][0] == adamw["train_loss"][0]
    assert muon["train_loss"][2] != adamw["train_loss"][2]
    assert log["comparison"]["muon_at_step"] == muon["evals"][-1]["loss"]
    assert log["model"]["d_model"] == 16
    assert log["train"]["steps"] == 6


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_a_run_repeats_and_every_parameter_moves(name: str, source_folder: Path) -> None:
    corpus = data.load_corpus(source_folder, 0.3)
    small = model.ModelConfig(d_model=16, n_layers=1, n_heads=2, d_ff=32, seq_len=16)
    tuned = optimizers.OptimizerConfig(lr=0.01, adamw_lr=0.01, weight_decay=0.1, adamw_weight_decay=0.1)
    config = schedule(steps=4, warmup_steps=1, batch_size=4, eval_windows=4, grad_clip=1.0)
    losses = []
    for _ in range(2):
        run = train.Run(name, corpus, small, tuned, config, train.Runtime(torch.device("cpu")))
        start = {key: value.detach().clone() for key, value in run.model.named_parameters()}
        run.train(progress.PlainProgress(name, 4, 64))
        assert not [key for key, value in run.model.named_parameters() if torch.equal(value, start[key])]
        losses.append([point.loss for point in run.result.evals])
    assert losses[0] == losses[1]


def test_adam_part_has_its_own_lr() -> None:
    tuned = optimizers.OptimizerConfig(lr=0.01, adamw_lr=0.1, weight_decay=0.1, adamw_weight_decay=0.1, adam_part_lr=0.03)
    config = model.ModelConfig(d_model=16, n_layers=1, n_heads=2, d_ff=32, seq_len=16)
    gpt = model.build_model(config, 0, torch.device("cpu"))
    built = optimizers.build_optimizer("muon", gpt, tuned)
    assert {group["use_muon"]: group["lr"] for group in built.param_groups} == {True: 0.01, False: 0.03}


def test_ctrl_c_leaves_a_report(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_early(self: progress.PlainProgress, done: int, *_: float | None) -> None:
        if self.title == "AdamW" and done == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.PlainProgress, "step", stop_early)
    assert train_gpt.main(tiny) == train_gpt.INTERRUPTED
    folder = only_run(tmp_path / "runs")
    log = json.loads((folder / "log.json").read_text())
    assert {name: run["status"] for name, run in log["runs"].items()} == {
        "muon": "finished",
        "adamw": "interrupted",
    }
    assert log["comparison"]["step"] == 4
    assert "AdamW (interrupted)" in (folder / "report.md").read_text()
    assert (folder / "loss.png").exists()
    assert "Stopped by Ctrl-C" in capsys.readouterr().out


def test_divergence_is_a_clear_error(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_gpt.main([*tiny, "--only", "adamw", "--adamw-lr", "1e38"]) == 1
    message = capsys.readouterr().err
    assert "AdamW:" in message
    assert "diverged" in message
    assert "--adamw-lr" in message
    folder = only_run(tmp_path / "runs")
    assert json.loads((folder / "log.json").read_text())["runs"]["adamw"]["status"] == "diverged"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "argument --steps: must be a whole number of at least 1, got '0'"),
        ("--steps many", "argument --steps: must be a whole number of at least 1, got 'many'"),
        ("--lr -1", "argument --lr: must be a number above 0, got '-1'"),
        ("--lr nan", "argument --lr: must be a number above 0"),
        ("--momentum 1", "argument --momentum: must be a number at least 0 and below 1"),
        ("--valid-fraction 1.5", "argument --valid-fraction: must be a number above 0 and below 1"),
        ("--heads 3", "d_model 16 does not divide into 3 heads"),
        ("--heads 16", "must be even"),
        ("--warmup-steps 6", "--warmup-steps 6 must be smaller than --steps 6"),
        ("--seq-len 100000", "too few for windows of 100000"),
        ("--data nowhere", "--data nowhere: no such folder"),
        ("--device nonsense", "--device nonsense:"),
        ("--scheme magic", "invalid choice: 'magic'"),
        ("--mlp gelu", "invalid choice: 'gelu'"),
        ("--rounding stochastic", "--rounding stochastic is for bfloat16 weights: add --weights bfloat16"),
        ("--nproc 0", "argument --nproc: must be a whole number of at least 1, got '0'"),
        ("--nproc 3", "--batch-size 4 does not divide over 3 processes"),
        ("--unknown 1", "unrecognized arguments: --unknown 1"),
    ],
)
def test_bad_flags_are_refused_before_training(
    flags: str, message: str, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_gpt.main([*tiny, *flags.split()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def run_demo(flags: list[str]) -> Completed:
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return run_script(REPOSITORY / "examples" / "train_gpt.py", *flags, environment=variables)


def losses(out: Path) -> list[float]:
    run = json.loads((only_run(out) / "log.json").read_text())["runs"]["muon"]
    return [*run["train_loss"], *(point["loss"] for point in run["evals"])]


def test_two_processes_learn_what_one_does(tiny: list[str], tmp_path: Path, nudged: Nudged) -> None:
    """FSDP2 over two processes: the same losses to rounding, and the report shows who owns what."""
    assert train_gpt.main([*tiny, "--only", "muon"]) == 0
    done = run_demo([*tiny, "--only", "muon", "--nproc", "2", "--out", str(tmp_path / "two")])
    assert done.returncode == 0, done.stderr
    assert "2 processes with FSDP2" in done.stdout
    assert done.stdout.count("step 6/6") == 1
    folder = only_run(tmp_path / "two")
    together = json.loads((folder / "log.json").read_text())
    assert together["train"]["processes"] == 2
    moved = []
    for seed in range(3):
        with nudged(6, seed):
            assert train_gpt.main([*tiny, "--only", "muon", "--out", str(tmp_path / f"nudged{seed}")]) == 0
        moved.append(losses(tmp_path / f"nudged{seed}"))
    alone = losses(tmp_path / "runs")
    bounds = led_astray(alone, moved)
    assert max(bounds) < 0.05
    assert all(abs(a - b) <= bound for a, b, bound in zip(losses(tmp_path / "two"), alone, bounds, strict=True))
    page = (folder / "report.md").read_text()
    assert "## Plan of the meshmuon run" in page
    assert "over 2 ranks" in page
    assert "nothing is padded" in page


def test_a_launcher_decides_the_number_of_processes(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        train_gpt.main(tiny)
    assert "--batch-size 4 does not divide over 3 processes: change it or --nproc" in capsys.readouterr().err


def test_every_size_is_a_flag_and_help_explains_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_gpt.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "report.md" in text
    assert "Ctrl-C" in text
    args = train_gpt.parser().parse_args([])
    for flag in vars(args):
        assert f"--{flag.replace('_', '-')}" in text
    options.model_config(args)
    options.train_config(args)
