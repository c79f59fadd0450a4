"""Compiles every tiling of the Triton kernel for sm_80, sm_90 and sm_100, and prints what the compiled kernels need.

No GPU is needed. docs/proofs.md sums up what it prints; ``--all`` adds tilings that are no candidates, with the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from meshmuon.ortho.kernels.tilings import CANDIDATES, Tiling
from tests.support.kernel_compiler import SHARED_MEMORY, KernelVariant, compile_kernel, dot_instructions, resources_of

_LEFT_OUT = (
    ("float16", Tiling(tile=32, depth=64, strip=8, warps=4, stages=3)),
    ("float16", Tiling(tile=64, depth=64, strip=8, warps=4, stages=4)),
    ("float16", Tiling(tile=128, depth=64, strip=8, warps=4, stages=3)),
    ("float16", Tiling(tile=128, depth=64, strip=8, warps=16, stages=3)),
    ("float16", Tiling(tile=256, depth=64, strip=8, warps=8, stages=3)),
    ("float32", Tiling(tile=128, depth=32, strip=8, warps=16, stages=3)),
)


def _tilings(*, left_out: bool) -> Iterator[tuple[str, str, Tiling]]:
    for dtype, precision in (("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "ieee"), ("float32", "tf32")):
        yield from ((dtype, precision, tiling) for tiling in CANDIDATES[getattr(torch, dtype)])
    if left_out:
        yield from ((dtype, "ieee", tiling) for dtype, tiling in _LEFT_OUT)


def _row(variant: KernelVariant, tiling: Tiling) -> str:
    cells = []
    for capability, available in SHARED_MEMORY.items():
        kernel = compile_kernel(variant, tiling, capability)
        needs = resources_of(kernel.cubin)
        spilled = f", {needs.stack} bytes spilled" if needs.stack else ""
        room = "" if kernel.shared <= available else ", too much"
        by = ", ".join(sorted(dot_instructions(kernel.ptx))) or "FMA"
        cells.append(f"{needs.registers}{spilled}; {kernel.shared / 1024:.0f} KiB{room}; {by}")
    dtype = "tf32" if variant.precision == "tf32" else variant.dtype
    return f"| {dtype} | {tiling.tile} | {tiling.depth} | {tiling.warps} | {tiling.stages} | {' | '.join(cells)} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="also tilings that are no candidates")
    left_out = parser.parse_args().all
    print(
        "| operands | tile | depth | warps | stages | "
        + " | ".join(f"sm_{capability}" for capability in SHARED_MEMORY)
        + " |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for dtype, precision, tiling in _tilings(left_out=left_out):
        print(_row(KernelVariant(dtype, precision=precision), tiling), flush=True)


if __name__ == "__main__":
    main()
