"""The scripts for Trainer and Accelerate learn, save and resume, shortened and in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.optional import need

need("transformers")
need("accelerate")


def test_trainer_learns_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import hf_trainer

    hf_trainer.main(steps=20, folder=str(tmp_path), fsdp2=False, resume=False)
    shown = capsys.readouterr().out
    losses = [float(part.split("'")[0]) for part in shown.split("{'loss': '")[1:]]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.1
    assert "model.layers.*.mlp.down_proj.weight" in shown  # the routing table
    assert (tmp_path / "checkpoint-10" / "optimizer.pt").exists()
    hf_trainer.main(steps=22, folder=str(tmp_path), fsdp2=False, resume=True)
    resumed = capsys.readouterr().out
    assert [part.split("'")[0] for part in resumed.split("'epoch': '")[1:]] == ["1", "1"]


def test_accelerate_learns() -> None:
    from accelerate.state import AcceleratorState, GradientState

    import accelerate_loop

    AcceleratorState._reset_state(reset_partial_state=True)  # a script has a process of its own
    GradientState._reset_state()
    losses = accelerate_loop.main(steps=20, accumulate=2)
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.1
