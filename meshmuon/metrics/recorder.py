"""Measures one step while it runs. It writes into a table on the device, and nothing of it makes the host wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..device import Mark, Stopwatch, known_to_host
from ..errors import KeptError
from ..execute import MatrixKey, Observer
from ..torch_compat import local_part
from .numbers import PHASES, Column, Numbers
from .spectra import Multiply, by_matrices, defects, multiply_each, squares, tridiagonalise

_S = TypeVar("_S")
_CHUNK = 1 << 16  # elements of AdamW's moments that are worked on together, so that they stay in a cache


class StepRecorder(Observer):
    """Sees one step of this rank, and writes what it finds into ``numbers``, which are zeros before.

    ``adamw_rows`` has the rows of AdamW's parameters, by their index in the optimizer; None for those that another rank counts.
    """

    def __init__(self, numbers: Numbers, adamw_rows: Mapping[int, int | None], stopwatch: Stopwatch) -> None:
        self._numbers, self._adamw_rows, self._stopwatch = numbers, adamw_rows, stopwatch
        self._spans: list[tuple[str, str, Mark, Mark]] = []  # phase, phase around it or "", beginning, end
        self._open: list[str] = []
        self.failure = KeptError()  # kept until the step ends: other ranks wait for the reduction
        self.adamw_stepped: set[int] = set()  # indices of the parameters that AdamW stepped
        self.bytes_sent = 0

    def phase(self, name: str, *, waits: bool = False) -> AbstractContextManager[Any]:
        """Measures a phase."""
        return self._timed("wait" if waits else name, super().phase(name))

    @contextmanager
    def _timed(self, name: str, profiled: AbstractContextManager[Any]) -> Iterator[None]:
        around, begin = self._open[-1] if self._open else "", self._stopwatch.now()
        self._open.append(name)
        try:
            with profiled:
                yield
        finally:
            self._open.pop()
            self._spans.append((name, around, begin, self._stopwatch.now()))

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Counts the time as that of the metrics, and keeps an error."""
        with self.failure, self.phase("metrics"), torch.inference_mode(False), torch.no_grad():
            yield

    def seconds(self) -> dict[str, float] | None:
        """Seconds of each phase, without those of phases inside it; None as long as the device is not done with all of them."""
        total = dict.fromkeys(PHASES, 0.0)
        for name, around, begin, end in self._spans:
            duration = self._stopwatch.seconds(begin, end)
            if duration is None:
                return None
            total[name] += duration
            if around:
                total[around] -= duration
        return total

    def sends(self, buffer: Tensor) -> None:
        """Counts bytes."""
        self.bytes_sent += buffer.numel() * buffer.element_size()

    def gradients(self, matrices: Sequence[MatrixKey], averages: Sequence[Tensor]) -> None:
        """Measures averaged gradients."""
        with self.measuring():
            norms = torch.stack([torch.linalg.vector_norm(average.double()) for average in averages])
            self._write(matrices, Column.GRADIENT, norms.square_().unsqueeze(1))

    def momentum(self, matrices: Sequence[MatrixKey], stacked: Tensor, *, gram_follows: bool) -> None:
        """Measures norms and, unless the Gram matrices follow, largest singular values."""
        with self.measuring():
            square = squares(stacked)
            self._write(matrices, Column.MOMENTUM, square.unsqueeze(1))
            if not gram_follows:
                self._write_spectra(matrices, by_matrices(stacked, square.sqrt().to(stacked.dtype)), stacked)

    def gram(self, matrices: Sequence[MatrixKey], gram: Tensor) -> None:
        """Measures largest singular values."""
        with self.measuring():
            self._write_spectra(matrices, partial(multiply_each, gram), gram)

    def _write_spectra(self, matrices: Sequence[MatrixKey], multiply: Multiply, like: Tensor) -> None:
        start = self._numbers.directions(min(like.shape[1:]), like.dtype)[0].expand(like.size(0), -1)
        iterations = (self._numbers.table.size(1) - Column.LANCZOS) // 2
        self._write(matrices, Column.LANCZOS, tridiagonalise(multiply, start, iterations)[0])

    def orthogonalised(self, matrices: Sequence[MatrixKey], stacked: Tensor) -> None:
        """Measures the distance from orthogonality."""
        with self.measuring():
            directions = self._numbers.directions(min(stacked.shape[1:]), stacked.dtype)
            self._write(matrices, Column.DEFECTS, defects(stacked, directions))

    def update(self, matrices: Sequence[MatrixKey], stacked: Tensor) -> None:
        """Measures norms of updates."""
        with self.measuring():
            self._write(matrices, Column.UPDATE, squares(stacked).unsqueeze(1))

    def _write(self, matrices: Sequence[MatrixKey], column: int, values: Tensor) -> None:
        self._numbers.write(self._numbers.rows_of(matrices), column, values)

    def before_adamw(self, indices: Sequence[int], params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Measures gradients and weights of parameters that AdamW is about to step. ``indices`` are theirs in the optimizer."""
        self.adamw_stepped.update(indices)
        for column, tensors in ((Column.GRADIENT, grads), (Column.WEIGHT, params)):
            self._write_adamw(indices, column, tensors, lambda tensor: squares(_as_rows(local_part(tensor))))

    def after_adamw(
        self, indices: Sequence[int], states: Sequence[Mapping[str, Any]], betas: tuple[float, float], eps: float
    ) -> None:
        """Measures the updates that AdamW has made, from the moments that it has left."""
        self._write_adamw(indices, Column.UPDATE, states, lambda state: adamw_update_squares(state, betas, eps))

    def _write_adamw(
        self, indices: Sequence[int], column: Column, sources: Sequence[_S], measure: Callable[[_S], Tensor]
    ) -> None:
        """Writes what ``measure`` finds of each source, (1,), unless another rank counts it."""
        with self.measuring():
            counted = {
                row: source for k, source in zip(indices, sources, strict=True) if (row := self._adamw_rows.get(k)) is not None
            }
            if counted:
                values = torch.stack([measure(source) for source in counted.values()])
                self._numbers.write(self._numbers.indices(tuple(counted)), column, values)


def _as_rows(tensor: Tensor) -> Tensor:
    """A tensor of any shape as one matrix, (1, rows, cols)."""
    return (tensor.reshape(1, -1) if tensor.dim() < 2 else tensor.flatten(0, -2)).unsqueeze(0)


def adamw_update_squares(state: Mapping[str, Any], betas: tuple[float, float], eps: float) -> Tensor:
    """The sum of squares of m̂ / (√v̂ + eps) of a parameter with this state, (1,), in float64."""
    mean, square, step = (local_part(state[key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    count = float(step) if known_to_host(step) else step.double()
    first, second = (1 - beta**count for beta in betas)
    norms = [
        torch.linalg.vector_norm(m.float() / v.float().div(second).sqrt_().add_(eps))
        for m, v in zip(*(torch.split(moment.reshape(-1), _CHUNK) for moment in (mean, square)), strict=True)
    ]
    return torch.stack(norms).double().square_().sum().div_(first**2).view(1)
