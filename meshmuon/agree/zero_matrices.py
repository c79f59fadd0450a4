"""Matrices of zeros whose norm is to be kept: a rank sees its own shards alone, so that ranks ask each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from ..params.groups import keeps_norm, nonzero_matrices, zeros_refused
from .identity import current_rank
from .step_decision import RankStatus

Matrices: TypeAlias = tuple[tuple[int, int], ...]
"""The position of a parameter among those that several ranks know, and the number of a matrix in it."""


class ZeroMatrices:
    """What one rank knows of them in a step that brings the first gradients of some parameters.

    Refuses those of parameters that only this rank knows; ``shared`` are the indices of the others.

    Attributes:
        found: of which this rank has zeros alone.
        compared: differs between ranks if any of them has found some. They then gather all ``found`` and call
            ``refuse``.
    """

    def __init__(self, status: RankStatus, shared: Sequence[int]) -> None:
        self._records, self._shared, found = status.records, shared, list[tuple[int, int]]()
        for index in (index for index in status.without_state if keeps_norm(status.records[index].rules)):
            zeros = [number for number, nonzero in self._nonzero(index).items() if not nonzero]
            if zeros and index not in shared:
                raise zeros_refused(self._records[index].name)
            found += [(shared.index(index), number) for number in zeros]
        self.found = tuple(found)
        self.compared = self.found and (current_rank(), self.found)

    def refuse(self, found: Iterable[Matrices], gather: Callable[[Matrices], Mapping[int, Matrices]]) -> None:
        """Raises on all ranks if one of the matrices that any rank has ``found`` is zero on all of them."""
        suspected = sorted({matrix for of_rank in found for matrix in of_rank})
        if not suspected:
            return
        here = {position: self._nonzero(self._shared[position]) for position, _ in suspected}
        by_rank = gather(tuple((position, number) for position, number in suspected if here[position].get(number)))
        nonzero = {matrix for of_rank in by_rank.values() for matrix in of_rank}
        for position, number in suspected:
            if (position, number) not in nonzero:
                raise zeros_refused(self._records[self._shared[position]].name)

    def _nonzero(self, index: int) -> dict[int, bool]:
        record = self._records[index]
        return nonzero_matrices(record.param, record.matrix_sets or ())
