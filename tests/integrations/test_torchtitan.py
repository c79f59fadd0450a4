"""torchtitan's whole trainer with Muon, on CPU: single process, DDP, FSDP2 and tensor parallel in real gloo
processes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from torch import nn

from ..support.optional import need
from ..support.processes import Job, JobRanks, job_ranks

need("torchtitan")

CASES = {"container": 1, "single": 1, "ddp": 2, "fsdp2": 2, "tp": 2}


def jobs() -> dict[str, Job]:
    return {name: Job(world, partial(run, name)) for name, world in CASES.items()}


def run(name: str, folder: Path) -> None:
    from .torchtitan_cases import run_case  # only here: torchtitan chooses its device when it is imported

    run_case(name, folder)


ranks = job_ranks(jobs, list(CASES))


@pytest.mark.parametrize("case", CASES)
def test_equal_to_a_plain_loop(ranks: JobRanks, case: str) -> None:
    ranks.check(case)


def test_frozen_parameters_are_left_out() -> None:
    """torchtitan demands that its optimizers have just the parameters that train."""
    from meshmuon.integrations.torchtitan import muon

    model = nn.ModuleDict({"base": nn.Linear(8, 8), "hidden": nn.Linear(8, 8)})
    model["base"].requires_grad_(False)
    container = muon(lr=1e-3).build(model_parts=[model])
    params = [param for optimizer in container for group in optimizer.param_groups for param in group["params"]]
    assert set(params) == set(model["hidden"].parameters())
