"""Compiles the Triton kernel ahead of time, for GPUs that are not here, and reads what the compiled kernel needs.

Triton brings its own compiler and assembler, so neither a GPU, a CUDA toolkit nor a C compiler is needed. Triton must
have been imported without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmuon.ortho.kernels.tilings import Tiling

POINTER = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that one program may have
REGISTERS = 65536  # of one multiprocessor, on all of these


@dataclass(frozen=True)
class KernelVariant:
    """What a launch of the kernel is compiled for, beside its tiling."""

    dtype: str
    out: str | None = None  # dtype of the result; by default that of the operands
    addend: bool = True
    diagonal: bool = False
    precision: str = "ieee"
    aligned: bool = True  # contiguous tensors whose sizes are multiples of 16


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel for one architecture."""

    ptx: str
    cubin: bytes
    shared: int  # bytes of shared memory of a program
    warps: int  # of a program, those included that the compiler adds


def compile_kernel(variant: KernelVariant, tiling: Tiling, capability: int) -> CompiledKernel:
    """Compiles the kernel for a compute capability, such as 90."""
    import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped, import-not-found, unused-ignore]

    from meshmuon.ortho.kernels import triton_symmetric

    compiled = triton.compile(
        _source(triton_symmetric._symmetric_kernel, variant, tiling),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tiling.warps, "num_stages": tiling.stages, "enable_fp_fusion": True},
    )
    return CompiledKernel(
        compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata.shared, compiled.metadata.num_warps
    )


def _source(kernel: Any, variant: KernelVariant, tiling: Tiling) -> Any:
    from triton.compiler import ASTSource  # type: ignore[import-untyped, import-not-found, unused-ignore]

    constants: dict[str, Any] = {"tile": tiling.tile, "depth": tiling.depth, "strip": tiling.strip}
    constants |= {"precision": variant.precision, "widen": False}
    if not variant.addend:
        constants["addend"] = None
    if not variant.diagonal:
        constants["diagonal"] = None
    types = dict.fromkeys(("a", "b", "addend"), POINTER[variant.dtype])
    types |= {
        "out": POINTER[variant.out or variant.dtype],
        "alpha": "fp32",
        "beta": "fp32",
        "diagonal": "fp32",
        "n": "i32",
        "k": "i32",
    }
    strides = [name for name in kernel.arg_names if name.endswith(("_batch", "_row", "_column"))]
    if variant.aligned:
        # What a launch tells the compiler about contiguous tensors whose sizes are multiples of 16.
        constants |= dict.fromkeys([name for name in strides if name.endswith("_column")], 1)
    types |= dict.fromkeys(strides, "i32" if variant.aligned else "i64")
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    hints = {
        (position,): [["tt.divisibility", 16]]
        for position, kind in enumerate(signature.values())
        if variant.aligned and kind not in ("constexpr", "fp32")
    }
    return ASTSource(kernel, signature, constants, hints)


@dataclass(frozen=True)
class Resources:
    """What a thread of a compiled kernel needs."""

    registers: int
    stack: int  # bytes: the kernel has no arrays and no calls, so that this is what was spilled for want of registers


def resources_of(cubin: bytes) -> Resources:
    """What the compiled kernel says about itself, read with a tool that Triton brings along."""
    from triton.backends import nvidia  # type: ignore[import-untyped, import-not-found, unused-ignore]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        arguments = [str(Path(nvidia.__file__).parent / "bin" / "cuobjdump"), "-res-usage", str(path)]
        report = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert usage is not None, report
    return Resources(int(usage[1]), int(usage[2]))
