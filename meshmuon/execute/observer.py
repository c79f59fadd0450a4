"""What a step shows to whoever measures it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor

from ..torch_compat import profiler_range

MatrixKey: TypeAlias = tuple[int, int]
"""A matrix of a plan: the index of its parameter in ``Plan.params``, and its index in the parameter."""


class Observer:
    """Sees a step while an executor runs it. This one measures nothing; it names the phases for the profiler.

    An executor calls it on every rank, and on the main stream except for ``phase``, which is entered on the stream whose work it
    surrounds. For each batch of whole matrices the order is ``momentum``, ``gram``, ``orthogonalised``, ``update``. The tensors
    are the executor's own, valid during the call only; they must not be changed. What belongs to idle parameters has no meaning.
    """

    def phase(self, name: str, *, waits: bool = False) -> AbstractContextManager[Any]:
        """Surrounds a phase of the step; with ``waits``, one that only waits for an exchange of that phase."""
        return profiler_range(f"meshmuon::{name}")

    def sends(self, buffer: Tensor) -> None:
        """``buffer`` is about to be sent to other ranks."""

    def gradients(self, matrices: Sequence[MatrixKey], averages: Sequence[Tensor]) -> None:
        """Gradients that were averaged at their owner; only where ranks have different gradients of the same weights."""

    def momentum(self, matrices: Sequence[MatrixKey], stacked: Tensor, *, gram_follows: bool) -> None:
        """What is about to be orthogonalised, (batch, rows, cols), before any update rule."""

    def gram(self, matrices: Sequence[MatrixKey], gram: Tensor) -> None:
        """A·Aᵀ of each of these matrices A, divided by its trace, in at least 32 bits; only if ``momentum`` has announced it.

        A is transposed where it has more rows than columns.
        """

    def orthogonalised(self, matrices: Sequence[MatrixKey], stacked: Tensor) -> None:
        """The same after orthogonalisation, before the update rule changes it."""

    def update(self, matrices: Sequence[MatrixKey], stacked: Tensor) -> None:
        """What will be multiplied by the learning rate and subtracted from the weights."""


UNOBSERVED = Observer()
"""The observer of a step that nobody measures."""
