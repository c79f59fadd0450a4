"""How the Triton kernel may cut a product into tiles, and which way is taken without a measurement.

All candidates of a dtype cut the inner dim into slices of the same depth. An element is then the sum of the same slices in the
same order, whatever the tiling: ranks that choose different tilings still compute the same bits. ``tests/ortho/kernels`` checks
it in Triton's interpreter, and that a compiled candidate uses the same tensor core instructions as all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch of the kernel divides its work."""

    tile: int  # rows and columns of one result tile: square, so that a tile's mirror is a tile
    depth: int  # slice of the inner dimension per iteration; the only field on which bits depend
    strip: int  # result columns, in tiles, that programs with neighbouring indices share
    warps: int
    stages: int


# Strips of eight columns put a wave of about 130 programs on a nearly square patch of the result, the shape that shares the most
# loads through L2. What was compiled and left out (docs/gpu.md): tiles of 32 and 16 warps make Triton leave wgmma and tcgen05 for
# other instructions, hence other bits; tiles of 256, and of 128 with 4 warps, spill.
_HALF = (
    Tiling(tile=128, depth=64, strip=8, warps=8, stages=3),
    Tiling(tile=128, depth=64, strip=8, warps=8, stages=4),
    Tiling(tile=64, depth=64, strip=8, warps=4, stages=3),
    Tiling(tile=64, depth=64, strip=8, warps=8, stages=3),
    Tiling(tile=64, depth=64, strip=8, warps=8, stages=4),
)
# Without tf32 these run on FMA units: 128 x 128 over 8 warps is 64 accumulators per thread.
_SINGLE = (
    Tiling(tile=128, depth=32, strip=8, warps=8, stages=3),
    Tiling(tile=128, depth=32, strip=8, warps=8, stages=2),
    Tiling(tile=64, depth=32, strip=8, warps=4, stages=3),
    Tiling(tile=64, depth=32, strip=8, warps=8, stages=3),
)
CANDIDATES: Mapping[torch.dtype, tuple[Tiling, ...]] = MappingProxyType(
    {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: _SINGLE}
)
"""The tilings that are measured on a device, for each dtype of the operands."""

# Without a measurement, from arithmetic. Half types: 128 x 128 does 64 FLOP per byte that it loads, and three stages take at most
# 96 KiB of shared memory (sm_80 has 163). Small matrices leave too few large tiles to fill a device (n = 512: 10 tiles of 128, 36
# of 64).
_LARGE: Mapping[torch.dtype, Tiling] = MappingProxyType(
    {torch.bfloat16: _HALF[0], torch.float16: _HALF[0], torch.float32: _SINGLE[0]}
)
_SMALL: Mapping[torch.dtype, Tiling] = MappingProxyType(
    {torch.bfloat16: _HALF[3], torch.float16: _HALF[3], torch.float32: _SINGLE[2]}
)
_SMALL_UP_TO = 512


def default_tiling(dtype: torch.dtype, n: int) -> Tiling:
    """The tiling of n × n results where nothing was measured."""
    return (_SMALL if n <= _SMALL_UP_TO else _LARGE)[dtype]
