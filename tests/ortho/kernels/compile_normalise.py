"""Compiles the kernels that normalise for GPUs that are not here; prints JSON line by line. Run without TRITON_INTERPRET."""

from __future__ import annotations

import json

import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.compiler import ASTSource  # type: ignore[import-untyped, import-not-found, unused-ignore]

from meshmuon.ortho.kernels import triton_normalise
from tests.support.kernel_compiler import resources_of

CAPABILITIES = (80, 89, 90, 100, 120)


def compile_kernel(name: str, capability: int, *, integers: str, out: str) -> dict[str, object]:
    kernel = getattr(triton_normalise, f"_{name}_kernel")
    types = {"batch": "*fp32", "sums": "*fp32", "out": out, "pitch": integers, "size": integers, "out_pitch": integers}
    types |= {"tiles": "i32", "parts": "constexpr", "tile": "constexpr"}
    constants = {"parts": triton_normalise.PARTS, "tile": triton_normalise.TILE}
    source = ASTSource(kernel, {argument: types[argument] for argument in kernel.arg_names}, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
    resources = resources_of(compiled.asm["cubin"])
    return {"kernel": name, "capability": capability, "stack": resources.stack, "shared": compiled.metadata.shared}


if __name__ == "__main__":
    for kernel_name in ("sums", "divide"):
        for kernel_capability in CAPABILITIES:
            for integer_type, out_type in (("i32", "*bf16"), ("i64", "*fp32")):  # the latter for matrices of 2³¹ elements
                print(json.dumps(compile_kernel(kernel_name, kernel_capability, integers=integer_type, out=out_type)), flush=True)
