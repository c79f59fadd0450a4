"""The iteration: the standard and the Gram form of one scheme, as one loop over blocks of steps.

A block of k steps starts from R = X·Xᵀ and composes its steps in the n × n space,

    P = a·I + b·R + c·R²                        for a quintic,
    P = constant·I + Σ weight·(R + pole·I)⁻¹    for a rational step (a hybrid one adds linear·R + quadratic·R²),
    Q ← P·Q,   R ← P·R·P,

and ends with X ← Q·X. With one quintic per block this is the standard form X ← a·X + (b·R + c·R²)·X. With as few blocks
as the dtype allows it is the Gram form, which touches the long side of X only once per block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .kernels.inverse import ShiftedInverses, inverse_work
from .kernels.products import NORM_PARTS, Products
from .rational import Rational
from .schemes import Step
from .workspace import Workspace, is_aligned, pitch

# The largest norm that a row of X may have before X is normalised. A power of two, so that it changes no bit. Entries
# of R = X·Xᵀ are at most its square, which float16 holds. With 1 instead, the square of a single large entry among
# 65,536 columns would be a subnormal number of float16.
_LARGEST_ROW_NORM = 64.0
_SHORT = (torch.bfloat16, torch.float16)
_SQUARES = ("gram", "factor", "quadratic", "factor_next", "half_step")  # names of n × n buffers; see ``_apply_block``


def scratch_bytes(rows: int, cols: int, steps: Sequence[Step], dtype: torch.dtype, result_dtype: torch.dtype) -> int:
    """Bytes of scratch that one rows × cols matrix needs, beside the result, while ``steps`` are applied to it.

    In a batch each needs less: the matrices take turns in the buffers of their inverses.
    """
    n, m = min(rows, cols), max(rows, cols)
    x_buffers = 1 if dtype == result_dtype else 2
    squares = len(_squares(steps, len(steps) != 1)) * pitch(n, n, dtype)
    inverses = inverse_work(n).scratch if any(isinstance(step, Rational) for step in steps) else 0
    return (x_buffers * pitch(n, m, dtype) + squares + inverses) * dtype.itemsize


def _squares(steps: Sequence[Step], composed: bool) -> tuple[str, ...]:
    """The n × n buffers that steps need; ``composed`` where a block has several."""
    if composed:
        return _SQUARES
    kinds = {isinstance(step, Rational) for step in steps}
    return ("gram", *(("factor" if rational else "quadratic") for rational in sorted(kinds)))


class Scratch:
    """The buffers of one call on a batch: X as (count, n, m), n <= m, in the batch's memory order, and n × n matrices.

    Args:
        workspace: where the buffers are taken from.
        batch: what will be orthogonalised.
        dtype: dtype of the products.
        result: where the result will go.
        norm_floor: the smallest norm by which a matrix is divided.
    """

    def __init__(
        self, workspace: Workspace, batch: Tensor, dtype: torch.dtype, result: Tensor, norm_floor: float = 0.0
    ) -> None:
        self._workspace = workspace
        self.norm_floor = norm_floor
        self._dtype = dtype
        self._device = batch.device
        batch = _short_side_first(batch)
        self._count, self._n, self._m = batch.shape
        self._taken: dict[str, Tensor] = {}
        self._inverses: ShiftedInverses | None = None
        self.column_major = batch.stride(1) < batch.stride(2)
        self.x = self.n_by_m("x")
        scale_dtype = torch.float64 if torch.float64 in (batch.dtype, dtype) else torch.float32
        self.scale = workspace.take("scale", (self._count, 1, 1), scale_dtype, batch.device)
        self.highest = workspace.take("highest", (self._count, 1, 1), batch.dtype, batch.device)
        self.lowest = workspace.take("lowest", (self._count, 1, 1), batch.dtype, batch.device)
        self.result = _short_side_first(result)
        # X alternates between two buffers. The result is the second one where it can hold X as products want it.
        self.spare = self.result if result.dtype == dtype and is_aligned(result) else self.n_by_m("x_next")

    def n_by_m(self, name: str) -> Tensor:
        """A (count, n, m) buffer, transposed in memory when the batch is: BLAS reads both ways equally well."""
        if self.column_major:
            return self._take(name, self._m, self._n).mT
        return self._take(name, self._n, self._m)

    def flat(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        return self._workspace.take(name, (size,), dtype, self._device)

    def square(self, name: str) -> Tensor:
        return self._take(name, self._n, self._n)

    def _take(self, name: str, rows: int, cols: int) -> Tensor:
        buffer = self._taken.get(name)
        if buffer is None:
            shape = self._count, rows, cols
            buffer = self._taken[name] = self._workspace.take_matrices(name, shape, self._dtype, self._device)
        return buffer

    def inverses(self) -> ShiftedInverses:
        """What computes the factor of a rational step, matrix by matrix."""
        if self._inverses is None:

            def take(name: str, rows: int, cols: int) -> Tensor:
                return self._workspace.take_matrices(name, (1, rows, cols), self._dtype, self._device)[0]

            # made in a step inside of it, they would be useless to the next one outside
            with torch.inference_mode(False):
                self._inverses = ShiftedInverses(self._n, take)
        return self._inverses

    def reserve(self, steps: Sequence[Step], blocks: Sequence[int]) -> None:
        """Grows the workspace to all that ``iterate`` will take from it."""
        for name in _squares(steps, max(blocks) > 1):
            self.square(name)
        # a CUDA graph of a batch would go on writing where the sums were before they grew
        if self._device.type != "cpu":
            self.flat("sums", self._count * NORM_PARTS * 2, torch.float32)
        if self._device.type == "cpu" and any(isinstance(step, Rational) for step in steps):
            self.inverses()  # elsewhere torch's own routines are used, which allocate memory themselves


def iterate(
    batch: Tensor,
    steps: Sequence[Step],
    blocks: Sequence[int],
    scratch: Scratch,
    products: Products,
    show_gram: Callable[[Tensor], None] | None = None,
) -> None:
    """Runs ``steps``, cut into ``blocks``, on (count, rows, cols), from ``batch`` into the result that ``scratch`` was
    made for.

    ``show_gram`` is shown the Gram matrices of what is orthogonalised, (count, n, n), divided by their traces.

    All decisions are made before, so that torch.compile can trace it. The result may be ``batch``; neither may overlap
    the rest of the scratch.
    """
    batch, result = _short_side_first(batch), scratch.result
    x, start = scratch.x, 0
    # Where the result has more digits than X it holds the rescaled batch first, so that X is rounded once, not twice.
    unrounded = result if result.dtype.itemsize > x.dtype.itemsize else None
    normalised = not scratch.norm_floor and products.normalise(batch, x, scratch.flat)
    if not normalised:
        _rescale(batch, scratch, unrounded)
    spare = scratch.spare
    for index, length in enumerate(blocks):
        block = steps[start : start + length]
        gram = products.symmetric(x, x, scratch.square("gram"))
        norm = None  # by which ``_apply_block`` must divide
        if index == 0:
            norm = None if normalised else _normalise(gram, scratch.scale, scratch.norm_floor)
            if show_gram is not None:
                show_gram(gram)
            # A quintic on its own adds a·X, so X itself is divided. In 16 bits it is divided, too: from the unrounded
            # batch, if there is one, so that this adds no rounding. Elsewhere the block's n × n factor is divided: one
            # pass over X less.
            if norm is not None and (x.dtype in _SHORT or (length == 1 and not isinstance(block[0], Rational))):
                if unrounded is None:
                    x.div_(norm)
                else:
                    torch.div(unrounded, norm, out=x)
                norm = None
        x_next = _apply_block(x, gram, block, norm, spare, scratch, products)
        x, spare, start = x_next, x, start + length
    if x is not result:
        result.copy_(x)


def _short_side_first(batch: Tensor) -> Tensor:
    return batch.mT if batch.size(1) > batch.size(2) else batch


def _rescale(batch: Tensor, scratch: Scratch, unrounded: Tensor | None) -> None:
    """Writes ``batch`` to scratch with entries of at most ``_LARGEST_ROW_NORM``/√m: no square under- or overflows in
    any dtype.

    ``unrounded`` gets the same before it is rounded.
    """
    scale, highest, lowest = scratch.scale, scratch.highest, scratch.lowest
    # Two vectorised passes: on CPU the maximum norm is ten times slower.
    torch.amax(batch, dim=(1, 2), keepdim=True, out=highest)
    torch.amin(batch, dim=(1, 2), keepdim=True, out=lowest)
    scale.copy_(torch.maximum(highest, lowest.neg_(), out=highest))
    limits = torch.finfo(scale.dtype)
    scale.mul_(math.sqrt(batch.size(2)) / _LARGEST_ROW_NORM).clamp_(min=limits.tiny, max=limits.max)
    target = scratch.x if unrounded is None else unrounded
    if scratch.column_major:  # in the order of memory, so that ``out`` is contiguous and torch.compile can trace it
        torch.div(batch.mT, scale, out=target.mT)
    else:
        torch.div(batch, scale, out=target)
    if unrounded is not None:
        scratch.x.copy_(unrounded)


def _normalise(gram: Tensor, scale: Tensor, norm_floor: float) -> Tensor:
    """Divides R = X·Xᵀ by the square of X's Frobenius norm, which is its trace. Returns the norm, written over
    ``scale``.

    X was divided by ``scale``, and so is ``norm_floor``.
    """
    floor = (norm_floor / scale).square_() if norm_floor else None
    torch.sum(gram.diagonal(dim1=1, dim2=2), dim=1, dtype=scale.dtype, out=scale[:, 0, 0])
    # neither dtype may round it to zero
    scale.clamp_(min=max(torch.finfo(gram.dtype).tiny, torch.finfo(scale.dtype).tiny))
    if floor is not None:
        torch.maximum(scale, floor, out=scale)
    gram.div_(scale)
    return scale.sqrt_()


def _apply_block(
    x: Tensor,
    gram: Tensor,
    steps: Sequence[Step],
    norm: Tensor | None,
    target: Tensor,
    scratch: Scratch,
    products: Products,
) -> Tensor:
    """The steps applied to X, or to X/norm if there is a ``norm``; ``gram`` is the Gram matrix of what they are
    applied to.
    """
    if len(steps) == 1 and not isinstance(steps[0], Rational):
        # a·X is added to the product instead of a·I to the quadratic: in 16 bits that saves a rounding of X.
        a, b, c = steps[0]
        quadratic = products.symmetric(gram, gram, scratch.square("quadratic"), gram, alpha=c, beta=b)
        return products.general(quadratic, x, target, x, beta=a)
    factor = step_factor = _step_factor(steps[0], gram, scratch.square("factor"), scratch, products)
    if len(steps) > 1:
        spare = scratch.square("factor_next")
        for step in steps[1:]:
            half_step = products.symmetric(step_factor, gram, scratch.square("half_step"))
            gram = products.symmetric(half_step, step_factor, scratch.square("gram"))
            step_factor = _step_factor(step, gram, scratch.square("quadratic"), scratch, products)
            # On paper all these matrices commute and the factor is symmetric. In floating point the new step's factor
            # must go on the left, as it would act on X: rounding on the right of the factor is amplified by it, up to a
            # thousand times. Mirroring one triangle would put half of it there, so that this one product is computed in
            # full.
            composed = products.general(step_factor, factor, spare)
            factor, spare = composed, factor
    return products.general(factor if norm is None else factor.div_(norm), x, target)


def _step_factor(step: Step, gram: Tensor, place: Tensor, scratch: Scratch, products: Products) -> Tensor:
    """The symmetric n × n matrix P by which a step multiplies X."""
    if isinstance(step, Rational):
        return products.inverses(gram, step, place, scratch.inverses)
    return products.quintic_factor(gram, place, step)
