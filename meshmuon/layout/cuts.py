"""Cutting one tensor dim over mesh axes, as torch's ``Shard`` and ``_StridedShard`` do.

What a rank holds of a dim is a list of half-open index ranges, in the order of its local tensor: one range for plain sharding,
several for strided sharding. 18 rows over 8 ranks: ((0, 3),), ((3, 6),), … ((15, 18),) on ranks 0 to 5, and () on ranks 6 and 7.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

from ..matrices import StridedRange

Range: TypeAlias = tuple[int, int]
"""Indices [start, stop) of a tensor dim."""

Ranges: TypeAlias = tuple[Range, ...]
"""What one rank holds of a tensor dim, in local order; empty when it holds nothing."""


def length(ranges: Ranges) -> int:
    """Number of indices in ``ranges``."""
    return sum(stop - start for start, stop in ranges)


def index_at(ranges: Ranges, position: int) -> int:
    """The index at ``position`` of ``ranges``: 9 at position 4 of ((0, 3), (8, 12))."""
    for start, stop in ranges:
        if position < stop - start:
            return start + position
        position -= stop - start
    raise IndexError(position)


@lru_cache(maxsize=1024)
def cut(size: int, chain: tuple[tuple[int, int], ...]) -> tuple[Ranges, ...]:
    """Cuts a dim of ``size`` over several mesh axes, one after the other.

    ``cut(8, ((2, 1), (2, 1)))`` gives rows 0–1, 2–3, 4–5 and 6–7 to the four ranks of a 2×2 mesh. ``cut(8, ((2, 2),))`` gives
    rows 0–1 and 4–5 to the first of two ranks, rows 2–3 and 6–7 to the second.

    Args:
        size: length of the dim.
        chain: (parts, split factor) of each mesh axis that shards the dim, in the order of the mesh. A split factor above 1
            first cuts the dim into that many chunks, then cuts each chunk into ``parts`` and gives part *i* of all of them to
            rank *i*.

    Returns:
        The ranges of every combination of coordinates on those axes, the last axis running fastest.
    """
    held: list[Ranges] = [((0, size),) if size else ()]
    for parts, split_factor in chain:
        held = [shard for ranges in held for shard in _shard(ranges, parts, split_factor)]
    return tuple(held)


def positions(ranges: Ranges, part: StridedRange) -> Ranges:
    """The positions in ``part`` of those of its indices that are in ``ranges``.

    The indices 2 to 9 are ``StridedRange(2, 8)``, of which ((0, 3), (8, 12)) has the positions ((0, 1), (6, 8)).
    """
    return merged((first, last) for first, last in ((part.before(a), part.before(b)) for a, b in ranges) if first < last)


def local_indices(ranges: Ranges, part: StridedRange) -> tuple[StridedRange, ...]:
    """Where the indices of ``part`` are in the local dim of a rank that holds ``ranges``, in order.

    A rank with the indices 3 to 11 holds one index of the first block of ``StridedRange(0, 4, 3, 5)``, the second block, and two
    indices of the third: ``StridedRange(0, 1)``, ``StridedRange(2, 4)`` and ``StridedRange(7, 2)`` of its local dim.
    """
    found: list[StridedRange] = []
    offset = 0
    for start, stop in ranges:
        for inside in part.between(start, stop):
            local = inside.moved(offset - start)
            joined = found[-1].joined(local) if found else None
            if joined is None:
                found.append(local)
            else:
                found[-1] = joined
        offset += stop - start
    return tuple(found)


def tiles(size: int, covers: Iterable[Ranges]) -> bool:
    """Whether the ranges of all ``covers`` together contain every index of a dim of ``size`` exactly once."""
    position = 0
    for start, stop in sorted(span for ranges in covers for span in ranges):
        if start != position or stop <= start:
            return False
        position = stop
    return position == size


def _shard(ranges: Ranges, parts: int, split_factor: int) -> list[Ranges]:
    if split_factor == 1:
        return _chunk(ranges, parts)
    chunks = [_chunk(chunk, parts) for chunk in _chunk(ranges, split_factor)]
    return [merged(span for chunk in chunks for span in chunk[part]) for part in range(parts)]


def _chunk(ranges: Ranges, parts: int) -> list[Ranges]:
    """``torch.chunk`` on the indices in ``ranges``: equal chunks, a smaller one, then empty ones."""
    size = -(-length(ranges) // parts)
    return [_between_positions(ranges, part * size, (part + 1) * size) for part in range(parts)]


def _between_positions(ranges: Ranges, first: int, last: int) -> Ranges:
    """The indices at positions [first, last) of ``ranges``."""
    if len(ranges) == 1:  # the common case, and the one that must be fast for 2,048 ranks
        (start, stop) = ranges[0]
        begin, end = min(start + first, stop), min(start + last, stop)
        return ((begin, end),) if begin < end else ()
    between = []
    position = 0
    for start, stop in ranges:
        begin, end = max(start, start + first - position), min(stop, start + last - position)
        if begin < end:
            between.append((begin, end))
        position += stop - start
    return tuple(between)


def merged(ranges: Iterable[Range]) -> Ranges:
    """``ranges`` with those joined that continue each other: ((0, 3), (3, 6), (8, 9)) becomes ((0, 6), (8, 9))."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
