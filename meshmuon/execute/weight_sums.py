"""What update rules may know of a weight: its norm, that of its update, and the inner product of the two, matrix by
matrix.

The owner of a matrix has its update, the holders have the weight. The update reaches the holders with the scatter, so
each of them adds up its own products then. One reduction over the ranks completes the sums of all waves that are
finished together, by default the last six, often all; matrices that are whole on their rank need none. What a rule
makes of the sums is two factors per matrix, with which the holders apply the update.

Sums of floating point numbers depend on their order, and so on the layout. These are sums of integers. Powers of 2 to
the 32 are the places of a number. In each stretch of elements the largest product says which place is the highest; of
every product the digits there and in the two places below are added up, and the rest is cut off. In the end, digits
count in the three highest places that the matrix has anywhere, in which no stretch has cut off any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device import copy_to
from .step_param import RunningStep, StepParam, StepSettings
from .update_rule import WeightNumbers, scaled

_BITS = 32  # of a digit
_LOWEST = -320  # exponent of the lowest place: the smallest product of two numbers of float32 is 2⁻²⁹⁸
_PLACES = 18  # up to 2²⁵⁶, the end of these products
_KEPT = 3  # places that count
_OUTSIDE = _PLACES  # where stretches with larger products, of float64, or non-finite ones are counted
_STRETCH = 1 << 20  # elements: their digits add up to less than 2⁵³, exactly in float64
_PRODUCTS = 3  # weight², update², weight·update


def new_table(matrices: int, device: torch.device) -> Tensor:
    """Zeros: for each matrix and product the sums of the digits by place, and the number of stretches by their
    highest place.
    """
    return torch.zeros(matrices, _PRODUCTS, 2, _PLACES + 1, dtype=torch.int64, device=device)


def add_products(table: Tensor, weights: Tensor, updates: Tensor) -> None:
    """Adds the products of (matrices, …) ``weights`` and ``updates`` to the ``table`` of these matrices."""
    weights, updates = weights.reshape(len(table), -1), updates.reshape(len(table), -1)
    for weight, update in zip(torch.split(weights, _STRETCH, 1), torch.split(updates, _STRETCH, 1), strict=True):
        weight, update = weight.double(), update.double()
        for k, products in enumerate((weight * weight, update * update, weight * update)) if weight.numel() else ():
            _add_digits(table[:, k], products)


def _add_digits(table: Tensor, products: Tensor) -> None:
    largest = products.abs().amax(1, keepdim=True)
    exponent = torch.frexp(largest).exponent.long()
    inside = largest.isfinite() & (exponent <= _LOWEST + _BITS * _PLACES)
    highest = torch.where(inside, ((exponent - _LOWEST - 1) // _BITS).clamp(min=_KEPT - 1), _OUTSIDE)
    table[:, 1].scatter_add_(1, highest, (largest != 0).long())
    products = products.masked_fill(~inside, 0.0)
    for place in (highest - k for k in range(_KEPT)):
        unit = torch.ldexp(torch.ones_like(largest), _LOWEST + _BITS * place)
        digits = (products / unit).trunc_()
        table[:, 0].scatter_add_(1, place, digits.sum(1, keepdim=True).long())
        products = products.sub_(digits.mul_(unit))


def sums_of(table: Tensor) -> Tensor:
    """(matrices, products) in float64; NaN where a product is not finite or too large."""
    digits, counts = table.unbind(2)
    places = torch.arange(_PLACES + 1, device=table.device)
    highest = torch.where(counts != 0, places, _KEPT - 1).amax(2, keepdim=True).clamp(max=_PLACES - 1)
    total = torch.zeros(digits.shape[:2], dtype=torch.float64, device=table.device)
    for place in (highest - k for k in reversed(range(_KEPT))):  # the lowest first
        unit = torch.ldexp(torch.ones_like(total), _LOWEST + _BITS * place.squeeze(2))
        total += digits.gather(2, place).squeeze(2).double() * unit
    return total.masked_fill_(counts[:, :, _OUTSIDE] != 0, torch.nan)


@dataclass(frozen=True, slots=True)
class Factors:
    """W ← decay·W − rate·U, as a rule has it: for each matrix 1 − decay and rate."""

    shrink: Tensor
    rate: Tensor

    @classmethod
    def of(cls, step_param: StepParam, sums: Tensor) -> Factors:
        """The factors of all matrices of ``sums``, by the rules of a parameter in this step."""
        settings, shape = step_param.settings, step_param.matrix_set.lr_shape

        def each(value: float | Tensor) -> Tensor:
            return value.to(sums).expand(len(sums)) if isinstance(value, Tensor) else torch.full_like(sums[:, 0], value)

        weight, update, inner = sums.unbind(1)
        lr = each(settings.rate)
        rate, decay = lr * settings.adjust(*shape), each(settings.decay)
        numbers = scaled(step_param.rules, WeightNumbers(weight.sqrt(), update.sqrt(), inner, lr, rate, decay, shape))
        # A step with an lr of 0, also one that is skipped, changes nothing.
        return cls(torch.where(lr == 0, 0.0, 1 - numbers.decay), torch.where(lr == 0, 0.0, numbers.rate))

    def change(
        self, weights: Tensor, updates: Tensor, rows: slice, settings: StepSettings, dtype: torch.dtype
    ) -> Tensor:
        """What is to be subtracted from ``weights``. Overwrites ``updates`` if they have this ``dtype``.

        ``rows`` are the matrices that both begin with; if it is one matrix, they may lack that dim. Every operation
        rounds once.
        """
        count = rows.stop - rows.start
        stacked = (count, *[1] * (weights.dim() - 1)) if count > 1 else ()
        shrink, rate = (factor[rows].to(dtype).reshape(stacked) for factor in (self.shrink, self.rate))
        change, weights = updates.to(dtype).mul_(rate), weights.to(dtype)
        shrunk = weights * shrink
        if settings.cautious:
            shrunk.masked_fill_(weights * change < 0, 0.0)
        return change.add_(shrunk)


@dataclass(frozen=True, slots=True, eq=False)
class WeightSums:
    """The sums of those matrices of a wave or batch whose rules ask for them."""

    table: Tensor  # ``new_table``, on the device of the weights
    reduced_on: torch.device | None = None  # where ranks add up their tables; None if all matrices are whole

    def add_up(self, parts: Iterable[tuple[slice, Tensor, Tensor]], step: RunningStep) -> bool:
        """Fills the table from ``parts``: rows of the table, weights and updates. Returns whether other ranks have
        more of it.
        """
        self.table.zero_()
        for rows, weights, updates in parts:
            add_products(self.table[rows], weights, updates)
        if self.reduced_on is not None:
            step.unreduced.append((self.table, self.reduced_on))
        return self.reduced_on is not None


def reduce_tables(step: RunningStep) -> None:
    """Completes the tables of all waves that are about to apply their updates, on all ranks, in one reduction per
    device.
    """
    assert step.exchange is not None
    with step.streams.on_side_stream(step.ready):
        for device in dict.fromkeys(device for _, device in step.unreduced):
            tables = [table for table, reduced_on in step.unreduced if reduced_on == device]
            total = copy_to(torch.cat(tables), device)
            step.exchange.add_up(total, phase="scatter")
            torch._foreach_copy_(
                tables, torch.split(copy_to(total, tables[0].device), [len(table) for table in tables])
            )
    step.unreduced.clear()
