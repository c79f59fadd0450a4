"""The iteration: the standard and the Gram form of one scheme, as one loop over blocks of steps.

A block of k steps starts from R = X·Xᵀ and composes its steps in the n × n space,

    P = a·I + b·R + c·R²                        for a quintic,
    P = constant·I + Σ weight·(R + pole·I)⁻¹    for a rational step (a hybrid one adds linear·R + quadratic·R²),
    Q ← P·Q,   R ← P·R·P,

and ends with X ← Q·X. With one quintic per block this is the standard form X ← a·X + (b·R + c·R²)·X. With as few blocks
as the dtype allows it is the Gram form, which touches the long side of X only once per block.

In bfloat16 a rational step is a block of its own, and its n × n matrices are *split*: R and P are sums of two matrices
of 16 bits. X and all large products stay in 16 bits, the inverse is one in 32.
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
# where a rational step is split
_SPLIT_SQUARES = (("gram", "quadratic"), torch.bfloat16), (("gram", "factor"), torch.float32)


def scratch_bytes(rows: int, cols: int, steps: Sequence[Step], dtype: torch.dtype, result_dtype: torch.dtype) -> int:
    """Bytes of scratch that one rows × cols matrix needs, beside the result, while ``steps`` are applied to it.

    In a batch each needs less: the matrices take turns in the buffers of their inverses.
    """
    n, m = min(rows, cols), max(rows, cols)
    x_buffers = 1 if dtype == result_dtype else 2
    rational, wide = any(isinstance(step, Rational) for step in steps), torch.promote_types(dtype, torch.float32)
    squares = _squares(steps, composed=len(steps) != 1 and not (rational and dtype in _SHORT), dtype=dtype)
    numbers = x_buffers * pitch(n, m, dtype) * dtype.itemsize + sum(pitch(n, n, of) * of.itemsize for _, of in squares)
    return numbers + (inverse_work(n).scratch * wide.itemsize if rational else 0)


def _squares(steps: Sequence[Step], composed: bool, dtype: torch.dtype) -> list[tuple[str, torch.dtype]]:
    """The n × n buffers that steps need, and their dtypes; ``composed`` where a block has several."""
    kinds = {isinstance(step, Rational) for step in steps}
    if True in kinds and dtype in _SHORT:
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
        norm_floor: the smallest norm by which a matrix is divided.
        splits: whether rational steps are split. They are if ``dtype`` has 16 bits; simulations of such a dtype say so.
    """

    def __init__(
        self,
        workspace: Workspace,
        batch: Tensor,
        dtype: torch.dtype,
        result: Tensor,
        norm_floor: float = 0.0,
        *,
        splits: bool = False,
    ) -> None:
        self._workspace = workspace
        self.norm_floor = norm_floor
        self._dtype, self._wide = dtype, torch.promote_types(dtype, torch.float32)
        self.splits = splits or dtype in _SHORT
        self._device = batch.device
        tall = batch.size(1) > batch.size(2)
        batch = _short_side_first(batch)
        self._count, self._n, self._m = batch.shape
        self._taken: dict[tuple[str, torch.dtype], Tensor] = {}
        self._inverses: ShiftedInverses | None = None
        # oneDNN may round products of 16 bits by the order of their operands in memory: there it follows from the
        # shape.
        by_shape = dtype in _SHORT and batch.device.type == "cpu"
        self.column_major = tall if by_shape else batch.stride(1) < batch.stride(2)
        self.x = self.n_by_m("x")
        scale_dtype = torch.float64 if torch.float64 in (batch.dtype, dtype) else torch.float32
        self.scale = workspace.take("scale", (self._count, 1, 1), scale_dtype, batch.device)
        self.highest = workspace.take("highest", (self._count, 1, 1), batch.dtype, batch.device)
        self.lowest = workspace.take("lowest", (self._count, 1, 1), batch.dtype, batch.device)
        self.result = _short_side_first(result)
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
        first_rational = isinstance(block[0], Rational)
        if first_rational and scratch.splits:
            gram = _exact_gram(x, scratch, products)
        else:
            gram = products.symmetric(x, x, scratch.square("gram"))
        norm = None  # by which ``_apply_block`` must divide
        if index == 0:
            norm = None if normalised else _normalise(gram, scratch.scale, scratch.norm_floor)
            if show_gram is not None:
                show_gram(gram)
            # A quintic on its own adds a·X, so X itself is divided. In 16 bits it is divided, too: from the unrounded
            # batch, if there is one, so that this adds no rounding. Elsewhere the block's n × n factor is divided: one
            # pass over X less.
            if norm is not None and not first_rational and (x.dtype in _SHORT or length == 1):
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
    if scratch.splits and isinstance(steps[0], Rational):
        factor = products.inverses(gram, steps[0], scratch.wide_square("factor"), scratch.inverses)
        return _apply_split(x, factor if norm is None else factor.div_(norm), target, scratch, products)
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


def _exact_gram(x: Tensor, scratch: Scratch, products: Products) -> Tensor:
    """X·Xᵀ in 32 bits out of products in 16: the rounded product, and what rounding took from it."""
    high = products.symmetric(x, x, scratch.square("gram"))
    low = products.symmetric(x, x, scratch.square("quadratic"), high, beta=-1.0)
    # Copied first: a sum of two dtypes would allocate memory.
    return scratch.wide_square("gram").copy_(high).add_(scratch.wide_square("factor").copy_(low))


def _apply_split(x: Tensor, factor: Tensor, target: Tensor, scratch: Scratch, products: Products) -> Tensor:
    """``factor`` · X, where X has 16 bits and ``factor``, which is overwritten, more: as two products of 16 bits.

    A factor of 16 bits would change what it does to small directions by its largest entries: beside a spike by 0.7 of
    it.
    """
    high, low = scratch.square("gram").copy_(factor), scratch.square("quadratic")
    low.copy_(factor.sub_(scratch.wide_square("gram").copy_(high)))
    rest = products.general(low, x, target)
    return products.general(high, x, target, rest)


def _step_factor(step: Step, gram: Tensor, place: Tensor, scratch: Scratch, products: Products) -> Tensor:
    """The symmetric n × n matrix P by which a step multiplies X."""
    if isinstance(step, Rational):
        return products.inverses(gram, step, place, scratch.inverses)
    return products.quintic_factor(gram, place, step)
