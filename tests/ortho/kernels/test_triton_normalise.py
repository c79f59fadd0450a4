"""What the Triton kernels do before and around the products, in Triton's interpreter, and that they compile for GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshmuon.ortho import Workspace, polar_express, reserve_scratch
from meshmuon.ortho.iteration import Scratch
from meshmuon.ortho.kernels.products import TritonProducts
from tests.support.triton_processes import run_interpreted, run_python

pytest.importorskip("triton", reason="Triton is not installed: there is no kernel to test")


def test_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted.py"))


def test_the_kernels_compile_for_every_gpu_without_spilling(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("compile_normalise.py"))
    kernels = [json.loads(line) for line in run_python([script], TRITON_CACHE_DIR=str(tmp_path)).splitlines()]
    assert len(kernels) == 2 * 5 * 2
    for kernel in kernels:
        assert kernel["stack"] == 0, kernel
        assert kernel["shared"] <= 16 * 1024, kernel


class Launches:
    """Stands in for a kernel, and notes the grids of its launches."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **constants: None


@pytest.mark.parametrize("shape", [(2, 16384, 53248), (70_000, 8, 8)], ids=str)
def test_large_matrices_and_long_batches_fit_a_grid(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from meshmuon.ortho.kernels import triton_normalise

    launches = Launches()
    for name in ("_sums_kernel", "_divide_kernel"):
        monkeypatch.setattr(triton_normalise, name, launches)
    batch = torch.empty(shape, device="meta")
    triton_normalise.normalise(batch, batch, batch)
    assert len(launches.grids) == 2
    for first, *others in launches.grids:
        assert first < 2**31
        assert all(axis < 2**16 for axis in others)  # CUDA's limit


def test_the_memory_of_sums_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it grew later, CUDA graphs of earlier batches would write into memory that was given back."""
    from meshmuon.ortho.kernels import triton_normalise

    taken: list[torch.Tensor] = []
    monkeypatch.setattr(triton_normalise, "normalise", lambda batch, x, sums: taken.append(sums))
    workspace = Workspace()
    batches = [torch.empty(count, 8, 24, device="meta") for count in (2, 9)]
    for batch in batches:
        reserve_scratch(batch, polar_express(), form="auto", dtype=torch.float32, workspace=workspace)
    reserved = workspace.bytes()
    for batch in batches:
        scratch = Scratch(workspace, batch, torch.float32, batch)
        assert TritonProducts().normalise(batch, scratch.x, scratch.flat)
    assert len(taken) == 2
    assert workspace.bytes() == reserved
