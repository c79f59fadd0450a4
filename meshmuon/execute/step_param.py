"""The data of a running step: ``RunningStep`` and, for each part of the plan, a ``StepParam``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..device import HOST, Mark, Streams
from ..matrices import MatrixSet
from ..ortho import Orthogonalizer, Scheme, pitch, scratch_bytes
from ..plan import BatchItem
from ..torch_compat import local_part, profiler_range
from ..transport import Exchange
from .elementwise import Elementwise
from .rounding import Elements
from .settings import FULL_PRECISION, CommDtype
from .update_rule import UpdateRule, may_fail, rule_memories
from .views import Cut


@dataclass(frozen=True, slots=True, eq=False)
class StepSettings:
    """A param group's options for this step."""

    momentum: float
    retain: float | Tensor  # factor of the old momentum: ``momentum``, or 1 if the step is skipped
    nesterov: bool
    decay: float | Tensor  # factor of the parameter
    rate: float | Tensor  # lr, negated if ``maximize``, before the shape's factor
    adjust: Callable[[int, int], float]  # factor of the lr for a matrix of (outputs, inputs)
    free_grad: bool
    cautious: bool = False  # decay only where the update is zero or moves the weight towards zero
    skip_mask: Tensor | None = None  # on a device, without dims: if true, nothing may change


@dataclass(slots=True)
class StepParam:
    """One part of the plan in a step: a parameter, or a part of a fused one. Parts of one weight have the same
    ``param``.
    """

    param: Tensor  # the parameter, plain or DTensor; its gradient is freed through it
    momentum_buffer: Tensor | None  # its momentum, laid out like it; None where this rank keeps none, and between steps
    matrix_set: MatrixSet  # its matrices, over all ranks
    scheme: Scheme | Orthogonalizer  # how they are orthogonalised
    compute_dtype: torch.dtype  # dtype of the products
    settings: StepSettings  # the options of its param group
    comm_dtype: CommDtype = FULL_PRECISION  # dtypes on the wire
    work_device: torch.device = HOST  # where its matrices travel and are orthogonalised: that of ``device.work_device``
    group_index: int = 0  # index of its param group; parameters of one param group share ``settings``
    zeros: Tensor | None = None  # stands in for a gradient that only other ranks have
    rules: tuple[UpdateRule, ...] = ()  # applied before and after orthogonalising, in this order
    rule_state: Sequence[Tensor] = ()  # for each rule that remembers, its numbers, laid out like the parameter
    # key and count of the random bits of stochastic rounding; None for rounding to nearest
    counter: Tensor | None = None
    # the elements of the whole parameter that this rank holds, hashed; None without a counter
    elements: Elements | None = None

    @property
    def grad(self) -> Tensor:
        """The gradient, held by the parameter alone so that freeing it there frees its memory."""
        grad = self.param.grad if self.zeros is None else self.zeros
        assert grad is not None
        return grad

    @property
    def momentum(self) -> Tensor:
        """The momentum of a parameter for which this rank keeps some."""
        assert self.momentum_buffer is not None
        return self.momentum_buffer

    def counted(self, cut: Cut | None) -> tuple[Tensor, Elements]:
        """What the random bits of this step for a cut of the local tensor follow from: counter and elements."""
        assert self.counter is not None
        assert self.elements is not None
        return self.counter, self.elements.cut_out(cut)

    @property
    def update_dtype(self) -> torch.dtype:
        """Dtype in which the update is formed: never less than float32."""
        return torch.float64 if self.param.dtype == torch.float64 else torch.float32

    @property
    def fallible(self) -> bool:
        """Whether code of the user computes its updates, a scheme or a rule, which may raise in the middle of a step.

        A matrix whose update fails keeps weights and momentum: what the momentum was is kept until the update is
        applied.
        """
        return may_fail(self.scheme, self.rules)

    @property
    def memories(self) -> dict[str, bool]:
        """``rule_memories`` of its rules."""
        return rule_memories(self.rules, self.matrix_set.lr_shape)

    @property
    def staged(self) -> bool:
        """Whether its shards are in host memory and its matrices go to a device and back."""
        return self.param.device.type != self.work_device.type

    def batch_item(self, count: int, *, key: Hashable = None) -> BatchItem:
        """``count`` of its matrices as ``plan_batches`` sees them; matrices with different keys do not share a
        batch.
        """
        rows, cols = self.matrix_set.rows, self.matrix_set.cols
        size = pitch(rows, cols, self.update_dtype) * self.update_dtype.itemsize
        steps = self.scheme.steps if isinstance(self.scheme, Scheme) else ()
        scratch = scratch_bytes(rows, cols, steps, self.compute_dtype, self.update_dtype)
        flipped = bool(self.rules) and self.matrix_set.flipped  # rules see outputs × inputs
        where, dtypes = (self.param.device, self.work_device), (self.update_dtype, self.compute_dtype)
        return BatchItem(count, rows, cols, (where, dtypes, self.scheme, self.rules, flipped, key), size + scratch)


