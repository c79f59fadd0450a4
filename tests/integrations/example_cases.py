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
    """Ray itself is not installed: only what it starts in each worker. A run in two parts equals one without a
    break.
    """
    import ray_train

    def run(steps: int, start: str | None, name: str) -> list[float]:
        reported: list[tuple[dict[str, float], str | None]] = []
        kept = str(folder / f"ray-{name}")
        losses = ray_train.train(steps, start, kept, lambda metrics, where: reported.append((metrics, where)))
        places = [None] * (len(losses) - 1) + [kept]
        assert reported == [({"loss": loss}, place) for loss, place in zip(losses, places, strict=True)]
        return losses

    whole = run(12, None, "whole")
    assert whole[-1] < whole[0]
    assert [*run(7, None, "begun"), *run(12, str(folder / "ray-begun"), "ended")] == whole
    assert any(
        key.startswith("optimizer.")
        for key in FileSystemReader(folder / "ray-begun").read_metadata().state_dict_metadata
    )


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
