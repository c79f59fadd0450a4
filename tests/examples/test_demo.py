"""The training demo, run with tiny settings: what it leaves on disk, what it says, and that its data and model are
sound.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import train_gpt
from demo import compare, data, health, model, progress, report, train
from tests.support.scripts import Completed, run_script

from .conftest import DEMO, REPOSITORY, log_of, run_folder

SIZES = (
    "--d-model 16 --layers 1 --heads 2 --d-ff 32 --seq-len 16 --batch-size 4 --steps 6 --warmup-steps 1 --eval-every 2 "
    "--eval-windows 4 --valid-fraction 0.3 --device cpu --threads 1"
)
# The largest logit is 5.4 at first and passes the threshold at step 6. Measured at the end: 156 without the clip, 10
# with it.
CLIP = (
    "--qk-clip --qk-threshold 6 --layers 2 --steps 24 --eval-every 4 --schedule constant --lr 0.4 --weight-decay 0 "
    "--no-plot"
)
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def tiny(source_folder: Path, tmp_path: Path) -> list[str]:
    """Flags of a run that takes a moment."""
    return [*SIZES.split(), "--nproc", "1", "--data", str(source_folder), "--out", str(tmp_path / "runs")]


def run_demo(flags: list[str]) -> Completed:
    return run_script(DEMO, *flags, environment={**os.environ, "PYTHONPATH": str(REPOSITORY)})


# Whole runs


def test_entry_point_leaves_all_artefacts(tiny: list[str], tmp_path: Path) -> None:
    done = run_demo(tiny)
    assert done.returncode == 0, done.stderr
    folder, log = run_folder(tmp_path / "runs"), log_of(tmp_path / "runs")
    for part in (str(folder / "report.md"), "step 6/6", "tokens/s", log["headline"]):
        assert part in done.stdout
    muon, adamw = log["runs"]["muon"], log["runs"]["adamw"]
    for run in (muon, adamw):
        assert run["status"] == "finished"
        assert [point["step"] for point in run["evals"]] == [0, 2, 4, 6]
        assert len(run["train_loss"]) == len(run["step_seconds"]) == len(run["optimizer_seconds"]) == 6
        assert run["evals"][-1]["loss"] < run["evals"][0]["loss"]
    assert muon["train_loss"][0] == adamw["train_loss"][0], "the same start and the same bytes"
    assert muon["train_loss"][2] != adamw["train_loss"][2]
    assert (folder / "loss.png").read_bytes().startswith(PNG_MAGIC)
    assert (tmp_path / "runs" / "latest").resolve() == folder.resolve()
    page = (folder / "report.md").read_text()
    for part in (log["headline"], "equal steps (6)", "tok_embeddings", torch.__version__):
        assert part in page


def test_two_processes_learn_what_one_does(tiny: list[str], tmp_path: Path) -> None:
    """FSDP2 over two processes: the same losses to rounding, and the report shows who owns what."""
    only = [*tiny, "--only", "muon", "--no-plot"]
    assert train_gpt.main(only) == 0
    together = [*only, "--out", str(tmp_path / "two")]
    together[together.index("--nproc") + 1] = "2"
    done = run_demo(together)
    assert done.returncode == 0, done.stderr
    assert "2 processes with FSDP2" in done.stdout
    assert done.stdout.count("step 6/6") == 1
    alone, two = (log_of(tmp_path / out)["runs"]["muon"]["train_loss"] for out in ("runs", "two"))
    assert two == pytest.approx(alone, abs=0.01)  # a rank that saw its own half only would be off by more at once
    page = (run_folder(tmp_path / "two") / "report.md").read_text()
    assert "over 2 ranks" in page
    assert "nothing is padded" in page


def test_qk_clip_bounds_the_logits(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_gpt.main([*tiny, *CLIP.split()]) == 0
    log = log_of(tmp_path / "runs")
    without, clipped = (log["runs"][name]["largest_logit"] for name in ("unclipped", "clipped"))
    first = next(step for step, logit in enumerate(without) if logit > 6)
    assert clipped[: first + 1] == without[: first + 1], "nothing differs until the clip acts"
    assert max(without) > 60
    assert max(clipped) < max(without) / 5
    assert log["headline"] in capsys.readouterr().out
    assert f"With QK-clip the largest attention logit of 24 steps was {max(clipped):.1f}" in log["headline"]
    assert log["headline"] in (run_folder(tmp_path / "runs") / "report.md").read_text()


def test_ctrl_c_leaves_a_report(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_early(self: progress.PlainProgress, done: int, *_: float | None) -> None:
        if self.title == "AdamW" and done == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.PlainProgress, "step", stop_early)
    assert train_gpt.main(tiny) == train_gpt.INTERRUPTED
    log = log_of(tmp_path / "runs")
    assert {name: run["status"] for name, run in log["runs"].items()} == {"muon": "finished", "adamw": "interrupted"}
    assert "AdamW (interrupted)" in (run_folder(tmp_path / "runs") / "report.md").read_text()
    assert "Stopped by Ctrl-C" in capsys.readouterr().out


def test_divergence_is_a_clear_error(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_gpt.main([*tiny, "--only", "adamw", "--adamw-lr", "1e38"]) == 1
    assert re.search(r"AdamW:.*diverged.*--adamw-lr", capsys.readouterr().err)
    assert log_of(tmp_path / "runs")["runs"]["adamw"]["status"] == "diverged"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps many", "argument --steps: must be a whole number of at least 1, got 'many'"),
        ("--heads 3", "d_model 16 does not divide into 3 heads"),
        ("--data nowhere", "--data nowhere: no such folder"),
        ("--rounding stochastic", "--rounding stochastic is for bfloat16 weights: add --weights bfloat16"),
        ("--nproc 3", "--batch-size 4 does not divide over 3 processes"),
        ("--microbatches 3", "--microbatches 3 must divide by 1 processes, and --batch-size 4 by it"),
        ("--stop-after 2", "--stop-after without --checkpoint-every: say after how many steps to write a checkpoint"),
        (
            "--qk-clip --only adamw",
            "--only adamw is none of the runs with --qk-clip: choose unclipped, clipped or both",
        ),
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


# Parts


def test_comparison_reads_equal_steps_and_equal_time() -> None:
    def run(name: str, *points: tuple[int, float, float]) -> train.RunResult:
        return train.RunResult(name, {}, evals=[train.EvalPoint(*point) for point in points])

    muon = run("muon", (0, 0, 5.0), (10, 12, 3.0), (20, 24, 1.0))
    both = compare.compare(muon, run("adamw", (0, 0, 5.0), (10, 10, 4.0), (20, 20, 2.0)))
    assert both is not None
    assert (both.step, both.muon_at_step, both.adamw_at_step, both.seconds) == (20, 1.0, 2.0, 20)
    assert both.muon_at_time == pytest.approx(3.0 - 2.0 * 8 / 12)
    assert (both.muon_steps_to_adamw_best, both.muon_seconds_to_adamw_best) == pytest.approx((15, 18))
    assert "75% of the steps and 90% of the time" in report.headline_of([muon], both)
    unfinished = compare.compare(muon, run("adamw", (0, 0, 5.0), (10, 10, 2.5)))
    assert unfinished is not None
    assert unfinished.step == 10
    assert compare.compare(muon, run("adamw", (0, 0, 5.0))) is None


def test_the_split_is_disjoint_complete_and_the_same_everywhere(source_folder: Path) -> None:
    corpus = data.load_corpus(source_folder, 0.3)
    assert not set(corpus.train_files) & set(corpus.valid_files)
    assert {*corpus.train_files, *corpus.valid_files} == {f"package{i % 3}/module{i}.py" for i in range(20)}
    assert b"LEFT_OUT" not in corpus.train.numpy().tobytes() + corpus.valid.numpy().tobytes()
    # Written down once: the sides must not depend on PYTHONHASHSEED or the version of Python.
    assert [
        name for name in ("ast.py", "enum.py", "os.py", "random.py", "turtle.py") if data.is_validation(name, 0.5)
    ] == [
        "random.py",
        "turtle.py",
    ]


def test_batches_do_not_depend_on_how_they_are_divided() -> None:
    numbers = torch.arange(4001, dtype=torch.int32)
    batches = data.TrainBatches(numbers, seq_len=20, batch_size=12, seed=3)
    whole, targets = batches.batch(7)
    for world in (2, 3, 12):
        assert torch.equal(torch.cat([batches.batch(7, rank, world)[0] for rank in range(world)]), whole)
    assert torch.equal(whole + 1, targets)  # the data counts up: a target is the next byte
    single = data.TrainBatches(numbers, seq_len=20, batch_size=1, seed=3)
    assert len({single.starts(step)[0] for step in range(single.windows)}) == single.windows


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False, "mlp": "swiglu", "tied_head": True}], ids=str)
def test_no_position_sees_the_future(changes: dict[str, Any]) -> None:
    sizes = {"vocab_size": 256, "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 64, "seq_len": 24}
    gpt = model.build_model(model.ModelConfig(**{**sizes, **changes}), seed=1, device=torch.device("cpu")).double()
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # the real start has zero matrices, through which nothing could leak
        for param in gpt.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(2)))
    before = gpt(tokens)
    for position in (1, 13, 23):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 256
        after = gpt(changed)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=2.0**-33)
        assert (after[:, position:] - before[:, position:]).abs().amax(-1).min() > 1e-4


def test_health_is_drawn_and_told(tmp_path: Path) -> None:
    kinds = {"layers.*.w": {"update_to_weight": 0.1, "gradient_norm": 1.0, "update_rms": None}}
    points = [{"step": step, "kinds": kinds} for step in (10, 20)]
    health.draw_health(tmp_path / "health.png", points)
    assert (tmp_path / "health.png").read_bytes().startswith(PNG_MAGIC)
    assert "(health.png)" in health.section("meshmuon", points, drawn=True)
    assert health.section("meshmuon", points, drawn=False) == ""
