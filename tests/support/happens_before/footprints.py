"""Which bytes of a block of memory a tensor covers, exactly: columns of one buffer that lie between each other do
not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of a strided tensor, relative to the beginning of its block."""

    start: int  # of its first element, in bytes
    itemsize: int
    # size and stride in bytes of each dim with more than one element; none for an empty tensor
    dims: tuple[tuple[int, int], ...]
    empty: bool = False

    @classmethod
    def of(cls, tensor: Tensor, block_address: int) -> Footprint:
        """The footprint of a strided CPU tensor in the block that begins at ``block_address``."""
        size = tensor.element_size()
        dims = tuple(
            sorted(
                (extent, stride * size)
                for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
                if extent > 1
            )
        )
        return cls(tensor.data_ptr() - block_address, size, dims, tensor.numel() == 0)

    def overlaps(self, other: Footprint) -> bool:
        """Whether the two have a byte in common."""
        if self == other:
            return not self.empty
        return bool(_bytes_of(self) & _bytes_of(other))


@lru_cache(maxsize=1 << 16)
def _bytes_of(footprint: Footprint) -> int:
    """The bytes as the bits of a number: bit k stands for byte k of the block."""
    if footprint.empty:
        return 0
    bits = (1 << footprint.itemsize) - 1
    for extent, stride in footprint.dims:
        bits = _repeated(bits, extent, stride)
    return bits << footprint.start


def _repeated(bits: int, count: int, stride: int) -> int:
    """``bits`` at 0, ``stride``, …, ``(count − 1)·stride``, by doubling."""
    if stride == 0:
        return bits
    result, done, power, size = 0, 0, bits, 1
    while count:
        if count & 1:
            result |= power << (done * stride)
            done += size
        power |= power << (size * stride)
        size *= 2
        count >>= 1
    return result
