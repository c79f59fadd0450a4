"""How the Triton kernel cuts a product into tiles: chosen by measuring candidates on the device in use.

All candidates of a dtype cut the inner dim into slices of the same depth. An element is then the sum of the same slices
in the same order, whatever the tiling: ranks that choose different tilings still compute the same bits.
``tests/ortho/kernels`` checks it in Triton's interpreter, and that a compiled candidate uses the same tensor core
instructions as all others.

Each kind of product is measured once: a device of a name, a dtype, a precision, and sizes up to a power of two. The
first call of a kind runs every candidate on its own operands. That is harmless: all candidates write the same bits. The
host waits for the device meanwhile, and Triton compiles each candidate, which takes seconds, unless its cache on disk
has it. The choice is kept for the process. ``MESHMUON_AUTOTUNE=0`` in the environment leaves it out.

Torch's own product, by cuBLAS, contends with them: it does twice the work, and may still be faster on some GPUs. It
sums in another order, so a rank only notes where it was faster (``torch_is_faster``), and all ranks use it, or none.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import itemgetter

import torch

from ...device import Hardware, hardware_of
from ...torch_compat import tf32_allowed

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


# Strips of eight columns put a wave of about 130 programs on a nearly square patch of the result, the shape that shares
# the most loads through L2. Left out after compiling (docs/proofs.md): tiles of 32 and 16 warps make Triton leave wgmma
# and tcgen05 for other instructions, hence other bits; tiles of 256, and of 128 with 4 warps, spill.
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
CANDIDATES: Mapping[torch.dtype, tuple[Tiling, ...]] = {
    torch.bfloat16: _HALF,
    torch.float16: _HALF,
    torch.float32: _SINGLE,
}
"""The tilings that are measured on a device, for each dtype of the operands."""


def default_tiling(dtype: torch.dtype, n: int) -> Tiling:
    """The tiling of n × n results where nothing was measured, from arithmetic.

    Half types: 128 x 128 does 64 FLOP per byte that it loads, and three stages take at most 96 KiB of shared memory
    (sm_80 has 163). Small matrices leave too few large tiles to fill a device (n = 512: 10 tiles of 128, 36 of 64).
    """
    small = 2 if dtype == torch.float32 else 3
    return CANDIDATES[dtype][small if n <= 512 else 0]


@dataclass(frozen=True, slots=True)
class ProductKind:
    """Everything that the choice of tiles depends on. It does not depend on the size of the batch: the first one
    decides.
    """

    device: str  # its name
    dtype: torch.dtype
    precision: str
    n: int  # rows of the result, as a power of two that is not smaller
    k: int  # the inner dim, rounded in the same way
    transposed: bool  # rows of the operands are not contiguous
    addend: bool  # something is added to the product

    @classmethod
    def of(cls, a: torch.Tensor, addend: torch.Tensor | None) -> ProductKind:
        """The kind of ``a @ b.mT``, (batch, n, k) operands."""
        _, n, k = a.shape
        device, precision = hardware_of(a.device).name(a.device), "tf32" if tf32_allowed() else "ieee"
        return cls(device, a.dtype, precision, _power_of_two(n), _power_of_two(k), a.stride(2) != 1, addend is not None)

    def __str__(self) -> str:
        order, added = "transposed" if self.transposed else "row-major", " with an addend" if self.addend else ""
        return f"{self.device}, {self.dtype}, {self.precision}, n <= {self.n}, k <= {self.k}, {order}{added}"


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
        self._chosen: dict[ProductKind, tuple[Tiling, float]] = {}  # with its time
        self.torch_is_faster: dict[ProductKind, bool] = {}  # than every tiling; of kinds for which it was measured

    def choose(
        self,
        kind: ProductKind,
        default: Tiling,
        launch: Callable[[Tiling], None],
        device: torch.device,
        torch_product: Callable[[], None] | None = None,
    ) -> Tiling:
        """The fastest tiling for a kind of product; ``launch`` computes it with a tiling, on ``device``.

        ``default`` where nothing can be measured now, such as while a CUDA graph is captured, and where no candidate
        works. ``torch_product`` computes the same, if torch's own product contends.
        """
        chosen = self._chosen.get(kind)
        if chosen is not None and (torch_product is None or kind in self.torch_is_faster):
            return chosen[0]
        if os.environ.get("MESHMUON_AUTOTUNE") == "0" or not self._hardware.runs_now(device):
            return default if chosen is None else chosen[0]
        if chosen is None:
            contenders = (
                (self._seconds(tiling, partial(launch, tiling), device), tiling)
                for tiling in self._candidates[kind.dtype]
            )
            seconds, tiling = min(contenders, key=itemgetter(0))
            chosen = self._chosen[kind] = (default if seconds == math.inf else tiling, seconds)
            _logger.info("tiles for %s: %s", kind, chosen[0])
        if torch_product is not None:
            self.torch_is_faster[kind] = self._seconds("torch's product", torch_product, device) < chosen[1]
            _logger.info("torch's product is faster for %s: %s", kind, self.torch_is_faster[kind])
        return chosen[0]

    def _seconds(self, contender: object, product: Callable[[], None], device: torch.device) -> float:
        """The time of one product; infinite if it does not run on the device."""

        def repeated(count: int) -> None:
            for _ in range(count):
                product()

        try:
            product()  # compiles it
            once = self._hardware.seconds(device, partial(repeated, 1))
            count = min(_MOST_LAUNCHES, max(1, int(_ROUND_SECONDS / max(once, 1e-9))))
            return min(self._hardware.seconds(device, partial(repeated, count)) / count for _ in range(_ROUNDS))
        except Exception as error:  # too much shared memory, too many registers: Triton has several errors for it
            _logger.info("%s does not run on %s: %s", contender, device, error)
            return math.inf


@lru_cache(maxsize=8)
def tuner_for(device_type: str) -> TileTuner:
    return TileTuner(hardware_of(torch.device(device_type)))
