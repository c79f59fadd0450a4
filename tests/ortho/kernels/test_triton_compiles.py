"""The Triton symmetric product compiles for the GPUs it is meant for, on a machine without one.

Triton brings its own compiler and assembler, so neither a GPU, a CUDA toolkit nor a C compiler is needed.
Compiling needs a Triton that was imported without ``TRITON_INTERPRET``, for the whole process; so it happens
in a process of its own, started from this file and kept for all tests here, whatever the environment of the
test run is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch

from meshmuon.ortho.kernels.tilings import CANDIDATES, Tiling, default_tiling
from tests.support.kernel_compiler import REGISTERS, SHARED_MEMORY, KernelVariant, dot_instructions

pytest.importorskip("triton", reason="Triton is not installed: there is no kernel to compile")

ANSWER_WITHIN = 280.0  # seconds, many times what a quiet machine needs: it only ends what hangs
CAPABILITIES = (80, 90, 100)
# Bytes of a thread, at most: sm_80's assembler spills two words to have room for a fourth program; what is added to the diagonal
# takes a few more, once, after all products.
SPILLED, SPILLED_WITH_DIAGONAL = 16, 40
TENSOR_CORE = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


class Compiler:
    """Answers one line of JSON with another, see `_serve`."""

    def __init__(self, cache: str) -> None:
        self.cache = cache
        self.start()

    def start(self) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = os.environ | {"TRITON_CACHE_DIR": self.cache, "PYTHONPATH": path}
        environment.pop("TRITON_INTERPRET", None)
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def ask(self, **request: object) -> Any:
        if self.process.poll() is not None:
            self.start()  # a compiler that crashes takes its process along, but not other tests
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        watchdog = threading.Timer(ANSWER_WITHIN, self.process.kill)
        watchdog.start()
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        if not answer:
            raise RuntimeError(f"the compiler's process ended with code {self.process.wait()}")
        reply = json.loads(answer)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    def close(self) -> None:
        self.process.communicate()  # closes its input, which is its sign to end


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    process = Compiler(str(tmp_path_factory.mktemp("triton")))
    yield process
    process.close()


# ------------------------------------------------------------------------------------- the compiler's process


def _compile(request: dict[str, Any]) -> dict[str, Any]:
    from tests.support.kernel_compiler import compile_kernel, resources_of

    kernel = compile_kernel(KernelVariant(**request["variant"]), Tiling(**request["tiling"]), request["capability"])
    return {"ptx": kernel.ptx, "cubin": kernel.cubin[:4].hex(), "shared": kernel.shared, **asdict(resources_of(kernel.cubin))}


def _serve() -> None:
    for line in sys.stdin:
        try:
            reply = _compile(json.loads(line))
        except Exception as error:
            reply = {"error": repr(error)}
        print(json.dumps(reply), flush=True)


# -------------------------------------------------------------------------------------------------- the tests


def compiled(compiler: Compiler, capability: int, tiling: Tiling, variant: KernelVariant) -> dict[str, Any]:
    """The reply for a kernel that fits the device: hardly anything is spilled, and a multiprocessor has room for it."""
    reply: dict[str, Any] = compiler.ask(capability=capability, tiling=asdict(tiling), variant=asdict(variant))
    assert re.search(rf"^\.target sm_{capability}a?\b", reply["ptx"], re.MULTILINE)
    assert reply["cubin"] == b"\x7fELF".hex()
    assert reply["shared"] <= SHARED_MEMORY[capability]
    assert reply["registers"] * tiling.warps * 32 <= REGISTERS
    spilled = SPILLED_WITH_DIAGONAL if variant.diagonal else SPILLED
    assert reply["stack"] <= spilled or not variant.aligned, "registers are spilled"  # 64-bit strides are rare, and take many
    return reply


def compiled_ptx(compiler: Compiler, capability: int, dtype: str, *, n: int = 4096, **variant: Any) -> str:
    tiling = default_tiling(getattr(torch, dtype), n)
    ptx: str = compiled(compiler, capability, tiling, KernelVariant(dtype, **variant))["ptx"]
    return ptx


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
def test_compiles(compiler: Compiler, capability: int, dtype: str, addend: bool, n: int) -> None:
    ptx = compiled_ptx(compiler, capability, dtype, addend=addend, n=n)
    # fp32 stays fp32: no tensor core multiplies it without being allowed to round it to tf32.
    assert tensor_core_instructions(ptx) == (set() if dtype == "float32" else {TENSOR_CORE[capability]})
    # Every access to global memory moves 16 bytes: nothing in the kernel breaks up vectors.
    accesses = set(re.findall(r"\b(?:ld|st)\.global\S*", ptx))
    assert accesses
    assert all(re.search(r"\.v[48]\.b32|\.v[24]\.b64", access) for access in accesses), accesses
    assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x\w+)", ptx)) == {"0x10"}


# One architecture for each candidate keeps it short; ``benchmarks/tiles.py`` compiles all of them for all.
OTHERS = [
    (dtype, precision, tiling)
    for dtype, precision in (("float16", "ieee"), ("float32", "tf32"))
    for tiling in CANDIDATES[getattr(torch, dtype)]
    if tiling not in (default_tiling(getattr(torch, dtype), 4096), default_tiling(getattr(torch, dtype), 512))
]


@pytest.mark.parametrize("position", range(len(OTHERS)))
def test_candidates_multiply_with_the_same_instructions_as_the_default(compiler: Compiler, position: int) -> None:
    """The instructions sum the inner dim. With others, bits would depend on which tiling was measured to be the fastest."""
    dtype, precision, tiling = OTHERS[position]
    capability = CAPABILITIES[position % 3]
    variant = KernelVariant(dtype, precision=precision)
    replies = [
        compiled(compiler, capability, chosen, variant) for chosen in (tiling, default_tiling(getattr(torch, dtype), 4096))
    ]
    instructions = [dot_instructions(reply["ptx"]) for reply in replies]
    assert instructions[0] == instructions[1]
    assert instructions[0]


def test_what_was_left_out_has_a_reason(compiler: Compiler) -> None:
    """A tile of 32 is multiplied by other instructions on sm_90."""
    variant = KernelVariant("float16")
    small, usual = (Tiling(tile, 64, 8, 4, 3) for tile in (32, 64))
    small_ptx, usual_ptx = (compiled(compiler, 90, tiling, variant)["ptx"] for tiling in (small, usual))
    assert dot_instructions(small_ptx) == {"mma.sync k16"}
    assert dot_instructions(usual_ptx) == {"wgmma k16"}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_tf32_uses_tensor_cores(compiler: Compiler, capability: int) -> None:
    ptx = compiled_ptx(compiler, capability, "float32", precision="tf32")
    assert tensor_core_instructions(ptx) == {TENSOR_CORE[capability]}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles_with_a_diagonal(compiler: Compiler, capability: int) -> None:
    assert tensor_core_instructions(compiled_ptx(compiler, capability, "float16", diagonal=True)) == {TENSOR_CORE[capability]}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles_for_any_64_bit_strides_and_a_wider_result(compiler: Compiler, capability: int) -> None:
    ptx = compiled_ptx(compiler, capability, "bfloat16", out="float32", aligned=False)
    assert tensor_core_instructions(ptx) == {TENSOR_CORE[capability]}


if __name__ == "__main__":
    _serve()
