"""How the Triton kernel cuts a product into tiles: by dtype and size, so that all ranks sum alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch of the kernel divides its work."""

    tile: int  # rows and columns of one result tile: square, so that a tile's mirror is a tile
    depth: int  # slice of the inner dimension per iteration; the only field on which bits depend
    strip: int  # result columns, in tiles, that programs with neighbouring indices share
    warps: int
    stages: int


# Strips of eight columns put a wave of about 130 programs on a nearly square patch of the result, the shape that shares
# the most loads through L2. Half types: 128 x 128 does 64 FLOP per byte that it loads, and three stages take at most
# 96 KiB of shared memory (sm_80 has 163). float32 without tf32 runs on FMA units: 128 x 128 over 8 warps is 64
# accumulators per thread. Tiles of 32 and 16 warps make Triton leave wgmma and tcgen05 for slower instructions; tiles
# of 256, and of 128 with 4 warps, spill.
_HALF = Tiling(tile=64, depth=64, strip=8, warps=8, stages=3), Tiling(tile=128, depth=64, strip=8, warps=8, stages=3)
_SINGLE = Tiling(tile=64, depth=32, strip=8, warps=4, stages=3), Tiling(tile=128, depth=32, strip=8, warps=8, stages=3)
TILINGS: Mapping[torch.dtype, tuple[Tiling, Tiling]] = {
    torch.bfloat16: _HALF,
    torch.float16: _HALF,
    torch.float32: _SINGLE,
}
"""For each dtype of the operands the tiling of small results and that of others, on every compute capability."""


def default_tiling(dtype: torch.dtype, n: int) -> Tiling:
    """The tiling of n × n results.

    Small matrices leave too few large tiles to fill a device (n = 512: 10 tiles of 128, 36 of 64).
    """
    small, large = TILINGS[dtype]
    return small if n <= 512 else large
