"""The Triton kernels: their results in Triton's interpreter, and that they compile for the GPUs they are meant for.

Triton chooses between its compiler and its interpreter when it is imported, so that the interpreter has processes of
its own. The compiler and assembler that Triton brings along need no GPU, CUDA toolkit or C compiler.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshmuon.ortho import Workspace, polar_express, reserve_scratch
from meshmuon.ortho.kernels.products import TritonProducts
from meshmuon.ortho.kernels.tilings import Tiling, default_tiling
from meshmuon.ortho.scratch import Scratch
from tests.support.kernel_compiler import (
    REGISTERS,
    SHARED_MEMORY,
    KernelVariant,
    compile_kernel,
    resources_of,
)
from tests.support.triton_processes import run_interpreted

triton = pytest.importorskip("triton", reason="Triton is not installed: there is no kernel to test")
CAPABILITIES = (80, 90, 100)
# Bytes of a thread, at most: sm_80's assembler spills two words to have room for a fourth program; what is added to the
# diagonal takes a few more, once, after all products.
SPILLED, SPILLED_WITH_DIAGONAL = 16, 40
TENSOR_CORE = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@pytest.mark.parametrize("tests", ["interpreted.py", "interpreted_symmetric.py"])
def test_in_the_interpreter(tests: str) -> None:
    run_interpreted(Path(__file__).with_name(tests))


@pytest.fixture(scope="module", autouse=True)
def compiled_by_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels are compiled, not read from a cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def compiled_ptx(capability: int, tiling: Tiling, variant: KernelVariant) -> str:
    """The code of a kernel that fits the device: hardly anything is spilled, and a multiprocessor has room for it."""
    kernel = compile_kernel(variant, tiling, capability)
    needs = resources_of(kernel.cubin)
    assert re.search(rf"^\.target sm_{capability}a?\b", kernel.ptx, re.MULTILINE)
    assert kernel.shared <= SHARED_MEMORY[capability]
    assert needs.registers * tiling.warps * 32 <= REGISTERS
    spilled = SPILLED_WITH_DIAGONAL if variant.diagonal else SPILLED
    # 64-bit strides are rare, and take many
    assert needs.stack <= spilled or not variant.aligned, "registers are spilled"
    return kernel.ptx


def default_ptx(capability: int, dtype: str, *, n: int = 4096, **variant: Any) -> str:
    return compiled_ptx(capability, default_tiling(getattr(torch, dtype), n), KernelVariant(dtype, **variant))


def tensor_core_instructions(ptx: str) -> set[str]:
    return {instruction for instruction in TENSOR_CORE.values() if re.search(rf"\b{re.escape(instruction)}\b", ptx)}


@pytest.mark.parametrize(
    ("dtype", "addend", "n"),
    [
        ("bfloat16", True, 4096),
        ("float16", False, 4096),
        ("float16", True, 512),  # the largest size with small tiles
        ("float32", False, 4096),
        ("float32", True, 512),
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles(capability: int, dtype: str, addend: bool, n: int) -> None:
    ptx = default_ptx(capability, dtype, addend=addend, n=n)
    # fp32 stays fp32: no tensor core multiplies it without being allowed to round it to tf32.
    assert tensor_core_instructions(ptx) == (set() if dtype == "float32" else {TENSOR_CORE[capability]})
    # Every access to global memory moves 16 bytes: nothing in the kernel breaks up vectors.
    accesses = set(re.findall(r"\b(?:ld|st)\.global\S*", ptx))
    assert accesses
    assert all(re.search(r"\.v[48]\.b32|\.v[24]\.b64", access) for access in accesses), accesses
    assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x\w+)", ptx)) == {"0x10"}


@pytest.mark.parametrize(
    ("dtype", "variant"),
    [
        ("float32", {"precision": "tf32"}),
        ("float16", {"diagonal": True}),
        ("bfloat16", {"out": "float32", "aligned": False}),  # any 64-bit strides and a wider result
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_variants_use_tensor_cores(capability: int, dtype: str, variant: dict[str, Any]) -> None:
    assert tensor_core_instructions(default_ptx(capability, dtype, **variant)) == {TENSOR_CORE[capability]}


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("name", ["sums", "divide"])
def test_kernels_that_normalise_compile_without_spilling(name: str, capability: int) -> None:
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from triton.compiler import ASTSource  # type: ignore[import-untyped, import-not-found, unused-ignore]

    from meshmuon.ortho.kernels import triton_normalise

    kernel = getattr(triton_normalise, f"_{name}_kernel")
    constants = {"parts": triton_normalise.PARTS, "tile": triton_normalise.TILE}
    for integers, out in (("i32", "*bf16"), ("i64", "*fp32")):  # the latter for matrices of 2³¹ elements
        types = {
            "batch": "*fp32",
            "sums": "*fp32",
            "out": out,
            "pitch": integers,
            "size": integers,
            "out_pitch": integers,
        }
        types |= {"tiles": "i32", "parts": "constexpr", "tile": "constexpr"}
        source = ASTSource(kernel, {argument: types[argument] for argument in kernel.arg_names}, constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        assert resources_of(compiled.asm["cubin"]).stack == 0
        assert compiled.metadata.shared <= 16 * 1024


class Launches:
    """Stands in for a kernel, and notes the grids of its launches."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **constants: None


@pytest.mark.parametrize("shape", [(2, 16384, 53248), (70_000, 8, 8)], ids=str)
def test_large_matrices_and_long_batches_fit_a_grid(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
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