MatrixKey: TypeAlias = tuple[int, int]
"""A matrix of a plan: the index of its part in ``Plan.params``, and its index in the part."""
CheckedUpdates: TypeAlias = "tuple[Sequence[str], Tensor]"
"""The parameters of a batch, matrix by matrix, and on their device a number for each: NaN if its update is not
finite, else 0.
"""


class Observer:
    """Watches a step while an executor runs it. This one measures nothing; it names the phases for the profiler.

    An executor calls it on every rank, and on the main stream except for ``phase``, which is entered on the stream
    whose work it surrounds. For each batch of whole matrices the order is ``momentum``, ``gram``, ``update``. The
    tensors are the executor's own, valid during the call only; they must not be changed. What belongs to idle
    parameters has no meaning.
    """

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Surrounds a phase of the step."""
        return profiler_range(f"meshmuon::{name}")

    def gradients(self, matrices: Sequence[MatrixKey], averages: Sequence[Tensor]) -> None:
        """Gradients that were averaged at their owner; only where ranks have different gradients of the same
        weights.
        """

    def momentum(self, matrices: Sequence[MatrixKey], stacked: Tensor, *, gram_follows: bool) -> None:
        """The momentum to orthogonalise, (batch, rows, cols), before any update rule."""

    def gram(self, matrices: Sequence[MatrixKey], gram: Tensor) -> None:
        """A·Aᵀ of each of these matrices A, divided by its trace, in at least 32 bits; only if ``momentum`` has
        announced it.

        A is transposed where it has more rows than columns.
        """

    def update(self, matrices: Sequence[MatrixKey], stacked: Tensor) -> None:
        """The update, which is multiplied by the learning rate and subtracted from the weights."""


UNOBSERVED = Observer()
"""The observer of a step that nobody measures."""


@dataclass(frozen=True, slots=True)
class RunningStep:
    """One step on one rank, as waves, batches and copies see it."""

    # one per part of the plan, in the order of ``Plan.params``: a ``part_index`` counts these
    params: Sequence[StepParam]
    # have no gradient on any rank: none is written, and what travels of them is arbitrary
    idle: AbstractSet[int] = frozenset()
    observer: Observer = UNOBSERVED
    exchange: Exchange | None = None  # between the ranks of the plan; None where nothing is exchanged
    elementwise: Elementwise = field(default_factory=Elementwise)
    streams: Streams = field(default_factory=Streams)  # of ``device.py``: a main and a side stream on a GPU
    ready: Mark = None  # where the main stream has all gradients
    failures: list[Exception] = field(default_factory=list)  # errors so far on this rank, for the end of the step
    only_compiles: bool = False  # nothing is exchanged, orthogonalised, written or freed
    # if updates are guarded, what this rank has orthogonalised
    checked: list[CheckedUpdates] = field(default_factory=list)

    def freed_gradients(self, indices: Iterable[int]) -> Iterator[Tensor]:
        """The local tensors of the gradients that ``free_gradients`` frees."""
        return (
            local_part(self.params[k].grad) for k in indices if k not in self.idle and self.params[k].settings.free_grad
        )

    def free_gradients(self, indices: Iterable[int]) -> None:
        """Frees the gradients of those parameters whose param group asks for it."""
        for k in indices if not self.only_compiles else ():
            if self.params[k].settings.free_grad:
                self.params[k].param.grad = None
