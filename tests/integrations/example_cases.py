"""The scripts for Lightning, Fabric and Ray Train, shortened, in processes that are started already."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def lightning_example(strategy: str, folder: Path) -> None:
    import lightning_fsdp2

    folder = folder / f"example-lightning-{strategy}"
    devices = dist.get_world_size()
    trainer = lightning_fsdp2.main(
        steps=4, strategy=strategy, devices=devices, precision="32-true", folder=str(folder), resume=None
    )
    saved = trainer.checkpoint_callback.best_model_path
    again = lightning_fsdp2.main(
        steps=5, strategy=strategy, devices=devices, precision="32-true", folder=str(folder), resume=saved
    )
    assert (trainer.global_step, again.global_step) == (4, 5)


def fabric_example(strategy: str, folder: Path) -> None:
    import fabric_fsdp2

    checkpoint, devices = str(folder / f"example-fabric-{strategy}"), dist.get_world_size()
    first = fabric_fsdp2.main(steps=10, strategy=strategy, devices=devices, precision="32-true", checkpoint=checkpoint)
    then = fabric_fsdp2.main(steps=15, strategy=strategy, devices=devices, precision="32-true", checkpoint=checkpoint)
    assert (len(first), len(then)) == (10, 5)
    assert sum(then) / 5 < first[0]


def ray_example(folder: Path) -> None:
    """Ray itself is not installed: only what it starts in each worker."""
    import ray_train

    reported: list[dict[str, float]] = []
    config = {"lr": 3e-3, "steps": 12, "checkpoint": str(folder / "ray"), "report": reported.append}
    losses = ray_train.train_loop(config)
    assert reported == [{"loss": loss} for loss in losses]
    assert losses[-1] < losses[0]
    assert any(key.startswith("optimizer.") for key in FileSystemReader(folder / "ray").read_metadata().state_dict_metadata)


def example_cases() -> dict[str, Callable[[Path], None]]:
    """By name; the last word of a name is the layout."""
    sys.path.insert(0, str(EXAMPLES))
    return {
        "example-lightning single": partial(lightning_example, "auto"),
        "example-lightning fsdp2": partial(lightning_example, "fsdp2"),
        "example-fabric single": partial(fabric_example, "auto"),
        "example-fabric fsdp2": partial(fabric_example, "fsdp2"),
        "example-ray fsdp2": ray_example,
    }
