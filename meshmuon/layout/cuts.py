"""Cutting one tensor dim over mesh axes, as torch's ``Shard`` and ``_StridedShard`` do.

What a rank holds of a dim is an ordered list of half-open index ranges: one range for plain sharding, several for a strided
one. Their order is the order in the rank's local tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

__all__ = ["Range", "Ranges", "clip", "cut", "length", "merged", "position_in", "tiles"]

Range: TypeAlias = tuple[int, int]
"""Indices [start, stop) of a tensor dim."""

Ranges: TypeAlias = tuple[Range, ...]
"""What one rank holds of a tensor dim, in local order; empty when it holds nothing."""


def length(ranges: Ranges) -> int:
    """Number of indices in ``ranges``."""
    return sum(stop - start for start, stop in ranges)


def position_in(ranges: Ranges, position: int) -> int:
    """The index that ``ranges`` list at ``position``."""
    for start, stop in ranges:
        if position < stop - start:
            return start + position
        position -= stop - start
    raise IndexError(position)


@lru_cache(maxsize=1024)
def cut(size: int, chain: tuple[tuple[int, int], ...]) -> tuple[Ranges, ...]:
    """Cuts a dim of ``size`` over several mesh axes, one after the other.

    Args:
        size: length of the dim.
        chain: (parts, split factor) of each mesh axis that shards the dim, in the order of the mesh. A split factor above 1
            first cuts into that many pieces, then each piece into ``parts``, and gives part *i* of every piece to rank *i*.

    Returns:
        The ranges of every combination of coordinates on those axes, the last axis running fastest.
    """
    held: list[Ranges] = [((0, size),) if size else ()]
    for parts, split_factor in chain:
        held = [mine for ranges in held for mine in _shard(ranges, parts, split_factor)]
    return tuple(held)


def clip(ranges: Ranges, start: int, stop: int) -> Ranges:
    """What ``ranges`` have of [start, stop), counted from ``start``."""
    clipped = ((max(first, start) - start, min(last, stop) - start) for first, last in ranges)
    return tuple((first, last) for first, last in clipped if first < last)


def tiles(size: int, covers: Iterable[Ranges]) -> bool:
    """Whether the ranges of all ``covers`` together are every index of a dim of ``size`` exactly once."""
    position = 0
    for start, stop in sorted(one for ranges in covers for one in ranges):
        if start != position or stop <= start:
            return False
        position = stop
    return position == size


def _shard(ranges: Ranges, parts: int, split_factor: int) -> list[Ranges]:
    if split_factor == 1:
        return _chunk(ranges, parts)
    columns = [_chunk(piece, parts) for piece in _chunk(ranges, split_factor)]
    return [merged(one for column in columns for one in column[part]) for part in range(parts)]


def _chunk(ranges: Ranges, parts: int) -> list[Ranges]:
    """``torch.chunk`` on the indices that ``ranges`` list: equal chunks, a smaller one, then empty ones."""
    size = -(-length(ranges) // parts)
    return [_window(ranges, part * size, (part + 1) * size) for part in range(parts)]


def _window(ranges: Ranges, first: int, last: int) -> Ranges:
    """Positions [first, last) of the indices that ``ranges`` list."""
    if len(ranges) == 1:  # the common case, and the one that 2,048 ranks ask for
        (start, stop) = ranges[0]
        begin, end = min(start + first, stop), min(start + last, stop)
        return ((begin, end),) if begin < end else ()
    found = []
    position = 0
    for start, stop in ranges:
        begin, end = max(start, start + first - position), min(stop, start + last - position)
        if begin < end:
            found.append((begin, end))
        position += stop - start
    return tuple(found)


def merged(ranges: Iterable[Range]) -> Ranges:
    """Neighbouring ranges joined."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
