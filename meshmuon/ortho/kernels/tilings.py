"""How the Triton kernel cuts a product into tiles: chosen by measuring candidates on the device in use.

All candidates of a dtype cut the inner dim into slices of the same depth. An element is then the sum of the same slices in the
same order, whatever the tiling: ranks that choose different tilings still compute the same bits. ``tests/ortho/kernels`` checks
it in Triton's interpreter, and that a compiled candidate uses the same tensor core instructions as all others.

Each kind of product is measured once: a device of a name, a dtype, a precision, and sizes up to a power of two. The first call of
a kind runs every candidate on its own operands. That is harmless: all candidates write the same bits. The host waits for the
device meanwhile, and Triton compiles each candidate, which takes seconds, unless its cache on disk has it. The choice is kept for
the process. ``MESHMUON_AUTOTUNE=0`` in the environment leaves it out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...device import Hardware

_logger = logging.getLogger(__name__)
_ROUND_SECONDS = 2e-3  # of one timing: long against the resolution of a clock, short against compiling
_MOST_LAUNCHES = 50
_ROUNDS = 3  # the fastest counts: whatever else the device does only adds time


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch of the kernel divides its work."""

    tile: int  # rows and columns of one result tile: square, so that a tile's mirror is a tile
    depth: int  # slice of the inner dimension per iteration; the only field on which bits depend
    strip: int  # result columns, in tiles, that programs with neighbouring indices share
    warps: int
    stages: int


# Strips of eight columns put a wave of about 130 programs on a nearly square patch of the result, the shape that shares the most
# loads through L2. Left out after compiling (docs/proofs.md): tiles of 32 and 16 warps make Triton leave wgmma and tcgen05 for
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
CANDIDATES: Mapping[torch.dtype, tuple[Tiling, ...]] = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: _SINGLE}
"""The tilings that are measured on a device, for each dtype of the operands."""


def default_tiling(dtype: torch.dtype, n: int) -> Tiling:
    """The tiling of n × n results where nothing was measured, from arithmetic.

    Half types: 128 x 128 does 64 FLOP per byte that it loads, and three stages take at most 96 KiB of shared memory (sm_80 has
    163). Small matrices leave too few large tiles to fill a device (n = 512: 10 tiles of 128, 36 of 64).
    """
    small = 2 if dtype == torch.float32 else 3
    return CANDIDATES[dtype][small if n <= 512 else 0]


@dataclass(frozen=True, slots=True)
class ProductKind:
    """What a choice of tiles depends on. Not on the size of the batch: the first one decides."""

    device: str  # its name
    dtype: torch.dtype
    precision: str
    n: int  # rows of the result, as a power of two that is not smaller
    k: int  # the inner dim, likewise
    transposed: bool  # rows of the operands are not contiguous

    @classmethod
    def of(cls, a: torch.Tensor, precision: str, device: str) -> ProductKind:
        """The kind of ``a @ b.mT``, (batch, n, k) operands."""
        _, n, k = a.shape
        return cls(device, a.dtype, precision, _power_of_two(n), _power_of_two(k), a.stride(2) != 1)

    def __str__(self) -> str:
        order = "transposed" if self.transposed else "row-major"
        return f"{self.device}, {self.dtype}, {self.precision}, n <= {self.n}, k <= {self.k}, {order}"


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


class TileTuner:
    """Remembers the fastest tiling of each kind of product.

    Args:
        hardware: times the candidates.
        candidates: the tilings to measure, for each dtype of the operands.
    """

    def __init__(self, hardware: Hardware, candidates: Mapping[torch.dtype, Sequence[Tiling]] = CANDIDATES) -> None:
        self._hardware, self._candidates = hardware, candidates
        self._chosen: dict[ProductKind, Tiling] = {}

    def choose(self, kind: ProductKind, default: Tiling, launch: Callable[[Tiling], None], device: torch.device) -> Tiling:
        """The fastest tiling for a kind of product; ``launch`` computes it with a tiling, on ``device``.

        ``default`` where nothing can be measured now, such as while a CUDA graph is captured, and where no candidate works.
        """
        chosen = self._chosen.get(kind)
        if chosen is None:
            if os.environ.get("MESHMUON_AUTOTUNE") == "0" or not self._hardware.runs_now(device):
                return default
            seconds = {tiling: self._seconds(tiling, launch, device) for tiling in self._candidates[kind.dtype]}
            working = {tiling: time for tiling, time in seconds.items() if time is not None}
            chosen = min(working, key=working.__getitem__, default=default)
            _logger.info("tiles for %s: %s, of %d candidates that work", kind, chosen, len(working))
            self._chosen[kind] = chosen
        return chosen

    def _seconds(self, tiling: Tiling, launch: Callable[[Tiling], None], device: torch.device) -> float | None:
        """The time of one launch; None if the device does not take this tiling."""

        def repeated(count: int) -> None:
            for _ in range(count):
                launch(tiling)

        try:
            launch(tiling)  # compiles it
            once = self._hardware.seconds(device, partial(repeated, 1))
            count = min(_MOST_LAUNCHES, max(1, int(_ROUND_SECONDS / max(once, 1e-9))))
            return min(self._hardware.seconds(device, partial(repeated, count)) / count for _ in range(_ROUNDS))
        except Exception as error:  # too much shared memory, too many registers: Triton has several errors of its own for it
            _logger.info("%s does not run on %s: %s", tiling, device, error)
            return None
