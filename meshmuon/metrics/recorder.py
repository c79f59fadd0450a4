"""Measures one step while it runs. It writes into a flat tensor on the device, and nothing of it makes the host wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from ..device import Mark, Stopwatch
from ..execute import MatrixKey, Observer
from ..torch_compat import local_part
from .packing import PHASES, AdamWColumns, Packing
from .spectra import bidiagonalise, defects, probes, squares, start_vector

_P = ParamSpec("_P")
_CHUNK = 1 << 20  # elements of a moment that are worked on at a time


class Indices:
    """Index tensors and fixed directions on the device, made when a plan is new and used at every measured step.

    ``reports`` tells whether this rank reports what it finds out about a matrix; of several ranks that compute it, one does.
    """

    def __init__(self, packing: Packing, reports: Callable[[MatrixKey], bool], device: torch.device) -> None:
        self._packing, self._reports, self._device = packing, reports, device
        self._made: dict[tuple[object, ...], Tensor] = {}

    def columns(self, matrices: Sequence[MatrixKey], first: int, count: int) -> Tensor:
        """Where ``count`` columns of each matrix are, from column ``first`` on; flat."""
        key = (tuple(matrices), first, count)
        if key not in self._made:
            nowhere = self._packing.nowhere
            starts = [self._packing.matrix_start(matrix) if self._reports(matrix) else nowhere for matrix in matrices]
            indices = [start + first + k for start in starts for k in range(count)]
            self._made[key] = torch.tensor(indices, dtype=torch.long).to(self._device)
        return self._made[key]

    def directions(self, size: int, dtype: torch.dtype) -> Tensor:
        """``probes`` on the device."""
        return self._on_device(("probes", size, dtype), lambda: probes(size), dtype)

    def start(self, size: int, dtype: torch.dtype) -> Tensor:
        """``start_vector`` on the device."""
        return self._on_device(("start", size, dtype), lambda: start_vector(size), dtype)

    def _on_device(self, key: tuple[object, ...], make: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        if key not in self._made:
            self._made[key] = make().to(self._device, dtype)
        return self._made[key]


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
    """Sees one step of this rank.

    Args:
        packing: where numbers go.
        packed: the flat tensor, filled with zeros.
        indices: index tensors for it.
        stopwatch: what measures time on the device.
    """

    def __init__(self, packing: Packing, packed: Tensor, indices: Indices, stopwatch: Stopwatch) -> None:
        self.packing, self.packed = packing, packed
        self._indices, self._stopwatch = indices, stopwatch
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
        self._write(matrices, self.packing.columns.gradient, norms.square_().unsqueeze(1))

    @_kept
    def momentum(self, matrices: Sequence[MatrixKey], stacked: Tensor) -> None:
        """Measures norms and largest singular values."""
        size, columns = min(stacked.shape[1:]), self.packing.columns
        square = squares(stacked)
        start = self._indices.start(size, stacked.dtype)
        coefficients = bidiagonalise(stacked, square.sqrt().to(stacked.dtype), start, columns.iterations)
        self._write(matrices, columns.momentum, torch.cat([square.unsqueeze(1), coefficients.double()], dim=1))

    @_kept
    def orthogonalised(self, matrices: Sequence[MatrixKey], stacked: Tensor) -> None:
        """Measures the distance from orthogonality."""
        directions = self._indices.directions(min(stacked.shape[1:]), stacked.dtype)
        self._write(matrices, self.packing.columns.defects, defects(stacked, directions))

    @_kept
    def update(self, matrices: Sequence[MatrixKey], stacked: Tensor) -> None:
        """Measures norms of updates."""
        self._write(matrices, self.packing.columns.update, squares(stacked).unsqueeze(1))

    def _write(self, matrices: Sequence[MatrixKey], first: int, values: Tensor) -> None:
        """Writes (matrices, columns) into the columns from ``first`` on."""
        indices = self._indices.columns(matrices, first, values.size(1))
        self.packed.index_copy_(0, indices, values.to(self.packed.dtype).flatten())

    @_kept
    def before_adamw(self, starts: Sequence[int], params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Measures gradients and weights of AdamW's parameters, whose numbers begin at ``starts``; −1 for what another counts."""
        for start, param, grad in zip(starts, params, grads, strict=True):
            if start >= 0 and local_part(param).numel():
                for column, tensor in ((AdamWColumns.gradient, grad), (AdamWColumns.weight, param)):
                    self.packed[start + column].copy_(_square(local_part(tensor)))

    @_kept
    def after_adamw(
        self, starts: Sequence[int], states: Sequence[Mapping[str, Any]], betas: tuple[float, float], eps: float
    ) -> None:
        """Measures the updates that AdamW has made, from the moments that it has left."""
        for start, state in zip(starts, states, strict=True):
            if start >= 0 and local_part(state["exp_avg"]).numel():
                self.packed[start + AdamWColumns.update].copy_(_adamw_square(state, betas, eps))


def _square(tensor: Tensor) -> Tensor:
    """The sum of squares of a tensor of any dims."""
    rows = tensor.reshape(1, 1, -1) if tensor.dim() < 2 else tensor.reshape(1, tensor.shape[0], -1)
    return squares(rows)[0]


def _adamw_square(state: Mapping[str, Any], betas: tuple[float, float], eps: float) -> Tensor:
    """The sum of squares of m̂ / (√v̂ + eps)."""
    mean, square, step = (local_part(state[key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    first, second = (1 - beta ** step.double() for beta in betas)
    total = torch.zeros((), dtype=torch.float64, device=mean.device)
    if step.device != mean.device:  # the host counts the steps; numbers instead of tensors, which would have to be moved
        first, second = float(first), float(second)  # type: ignore[assignment]
    for m, v in zip(torch.split(mean.reshape(-1), _CHUNK), torch.split(square.reshape(-1), _CHUNK), strict=True):
        change = m.float().div(v.float().div(second).sqrt_().add_(eps)).div_(first)
        total += _square(change)
    return total
