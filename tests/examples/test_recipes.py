"""Every recipe runs as it is, shortened, alone and (as under torchrun) on several ranks; more ranks train as one
device does.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.optional import need
from tests.support.processes import Job, JobRanks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "recipes.md"
STEPS = 6
ALONE = ("one_device", "fused_weights", "qk_clip", "offload", "bf16_weights", "vision", "lora", "schedules")


def run_script(name: str, *arguments: object, **environment: str) -> str:
    """What a script prints when it is started with these arguments."""
    printed = io.StringIO()
    argv = [f"{name}.py", *map(str, arguments)]
    with mock.patch.object(sys, "argv", argv), mock.patch.dict(os.environ, environment), redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


def losses_of(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step +(\d+)  loss ([\d.]+)", printed, re.MULTILINE)}


@dataclass(frozen=True)
class LaunchedRecipe:
    """A script on the ranks of a job, with the environment that torchrun gives it; rank 0 leaves what it printed."""

    name: str
    arguments: Sequence[str]
    file: str

    def __call__(self, folder: Path) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        port: list[int | None] = [None]
        if rank == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port[0] = free.getsockname()[1]
        dist.broadcast_object_list(port)
        dist.destroy_process_group()  # the script makes its own
        torchrun = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port[0],
        }
        arguments = [argument.format(folder=folder) for argument in self.arguments]
        printed = run_script(self.name, *arguments, **{key: str(value) for key, value in torchrun.items()})
        assert not dist.is_initialized()
        if rank == 0:
            (folder / self.file).write_text(printed)
        else:
            # what only this rank can say
            own = [line for line in printed.splitlines() if line.startswith(f"rank {rank} ")]
            assert printed.splitlines() == own, f"rank {rank} prints what rank 0 does"


@pytest.mark.parametrize("name", ALONE)
def test_recipes_for_one_device_leave_other_ranks_of_torchrun_idle(name: str) -> None:
    if name == "lora":
        need("peft")
    assert run_script(name, RANK="1") == ""


def jobs() -> dict[str, Job]:
    steps = ("--steps", str(STEPS))
    worlds = {"ddp": 2, "dist_muon": 4, "hsdp": 4, "tp_fsdp": 4, "moe_ep": 4}
    listed = {name: Job(world, LaunchedRecipe(name, steps, name)) for name, world in worlds.items()}
    saved = ("--folder", "{folder}/saved")
    listed["save"] = Job(2, LaunchedRecipe("resume", (*steps, *saved, "--stop", "2"), "save"))
    listed["resume"] = Job(4, LaunchedRecipe("resume", (*steps, *saved), "resume"))
    return listed


PARALLEL = [name for name in jobs() if name not in ("save", "resume")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[JobRanks]:
    pool = JobRanks(jobs, list(jobs()), folder)
    yield pool
    pool.stop()


@pytest.mark.parametrize("name", PARALLEL)
def test_ranks_train_as_one_device(name: str, ranks: JobRanks, folder: Path) -> None:
    alone = losses_of(run_script(name, "--steps", STEPS))
    ranks.check(name)
    together = losses_of((folder / name).read_text())
    assert list(alone) == [1, STEPS]
    assert alone[STEPS] < alone[1] - 0.02
    # Sums over ranks are added in another order. Without DDP's averages ddp.py was off by 0.014.
    assert together == pytest.approx(alone, abs=5e-4)


def test_a_run_continues_on_more_ranks(ranks: JobRanks, folder: Path) -> None:
    never_stopped = losses_of(run_script("resume", "--steps", STEPS))
    for name in ("save", "resume"):
        ranks.check(name)
    printed = (folder / "resume").read_text()
    assert "resumed after step 2 on 4 rank(s)" in printed
    assert losses_of((folder / "save").read_text())[1] == pytest.approx(never_stopped[1], abs=5e-4)
    assert losses_of(printed) == pytest.approx({step: never_stopped[step] for step in (5, STEPS)}, abs=5e-4)


@pytest.mark.parametrize("name", ["one_device", "vision"])
def test_one_device_learns(name: str) -> None:
    losses = losses_of(run_script(name, "--steps", 8))
    assert losses[8] < losses[1] - 0.05


def table_losses(printed: str) -> dict[str, list[float]]:
    """The losses after the word, by what stands before it."""
    found = re.findall(r"^(.+?)  ?loss ((?:\d+\.\d+ ?)+)", printed, re.MULTILINE)
    return {title.strip(): [float(loss) for loss in losses.split()] for title, losses in found}


def test_a_fused_weight_trains_like_separate_ones() -> None:
    separate, blocks, turns, heads, whole = table_losses(run_script("fused_weights", "--steps", 8)).values()
    assert separate[-1] < separate[0] - 0.02
    assert blocks == pytest.approx(separate, abs=5e-4)
    assert turns == pytest.approx(separate, abs=5e-4)
    assert abs(heads[-1] - separate[-1]) > 2e-3
    assert abs(whole[-1] - separate[-1]) > 2e-3


def test_qk_clip_holds_logits() -> None:
    printed = run_script("qk_clip", "--steps", 12, "--threshold", 0.5)
    without, clipped = (losses_of(part) for part in printed.split("threshold ")[1:])
    logits = [
        [float(logit) for logit in re.findall(r"largest logit ([\d.]+)", part)]
        for part in printed.split("threshold ")[1:]
    ]
    assert without[12] < without[1] - 0.05
    assert clipped[12] < clipped[1] - 0.05
    assert logits[0][0] == logits[1][0]
    assert logits[1][-1] < logits[0][-1] - 0.2


def test_offload_keeps_the_bits() -> None:
    printed = run_script("offload", "--steps", STEPS)
    device, offloaded = (re.findall(r"loss ([\d.]+)", part) for part in printed.split("offload False")[:2])
    assert device == offloaded
    assert float(device[-1]) < float(device[0]) - 0.02


def test_stochastic_rounding_follows_float32() -> None:
    float32, nearest, stochastic = table_losses(run_script("bf16_weights", "--steps", 40)).values()
    assert float32[-1] < float32[0] - 0.1
    assert abs(stochastic[-1] - float32[-1]) < abs(nearest[-1] - float32[-1]) / 2


def test_schedules_of_weight_decay_and_momentum() -> None:
    """A quarter of the decay at twice the width, linear to zero; momentum from 0.85 to 0.95 in the first quarter."""
    text = run_script("schedules", "--steps", 16)
    printed = re.findall(r"width +(\d+)  step +(\d+)  weight decay ([\d.]+)  momentum ([\d.]+)  loss ([\d.]+)", text)
    rows = {(int(width), int(step)): tuple(map(float, values)) for width, step, *values in printed}
    for (width, step), (decay, momentum, _) in rows.items():
        assert decay == pytest.approx(0.2 * (64 / width) ** 2 * (1 - (step - 1) / 16), abs=6e-5)
        assert momentum == pytest.approx(min(0.95, 0.85 + 0.1 * (step - 1) / 4), abs=6e-4)
    assert [key[1] for key in rows] == [1, 4, 8, 12, 16] * 2
    for width in (64, 128):
        assert rows[width, 16][2] < rows[width, 1][2] - 0.3


def test_lora_learns_by_every_route() -> None:
    need("peft")
    printed = run_script("lora", "--steps", 12, "--lr", 8e-3)
    assert "LoRA A, rank 8" in printed
    losses = table_losses(printed)
    assert len(losses) == 3
    for route, values in losses.items():
        assert values[-1] < values[0] - 0.1, route


OF_TRAINERS = ("lightning_fsdp2", "fabric_fsdp2", "ray_train", "torchtitan_muon")


@pytest.mark.parametrize("name", sorted({*ALONE, *PARALLEL, "resume", "fsdp2", *OF_TRAINERS}))
def test_a_recipe_is_short_and_has_its_section(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 105
    assert name in OF_TRAINERS or f"examples/{name}.py" in PAGE.read_text()


def test_the_page_shows_runs_of_these_scripts() -> None:
    """What a page says of a first step is what the script prints; later ones depend on how a machine rounds."""
    shown = re.findall(r"```\n\$ (?:python|torchrun .*) examples/(\w+)\.py\n((?:.|\n)*?)```", PAGE.read_text())
    checked = [(name, losses_of(text)) for name, text in shown if losses_of(text)]
    assert len(checked) >= 4
    for name, losses in checked:
        if name != "lora":
            assert losses_of(run_script(name, "--steps", 1))[1] == pytest.approx(losses[1], abs=2e-3), name
