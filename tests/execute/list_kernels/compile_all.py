"""Compiles the list kernels for GPUs that are not here; prints a line of JSON per kernel. Run without
TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re

import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.compiler import ASTSource  # type: ignore[import-untyped, import-not-found, unused-ignore]

from meshmuon.execute import triton_elements
from tests.support.kernel_compiler import resources_of

CAPABILITIES = (80, 89, 90, 100, 120)
ALL_TRUE = ("looks_ahead", "fills", "cautious")
TYPES = {"table": "*i64", "tensors": "i32", "flag": "*fp32", "bits": "i32"}
KERNELS: dict[str, tuple[str, dict[str, object]]] = {
    "momentum": ("momentum", {"kind_1": 0}),
    "update": ("update", {"guarded": False}),
    "guarded update": ("update", {"guarded": True}),
    "copy": ("copy", {}),
    "fill": ("fill", {"kind_1": 0}),
    "nonfinite": ("nonfinite", {}),
}
"""Name of a variant → kernel, and what differs from the other constants."""


def compile_kernel(name: str, capability: int, *, dense: bool) -> dict[str, object]:
    kernel_name, differing = KERNELS[name]
    kernel = getattr(triton_elements, f"{kernel_name}_kernel")
    constants: dict[str, object] = {
        "width": 29,
        "tile_rows": 1 if dense else 32,
        "tile_cols": 2048 if dense else 64,
        "dense": dense,
    }
    for argument in kernel.arg_names:
        if argument in ALL_TRUE or argument == "stochastic":
            constants[argument] = argument in ALL_TRUE or not dense
        elif argument.startswith("kind"):
            constants[argument] = 1
        elif argument.endswith("_in_memory"):
            constants[argument] = not dense
    constants |= differing
    types = {
        argument: "*fp32" if constants.get(f"{argument}_in_memory") else "fp32" for argument in kernel.arg_names
    } | TYPES
    signature = {argument: "constexpr" if argument in constants else types[argument] for argument in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, {(0,): [["tt.divisibility", 16]]})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
    resources = resources_of(compiled.asm["cubin"])
    tensors = re.findall(r"\b(?:ld|st)\.global\S*", compiled.asm["ptx"])
    return {
        "kernel": name,
        "capability": capability,
        "dense": dense,
        "registers": resources.registers,
        "stack": resources.stack,
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "accesses": sorted(set(tensors)),
        "fused": len(re.findall(r"\bfma\.rn\.f32", compiled.asm["ptx"])),
    }


if __name__ == "__main__":
    for variant in KERNELS:
        for kernel_capability in CAPABILITIES:
            for is_dense in (True, False):
                print(json.dumps(compile_kernel(variant, kernel_capability, dense=is_dense)), flush=True)
