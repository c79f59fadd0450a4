"""Measures one step while it runs. It writes into a table on the device, and nothing of it makes the host wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from ..device import Mark, Stopwatch, known_to_host
from ..execute import MatrixKey, Observer
from ..torch_compat import local_part
from .numbers import PHASES, Column, Numbers
from .spectra import Multiply, by_matrices, defects, multiply_each, squares, tridiagonalise

_P = ParamSpec("_P")
_CHUNK = 1 << 16  # elements of AdamW's moments that are worked on together, so that they stay in a cache


def _kept(method: Callable[_P, None]) -> Callable[_P, None]:
    """A method whose time counts as that of the metrics, and whose error is kept: other ranks wait for the reduction."""

    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        recorder: Any = args[0]
        try:
            with recorder.phase("metrics"), torch.inference_mode(False), torch.no_grad():
                method(*args, **kwargs)
        except Exception as error:
            recorder.failures.append(error)

    return run


class StepRecorder(Observer):
    """Sees one step of this rank, and writes what it finds into ``numbers``, which are zeros before."""

    def __init__(self, numbers: Numbers, stopwatch: Stopwatch) -> None:
        self._numbers, self._stopwatch = numbers, stopwatch
        self._spans: list[tuple[str, str, Mark, Mark]] = []  # phase, phase around it or "", beginning, end
        self._open: list[str] = []
        self.failures: list[Exception] = []
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

    @_kept
    def gradients(self, matrices: Sequence[MatrixKey], averages: Sequence[Tensor]) -> None:
        """Measures averaged gradients."""
        norms = torch.stack([torch.linalg.vector_norm(average.double()) for average in averages])
        self._write(matrices, Column.GRADIENT, norms.square_().unsqueeze(1))

    @_kept
    def momentum(self, matrices: Sequence[MatrixKey], stacked: Tensor, *, gram_follows: bool) -> None:
        """Measures norms and, unless the Gram matrices follow, largest singular values."""
        square = squares(stacked)
        self._write(matrices, Column.MOMENTUM, square.unsqueeze(1))
        if not gram_follows:
            self._write_spectra(matrices, by_matrices(stacked, square.sqrt().to(stacked.dtype)), stacked)

    @_kept
    def gram(self, matrices: Sequence[MatrixKey], gram: Tensor) -> None:
        """Measures largest singular values."""
        self._write_spectra(matrices, partial(multiply_each, gram), gram)

    def _write_spectra(self, matrices: Sequence[MatrixKey], multiply: Multiply, like: Tensor) -> None:
        start = self._numbers.directions(min(like.shape[1:]), like.dtype)[0].expand(like.size(0), -1)
        iterations = (self._numbers.table.size(1) - Column.LANCZOS) // 2
        self._write(matrices, Column.LANCZOS, tridiagonalise(multiply, start, iterations)[0])

    @_kept
    def orthogonalised(self, matrices: Sequence[MatrixKey], stacked: Tensor) -> None:
        """Measures the distance from orthogonality."""
        directions = self._numbers.directions(min(stacked.shape[1:]), stacked.dtype)
        self._write(matrices, Column.DEFECTS, defects(stacked, directions))

    @_kept
    def update(self, matrices: Sequence[MatrixKey], stacked: Tensor) -> None:
        """Measures norms of updates."""
        self._write(matrices, Column.UPDATE, squares(stacked).unsqueeze(1))

    def _write(self, matrices: Sequence[MatrixKey], column: int, values: Tensor) -> None:
        self._numbers.write(self._numbers.rows_of(matrices), column, values)

    @_kept
    def before_adamw(self, rows: Sequence[int | None], params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Measures gradients and weights of AdamW's parameters; a row is None if another rank counts the parameter."""
        self._write_adamw(rows, Column.GRADIENT, grads, lambda k: squares(_as_rows(local_part(grads[k]))))
        self._write_adamw(rows, Column.WEIGHT, params, lambda k: squares(_as_rows(local_part(params[k]))))

    @_kept
    def after_adamw(
        self, rows: Sequence[int | None], states: Sequence[Mapping[str, Any]], betas: tuple[float, float], eps: float
    ) -> None:
        """Measures the updates that AdamW has made, from the moments that it has left."""
        moments = [state["exp_avg"] for state in states]
        self._write_adamw(rows, Column.UPDATE, moments, lambda k: adamw_update_squares(states[k], betas, eps))

    def _write_adamw(
        self, rows: Sequence[int | None], column: Column, tensors: Sequence[Tensor], measure: Callable[[int], Tensor]
    ) -> None:
        counted = {k: row for k, row in enumerate(rows) if row is not None and local_part(tensors[k]).numel()}
        if counted:
            values = torch.stack([measure(k) for k in counted])
            self._numbers.write(self._numbers.indices(tuple(counted.values())), column, values)


def _as_rows(tensor: Tensor) -> Tensor:
    """A tensor of any shape as one matrix, (1, rows, cols)."""
    return tensor.reshape(1, -1, tensor.size(-1) if tensor.dim() else 1)


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
