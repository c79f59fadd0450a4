"""Cutting the exchanged matrices into waves: one exchange out, one batch of work, one exchange back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

__all__ = ["Owned", "cut_into_waves"]

_OVERLAP = 6  # waves that let gathers, the work and scatters run at the same time, behind a small first and before a small last
_STEEPEST = 4  # largest wave ÷ smallest


@dataclass(frozen=True, slots=True)
class Owned:
    """A matrix with its owner, as the cutting sees it; ``alike`` matrices are best worked on together."""

    owner: int
    cost: float
    nbytes: int
    alike: Hashable


def cut_into_waves(owned: Sequence[Owned], *, budget: int, chunk_size: int, smallest: float) -> list[int]:
    """The wave of each matrix, counted from 0 without gaps.

    Every owner's matrices are spread over the waves in the same proportions by cost, so that ranks have work at the same time.
    Nothing hides the first gather and the last scatter: waves grow from a small one and shrink to a small one again.

    Args:
        owned: the matrices.
        budget: bytes that one owner may gather per wave; a single larger matrix still gets a wave.
        chunk_size: most matrices per wave over all ranks; -1 leaves it to the budget and the overlap.
        smallest: cost below which a wave per owner is not worth an exchange of its own.
    """
    queues: dict[int, list[int]] = {}
    for k in sorted(range(len(owned)), key=lambda k: (owned[k].owner, repr(owned[k].alike), k)):
        queues.setdefault(owned[k].owner, []).append(k)
    if chunk_size > 0:
        return _by_count(queues, len(owned), chunk_size)
    longest = max(map(len, queues.values()), default=0)
    heaviest = max((sum(owned[k].cost for k in queue) for queue in queues.values()), default=0.0)
    largest = max((sum(owned[k].nbytes for k in queue) for queue in queues.values()), default=0)
    count = max(1, min(longest, max(min(_OVERLAP, int(heaviest / smallest)), largest // budget)))  # fewer could not fit
    while count < longest and not _fits(queues, owned, count, budget):
        count = min(longest, count + 1 + count // 8)
    waves = [0] * len(owned)
    for queue in queues.values():
        for k, wave in zip(queue, _shares([owned[k].cost for k in queue], count, alone=count >= longest), strict=True):
            waves[k] = wave
    return _without_gaps(waves)


def _by_count(queues: dict[int, list[int]], total: int, chunk_size: int) -> list[int]:
    """Runs of ``chunk_size`` matrices: the first of every owner, then the second of every owner, and so on."""
    rounds = sorted((turn, owner, k) for owner, queue in queues.items() for turn, k in enumerate(queue))
    waves = [0] * total
    for position, (_, _, k) in enumerate(rounds):
        waves[k] = position // chunk_size
    return waves


def _fits(queues: dict[int, list[int]], owned: Sequence[Owned], count: int, budget: int) -> bool:
    for queue in queues.values():
        held: dict[int, list[int]] = {}
        for k, wave in zip(queue, _shares([owned[k].cost for k in queue], count, alone=False), strict=True):
            held.setdefault(wave, []).append(owned[k].nbytes)
        if any(len(sizes) > 1 and sum(sizes) > budget for sizes in held.values()):
            return False
    return True


def _shares(costs: Sequence[float], count: int, *, alone: bool) -> list[int]:
    """Wave of each of one owner's matrices: ``count`` runs that grow and shrink by cost, or a wave for each of them."""
    if alone:
        return list(range(len(costs)))
    ends, total = _ends(count), sum(costs) or 1.0
    done, waves = 0.0, []
    for cost in costs:
        waves.append(min(count - 1, bisect_right(ends, (done + cost / 2) / total)))
        done += cost
    return waves


@lru_cache(maxsize=8)
def _ends(count: int) -> tuple[float, ...]:
    """Where each of ``count`` waves ends, as a share of an owner's cost."""
    sizes = [min(wave + 1, count - wave, _STEEPEST) for wave in range(count)]
    whole = sum(sizes)
    return tuple(end / whole for end in accumulate(sizes))


def _without_gaps(waves: list[int]) -> list[int]:
    position = {wave: k for k, wave in enumerate(sorted(set(waves)))}
    return [position[wave] for wave in waves]
