"""Measures one step while it runs. It writes into a table on the device, and nothing of it makes the host wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..device import known_to_host
from ..errors import KeptError
from ..execute import MatrixKey, Observer
from ..torch_compat import local_part
from .numbers import Column, Numbers
from .spectra import ITERATIONS, Multiply, by_matrices, multiply_each, squares, tridiagonalise

_CHUNK = 1 << 16  # elements of AdamW's moments that are worked on together, so that they stay in a cache


class StepRecorder(Observer):
    """Sees one step of this rank, and writes what it finds into ``numbers``, which are zeros before."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self.failure = KeptError()  # kept until the step ends: other ranks wait for the reduction
        self.adamw_stepped: set[int] = set()  # indices of the parameters that AdamW stepped

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Names the work for the profiler, and keeps an error."""
        with self.failure, self.phase("metrics"), torch.inference_mode(False), torch.no_grad():
            yield

    def gradients(self, matrices: Sequence[MatrixKey], averages: Sequence[Tensor]) -> None:
        with self.measuring():
            norms = torch.stack([torch.linalg.vector_norm(average.double()) for average in averages])
            self._write(matrices, Column.GRADIENT, norms.square_().unsqueeze(1))

    def momentum(self, matrices: Sequence[MatrixKey], stacked: Tensor, *, gram_follows: bool) -> None:
        with self.measuring():
            square = squares(stacked)
            self._write(matrices, Column.MOMENTUM, square.unsqueeze(1))
            if not gram_follows:
                self._write_spectra(matrices, by_matrices(stacked, square.sqrt().to(stacked.dtype)), stacked)

    def gram(self, matrices: Sequence[MatrixKey], gram: Tensor) -> None:
        with self.measuring():
            self._write_spectra(matrices, partial(multiply_each, gram), gram)

    def _write_spectra(self, matrices: Sequence[MatrixKey], multiply: Multiply, like: Tensor) -> None:
        start = self._numbers.start_vector(min(like.shape[1:]), like.dtype).expand(like.size(0), -1)
        self._write(matrices, Column.LANCZOS, tridiagonalise(multiply, start, ITERATIONS))

    def update(self, matrices: Sequence[MatrixKey], stacked: Tensor) -> None:
        with self.measuring():
            self._write(matrices, Column.UPDATE, squares(stacked).unsqueeze(1))

    def _write(self, matrices: Sequence[MatrixKey], column: int, values: Tensor) -> None:
        self._numbers.write(self._numbers.rows_of(matrices), column, values)

    def before_adamw(self, indices: Sequence[int], params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Measures gradients and weights of parameters that AdamW is about to step. ``indices`` are theirs in the
        optimizer.
        """
        self.adamw_stepped.update(indices)
        self._write_adamw(indices, Column.GRADIENT, lambda k: _squares(grads[k]))
        self._write_adamw(indices, Column.WEIGHT, lambda k: _squares(params[k]))

    def after_adamw(
        self, indices: Sequence[int], states: Sequence[Mapping[str, Any]], betas: tuple[float, float], eps: float
    ) -> None:
        """Measures the updates that AdamW has made, from the moments that it has left."""
        self._write_adamw(indices, Column.UPDATE, lambda k: _update_squares(states[k], betas, eps))

    def _write_adamw(self, indices: Sequence[int], column: Column, measure: Callable[[int], Tensor]) -> None:
        """Writes what ``measure`` finds of the k-th of these parameters, (1,), unless another rank counts it."""
        with self.measuring():
            numbers = self._numbers
            rows = {k: numbers.adamw_rows[index] for k, index in enumerate(indices) if index in numbers.adamw_rows}
            if rows:
                numbers.write(numbers.indices(tuple(rows.values())), column, torch.stack([measure(k) for k in rows]))


def _squares(tensor: Tensor) -> Tensor:
    """The sum of squares of the local part of a tensor of any shape, (1,), in float64."""
    local = local_part(tensor)
    return squares((local.reshape(1, -1) if local.dim() < 2 else local.flatten(0, -2)).unsqueeze(0))


def _update_squares(state: Mapping[str, Any], betas: tuple[float, float], eps: float) -> Tensor:
    """The sum of squares of m̂ / (√v̂ + eps) of a parameter with this state, (1,), in float64."""
    mean, square, step = (local_part(state[key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    count = float(step) if known_to_host(step) else step.double()
    first, second = (1 - beta**count for beta in betas)
    norms = [
        torch.linalg.vector_norm(m.float() / v.float().div(second).sqrt_().add_(eps))
        for m, v in zip(*(torch.split(moment.reshape(-1), _CHUNK) for moment in (mean, square)), strict=True)
    ]
    return torch.stack(norms).double().square_().sum().div_(first**2).view(1)
