"""The memory of one call of ``iterate``: what it takes, in which order of memory, and how many bytes that is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .kernels.inverse import ShiftedInverses, inverse_work
from .kernels.products import NORM_PARTS
from .rational import Rational
from .schemes import Step
from .workspace import Workspace, is_aligned, pitch

SHORT = (torch.bfloat16, torch.float16)
_SQUARES = ("gram", "factor", "quadratic", "factor_next", "half_step")  # names of n × n buffers; see ``iterate``
# where a rational step is split
_SPLIT_SQUARES = (("gram", "quadratic"), torch.bfloat16), (("gram", "factor"), torch.float32)


def scratch_bytes(rows: int, cols: int, steps: Sequence[Step], dtype: torch.dtype, result_dtype: torch.dtype) -> int:
    """Bytes of scratch that one rows × cols matrix needs, beside the result, while ``steps`` are applied to it.

    In a batch each needs less: the matrices take turns in the buffers of their inverses.
    """
    n, m = min(rows, cols), max(rows, cols)
    x_buffers = 1 if dtype == result_dtype else 2
    rational, wide = any(isinstance(step, Rational) for step in steps), torch.promote_types(dtype, torch.float32)
    squares = _squares(steps, composed=len(steps) != 1 and not (rational and dtype in SHORT), dtype=dtype)
    numbers = x_buffers * pitch(n, m, dtype) * dtype.itemsize + sum(pitch(n, n, of) * of.itemsize for _, of in squares)
    return numbers + (inverse_work(n).scratch * wide.itemsize if rational else 0)


def _squares(steps: Sequence[Step], composed: bool, dtype: torch.dtype) -> list[tuple[str, torch.dtype]]:
    """The n × n buffers that steps need, and their dtypes; ``composed`` where a block has several."""
    kinds = {isinstance(step, Rational) for step in steps}
    if True in kinds and dtype in SHORT:
        return [(name, of) for names, of in _SPLIT_SQUARES for name in names]
    names = _SQUARES if composed else ("gram", *(("factor" if rational else "quadratic") for rational in sorted(kinds)))
    return [(name, dtype) for name in names]


class Scratch:
    """The buffers of one call on a batch: X as (count, n, m), n <= m, in the batch's memory order, and n × n matrices.

    Args:
        workspace: where the buffers are taken from.
        batch: what will be orthogonalised.
        dtype: dtype of the products.
        result: where the result will go.
        splits: whether rational steps are split. They are if ``dtype`` has 16 bits; simulations of such a dtype say so.
    """

    def __init__(
        self,
        workspace: Workspace,
        batch: Tensor,
        dtype: torch.dtype,
        result: Tensor,
        *,
        splits: bool = False,
    ) -> None:
        self._workspace = workspace
        self._dtype, self._wide = dtype, torch.promote_types(dtype, torch.float32)
        self.splits = splits or dtype in SHORT
        self._device = batch.device
        tall = batch.size(1) > batch.size(2)
        batch = short_side_first(batch)
        self._count, self._n, self._m = batch.shape
        self._taken: dict[tuple[str, torch.dtype], Tensor] = {}
        self._inverses: ShiftedInverses | None = None
        # oneDNN may round products of 16 bits by the order of their operands in memory: there it follows from the
        # shape.
        by_shape = dtype in SHORT and batch.device.type == "cpu"
        self.column_major = tall if by_shape else batch.stride(1) < batch.stride(2)
        self.x = self.n_by_m("x")
        scale_dtype = torch.float64 if torch.float64 in (batch.dtype, dtype) else torch.float32
        self.scale = workspace.take("scale", (self._count, 1, 1), scale_dtype, batch.device)
        self.highest = workspace.take("highest", (self._count, 1, 1), batch.dtype, batch.device)
        self.lowest = workspace.take("lowest", (self._count, 1, 1), batch.dtype, batch.device)
        self.result = short_side_first(result)
        # X alternates between two buffers. The result is the second one where it can hold X as products want it.
        ordered = not by_shape or (self.result.stride(1) < self.result.stride(2)) == self.column_major
        self.spare = self.result if result.dtype == dtype and is_aligned(result) and ordered else self.n_by_m("x_next")

    def n_by_m(self, name: str) -> Tensor:
        """A (count, n, m) buffer, transposed in memory when the batch is: BLAS reads both ways equally well."""
        if self.column_major:
            return self._take(name, self._m, self._n, self._dtype).mT
        return self._take(name, self._n, self._m, self._dtype)

    def flat(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        return self._workspace.take(name, (size,), dtype, self._device)

    def square(self, name: str) -> Tensor:
        return self._take(name, self._n, self._n, self._dtype)

    def wide_square(self, name: str) -> Tensor:
        """A square buffer in which inverses are computed: in at least 32 bits."""
        return self._take(name, self._n, self._n, self._wide)

    def _take(self, name: str, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        buffer = self._taken.get((name, dtype))
        if buffer is None:
            buffer = self._workspace.take_matrices(name, (self._count, rows, cols), dtype, self._device)
            self._taken[name, dtype] = buffer
        return buffer

    def inverses(self) -> ShiftedInverses:
        """What computes the factor of a rational step, matrix by matrix."""
        if self._inverses is None:

            def take(name: str, rows: int, cols: int) -> Tensor:
                return self._workspace.take_matrices(name, (1, rows, cols), self._wide, self._device)[0]

            # made in a step inside of it, they would be useless to the next one outside
            with torch.inference_mode(False):
                self._inverses = ShiftedInverses(self._n, take)
        return self._inverses

    def reserve(self, steps: Sequence[Step], blocks: Sequence[int]) -> None:
        """Grows the workspace to all that ``iterate`` will take from it."""
        for name, dtype in _squares(steps, max(blocks) > 1, self._dtype):
            self._take(name, self._n, self._n, dtype)
        # a CUDA graph of a batch would go on writing where the sums were before they grew
        if self._device.type != "cpu":
            self.flat("sums", self._count * NORM_PARTS * 2, torch.float32)
        if self._device.type == "cpu" and any(isinstance(step, Rational) for step in steps):
            self.inverses()  # elsewhere torch's own routines are used, which allocate memory themselves


def short_side_first(batch: Tensor) -> Tensor:
    return batch.mT if batch.size(1) > batch.size(2) else batch
