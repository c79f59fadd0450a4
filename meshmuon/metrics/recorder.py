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
from .adamw_updates import Moments, batches, update_squares
from .packing import PHASES, AdamWColumns, Packing
from .spectra import Multiply, by_gram, by_matrices, defects, probes, squares, start_vector, tridiagonalise
from .sums import Segments, SquareSums, row_norms

_P = ParamSpec("_P")


class Indices:
    """Index tensors and fixed directions on the device, made when a plan is new and used at every measured step.

    ``reports`` tells whether this rank reports what it finds out about a matrix; of several ranks that compute it, one does.
    """

    def __init__(self, packing: Packing, reports: Callable[[MatrixKey], bool], device: torch.device) -> None:
        self._packing, self._reports, self._device = packing, reports, device
        self._made: dict[tuple[object, ...], Tensor] = {}
        self._sums: dict[tuple[object, ...], SquareSums] = {}
        self._segments: dict[tuple[int, ...], Segments] = {}

    def columns(self, matrices: Sequence[MatrixKey], first: int, count: int) -> Tensor:
        """Where ``count`` columns of each matrix are, from column ``first`` on; flat."""
        key = (tuple(matrices), first, count)
        if key not in self._made:
            nowhere = self._packing.nowhere
            starts = [self._packing.matrix_start(matrix) if self._reports(matrix) else nowhere for matrix in matrices]
            indices = [start + first + k for start in starts for k in range(count)]
            self._made[key] = torch.tensor(indices, dtype=torch.long).to(self._device)
        return self._made[key]

    def sums(self, places: Sequence[int], rows: Sequence[int]) -> SquareSums:
        """Sums of squares that belong at ``places``, each of so many ``rows``."""
        key = (tuple(places), tuple(rows))
        if key not in self._sums:
            self._sums[key] = SquareSums(places, rows, self._device)
        return self._sums[key]

    def segments(self, sizes: Sequence[int]) -> Segments:
        """Segments of these ``sizes``."""
        key = tuple(sizes)
        if key not in self._segments:
            self._segments[key] = Segments(sizes, self._device)
        return self._segments[key]

    def places(self, places: Sequence[int]) -> Tensor:
        """A tensor of these indices."""
        return self._on_device(("places", *places), lambda: torch.tensor(places, dtype=torch.long, device="cpu"), torch.long)

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
    def momentum(self, matrices: Sequence[MatrixKey], stacked: Tensor, *, gram_follows: bool) -> None:
        """Measures norms and, unless the Gram matrices follow, largest singular values."""
        square = squares(stacked)
        self._write(matrices, self.packing.columns.momentum, square.unsqueeze(1))
        if not gram_follows:
            self._write_spectra(matrices, by_matrices(stacked, square.sqrt().to(stacked.dtype)), stacked)

    @_kept
    def gram(self, matrices: Sequence[MatrixKey], gram: Tensor) -> None:
        """Measures largest singular values."""
        self._write_spectra(matrices, by_gram(gram), gram)

    def _write_spectra(self, matrices: Sequence[MatrixKey], multiply: Multiply, like: Tensor) -> None:
        columns = self.packing.columns
        start = self._indices.start(min(like.shape[1:]), like.dtype).expand(like.size(0), -1)
        self._write(matrices, columns.momentum + 1, tridiagonalise(multiply, start, columns.iterations))

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
        counted = [k for k, start in enumerate(starts) if start >= 0 and local_part(params[k]).numel()]
        places, norms = [], []
        for column, tensors in ((AdamWColumns.gradient, grads), (AdamWColumns.weight, params)):
            places += [starts[k] + column for k in counted]
            norms += [row_norms(local_part(tensors[k])) for k in counted]
        self._indices.sums(places, [rows.numel() for rows in norms]).write(self.packed, norms)

    @_kept
    def after_adamw(
        self, starts: Sequence[int], states: Sequence[Mapping[str, Any]], betas: tuple[float, float], eps: float
    ) -> None:
        """Measures the updates that AdamW has made, from the moments that it has left."""
        counted = [k for k, start in enumerate(starts) if start >= 0 and local_part(states[k]["exp_avg"]).numel()]
        moments = [Moments.of(states[k]) for k in counted]
        for batch in batches(moments):
            together = [moments[k] for k in batch]
            sizes = [one.mean.numel() for one in together]
            places = self._indices.places([starts[counted[k]] + AdamWColumns.update for k in batch])
            squared = update_squares(together, betas, eps, self._indices.segments(sizes if len(sizes) > 1 else [1]))
            self.packed.index_copy_(0, places, squared.to(self.packed.dtype))
