"""Who tells whom, so that all ranks know what all others know after as few rounds as possible. Pure.

In a round of distance d, rank i sends all that it knows to rank i + d and hears from rank i − d, modulo the number of ranks. The
distances are 1, 2, 4, …: before the round of distance d a rank knows what the d ranks up to itself began with, and after it what
2·d ranks did. With 6 ranks, rank 5 knows of 5 at first, then of 4–5, of 2–5, and of all after 3 rounds.

Ranks that tell each other maxima may hear of one rank twice: a maximum stays the same.
"""

from __future__ import annotations


def distances(size: int) -> tuple[int, ...]:
    """The distance of each round among ``size`` ranks: (1, 2, 4) for 5 to 8 ranks, none for a single one."""
    return tuple(1 << k for k in range((size - 1).bit_length()))


def told_in_round(position: int, size: int, distance: int) -> tuple[int, ...]:
    """Whose values a rank passes on in the round of this distance: all that it knows and the receiver does not know yet.

    Both count modulo ``size``. Only in the last round would the receiver know some of them already.
    """
    return tuple((position - j) % size for j in range(min(distance, size - distance)))
