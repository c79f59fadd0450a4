"""The plain FSDP2 script runs as its docstring says, learns, and leaves a checkpoint that one process can read."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from tests.support.scripts import run_script_on_ranks

from .conftest import EXAMPLES

SCRIPT = EXAMPLES / "fsdp2.py"


def test_two_processes_train_and_save(tmp_path: Path) -> None:
    import fsdp2

    done, other = run_script_on_ranks(2, SCRIPT, "--steps", "20", "--checkpoint", str(tmp_path / "saved"))
    assert done.returncode == other.returncode == 0, done.stdout + done.stderr + other.stderr
    assert not other.stdout
    assert "RoutingWarning" not in done.stderr
    losses = {
        int(step): float(loss) for step, loss in re.findall(r"^step +(\d+)  loss ([\d.]+)$", done.stdout, re.MULTILINE)
    }
    assert list(losses) == [1, 10, 20]  # one line per step that is shown, of one rank
    assert losses[20] < losses[1] - 0.05
    model = fsdp2.Transformer()
    before = model.layers[0].wq.weight.detach().clone()
    weights = get_model_state_dict(model)
    dcp.load({"model": weights}, checkpoint_id=tmp_path / "saved", no_dist=True)
    model.load_state_dict(weights)
    assert not torch.equal(model.layers[0].wq.weight, before)
