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
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there is no kernel to compile")

ANSWER_WITHIN = 280.0  # seconds, many times what a quiet machine needs: it only ends what hangs
CAPABILITIES = (80, 90, 100)
TENSOR_CORE = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that one program may have
POINTER = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}


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


def _source(kernels: Any, request: dict[str, Any], tiling: Any) -> Any:
    from triton.compiler import ASTSource  # type: ignore[import-untyped, import-not-found, unused-ignore]

    constants: dict[str, Any] = {
        "tile": tiling.tile,
        "depth": tiling.depth,
        "strip": tiling.strip,
        "precision": request["precision"],
        "widen": False,
    }
    if not request["addend"]:
        constants["addend"] = None
    types = {
        "a": POINTER[request["dtype"]],
        "b": POINTER[request["dtype"]],
        "addend": POINTER[request["dtype"]],
    }
    types |= {"out": POINTER[request["out"]], "alpha": "fp32", "beta": "fp32", "n": "i32", "k": "i32"}
    names = kernels._symmetric_kernel.arg_names
    strides = [name for name in names if name.endswith(("_batch", "_row", "_column"))]
    if request["aligned"]:
        # What a launch tells the compiler about contiguous tensors whose sizes are multiples of 16.
        constants |= dict.fromkeys([name for name in strides if name.endswith("_column")], 1)
    types |= dict.fromkeys(strides, "i32" if request["aligned"] else "i64")
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    hints = {
        (position,): [["tt.divisibility", 16]]
        for position, kind in enumerate(signature.values())
        if request["aligned"] and kind not in ("constexpr", "fp32")
    }
    return ASTSource(kernels._symmetric_kernel, signature, constants, hints)


def _compile(kernels: Any, request: dict[str, Any]) -> dict[str, Any]:
    import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped, import-not-found, unused-ignore]

    tiling = kernels._tiling(getattr(torch, request["dtype"]), request["n"])
    compiled = triton.compile(
        _source(kernels, request, tiling),
        target=GPUTarget("cuda", request["capability"], 32),
        options={"num_warps": tiling.warps, "num_stages": tiling.stages},
    )
    cubin = compiled.asm["cubin"]
    return {"ptx": compiled.asm["ptx"], "cubin": cubin[:4].hex(), "shared": compiled.metadata.shared}


def _refuse_cpu(kernels: Any) -> str:
    x = torch.ones(1, 2, 2)
    try:
        kernels.symmetric_product(x, x, out=torch.empty(1, 2, 2))
    except ValueError as error:
        return str(error)
    return ""


def _serve() -> None:
    from meshmuon.ortho.kernels import triton_symmetric as kernels

    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request.pop("compile", False):
                reply = _compile(kernels, request)
            else:
                reply = {"available": kernels.available(), "refusal": _refuse_cpu(kernels)}
        except Exception as error:
            reply = {"error": repr(error)}
        print(json.dumps(reply), flush=True)


# -------------------------------------------------------------------------------------------------- the tests


def compiled_ptx(compiler: Compiler, capability: int, dtype: str, **request: Any) -> str:
    defaults = {"out": dtype, "addend": True, "precision": "ieee", "aligned": True, "n": 4096}
    reply = compiler.ask(compile=True, capability=capability, dtype=dtype, **(defaults | request))
    ptx: str = reply["ptx"]
    assert re.search(rf"^\.target sm_{capability}a?\b", ptx, re.MULTILINE)
    assert reply["cubin"] == b"\x7fELF".hex()
    assert reply["shared"] <= SHARED_MEMORY[capability]
    return ptx


def tensor_core_instructions(ptx: str) -> set[str]:
    return {instruction for instruction in TENSOR_CORE.values() if re.search(rf"\b{re.escape(instruction)}\b", ptx)}


@pytest.mark.parametrize(
    ("dtype", "addend", "n"),
    [
        ("bfloat16", True, 4096),
        ("float16", True, 4096),
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


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_tf32_uses_tensor_cores(compiler: Compiler, capability: int) -> None:
    ptx = compiled_ptx(compiler, capability, "float32", precision="tf32")
    assert tensor_core_instructions(ptx) == {TENSOR_CORE[capability]}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles_for_any_64_bit_strides_and_a_wider_result(compiler: Compiler, capability: int) -> None:
    ptx = compiled_ptx(compiler, capability, "bfloat16", out="float32", aligned=False)
    assert tensor_core_instructions(ptx) == {TENSOR_CORE[capability]}


def test_without_interpreter_a_gpu_is_needed(compiler: Compiler) -> None:
    reply = compiler.ask()
    assert reply["available"] == torch.cuda.is_available()
    assert "TRITON_INTERPRET=1" in reply["refusal"]


if __name__ == "__main__":
    _serve()
