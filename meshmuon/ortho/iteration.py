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

from .kernels.products import Products
from .rational import Rational
from .schemes import Step
from .scratch import SHORT, Scratch, short_side_first

# The largest norm that a row of X may have before X is normalised. A power of two, so that it changes no bit. Entries
# of R = X·Xᵀ are at most its square, which float16 holds. With 1 instead, the square of a single large entry among
# 65,536 columns would be a subnormal number of float16.
_LARGEST_ROW_NORM = 64.0


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

    All decisions are made before. The result may be ``batch``; neither may overlap the rest of the scratch.
    """
    batch, result = short_side_first(batch), scratch.result
    x, start = scratch.x, 0
    # Where the result has more digits than X it holds the rescaled batch first, so that X is rounded once, not twice.
    unrounded = result if result.dtype.itemsize > x.dtype.itemsize else None
    normalised = products.normalise(batch, x, scratch.flat)
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
            norm = None if normalised else _normalise(gram, scratch.scale)
            if show_gram is not None:
                show_gram(gram)
            # A quintic on its own adds a·X, so X itself is divided. In 16 bits it is divided, too: from the unrounded
            # batch, if there is one, so that this adds no rounding. Elsewhere the block's n × n factor is divided: one
            # pass over X less.
            if norm is not None and not first_rational and (x.dtype in SHORT or length == 1):
                if unrounded is None:
                    x.div_(norm)
                else:
                    torch.div(unrounded, norm, out=x)
                norm = None
        x_next = _apply_block(x, gram, block, norm, spare, scratch, products)
        x, spare, start = x_next, x, start + length
    if x is not result:
        result.copy_(x)


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
    if scratch.column_major:  # in the order of memory, so that ``out`` is contiguous
        torch.div(batch.mT, scale, out=target.mT)
    else:
        torch.div(batch, scale, out=target)
    if unrounded is not None:
        scratch.x.copy_(unrounded)


def _normalise(gram: Tensor, scale: Tensor) -> Tensor:
    """Divides R = X·Xᵀ by the square of X's Frobenius norm, which is its trace. Returns the norm, written over
    ``scale``.
    """
    torch.sum(gram.diagonal(dim1=1, dim2=2), dim=1, dtype=scale.dtype, out=scale[:, 0, 0])
    # neither dtype may round it to zero
    scale.clamp_(min=max(torch.finfo(gram.dtype).tiny, torch.finfo(scale.dtype).tiny))
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
