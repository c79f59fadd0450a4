"""examples/ray_train.py under Ray Train with two workers, stopped and continued, against the same loop without Ray.

``make test-trainers`` runs this: the development install has no Ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import pytest
import ray
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.processes import results_of, run_ranks

from .example_cases import EXAMPLES

sys.path.insert(0, str(EXAMPLES))
import ray_train

STEPS, STOPPED = 12, 7


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    paths = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=3, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}}
    )
    yield
    ray.shutdown()


def rank_main(rank: int, folder: Path) -> list[float]:
    sys.path.insert(0, str(EXAMPLES))
    import ray_train

    losses: list[float] = ray_train.train(STEPS, None, str(folder / "plain"), lambda metrics, where: None)
    return losses


def contents(checkpoint: str, folder: Path) -> list[torch.Tensor]:
    """All tensors of a checkpoint, in the order of their names."""
    dcp_to_torch_save(checkpoint, folder / "whole.pt")
    tree = torch.load(folder / "whole.pt", weights_only=False)
    leaves, _ = torch.utils._pytree.tree_flatten(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def test_equal_to_the_loop_without_ray_and_resumes(tmp_path: Path) -> None:
    (losses, _) = results_of(run_ranks(2, rank_main, tmp_path))
    stopped = ray_train.main(workers=2, steps=STOPPED, name="run", storage=str(tmp_path / "storage"))
    assert stopped.metrics["loss"] == losses[STOPPED - 1]
    ended = ray_train.main(workers=2, steps=STEPS, name="run", storage=str(tmp_path / "storage"))
    assert ended.metrics["loss"] == losses[-1]
    with ended.checkpoint.as_directory() as folder:
        found = contents(folder, tmp_path)
    expected = contents(str(tmp_path / "plain"), tmp_path)
    assert len(found) == len(expected) > 20
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
