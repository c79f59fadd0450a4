"""What a step works on: one parameter's local tensors and its group's numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..matrices import MatrixSet
from ..ortho import Orthogonalizer, Scheme, pitch, scratch_bytes
from ..plan import BatchItem
from ..torch_compat import local_part

__all__ = ["StepParam", "StepSettings", "UpdateRule", "local_part"]


class UpdateRule(Protocol):
    """What is done to matrices beside orthogonalising them, at the rank that has them whole.

    A batch is (batch, outputs, inputs). Both methods work in place and must treat each matrix by itself. A rule is compared and
    hashed to see which parameters may share a batch; its ``repr`` must be the same on every rank.
    """

    def remembers(self) -> bool:
        """Whether the rule keeps a number per output between steps. They start at zero and are part of the optimizer's state."""
        ...

    def before(self, momentum: Tensor) -> None:
        """Changes the momentum before it is orthogonalised."""
        ...

    def after(self, update: Tensor, memory: Tensor | None) -> None:
        """Changes the orthogonalised update, and ``memory``, (batch, outputs, 1), where the rule remembers."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StepSettings:
    """A group's numbers for this step."""

    momentum: float
    retain: float | Tensor  # what the momentum is multiplied by: ``momentum``, or 1 where nothing may change
    nesterov: bool
    decay: float | Tensor  # what the parameter is multiplied by
    rate: float | Tensor  # lr with the sign of the step, before the shape's factor
    adjust: Callable[[int, int], float]
    free_grad: bool
    cautious: bool = False  # decay only where the update goes the same way
    skip_mask: Tensor | None = None  # on a device: where true, nothing may change


@dataclass(slots=True)
class StepParam:
    """One parameter of the step, or one part of a fused one; the parts have one ``param``.

    Attributes:
        param: the parameter, plain or DTensor; its gradient is freed through it.
        momentum_buffer: its momentum, laid out like it.
        matrices: its matrices, over all ranks.
        scheme: how they are orthogonalised.
        compute_dtype: dtype of the products.
        settings: its group's numbers.
        comm_dtype: dtype on the wire.
        group_index: index of its param group; parameters of one param group share ``settings``.
        zeros: stands in for a gradient that only other ranks have.
        rule: what is done beside orthogonalising.
        rule_state: the rule's numbers per output, laid out like the parameter.
    """

    param: Tensor
    momentum_buffer: Tensor
    matrices: MatrixSet
    scheme: Scheme | Orthogonalizer
    compute_dtype: torch.dtype
    settings: StepSettings
    comm_dtype: torch.dtype = torch.float32
    group_index: int = 0
    zeros: Tensor | None = None
    rule: UpdateRule | None = None
    rule_state: Tensor | None = None

    @property
    def grad(self) -> Tensor:
        """The gradient, held by the parameter alone so that freeing it there frees its memory."""
        grad = self.param.grad if self.zeros is None else self.zeros
        assert grad is not None
        return grad

    @property
    def update_dtype(self) -> torch.dtype:
        """Dtype in which the update is formed: never less than float32."""
        return torch.float64 if self.param.dtype == torch.float64 else torch.float32

    @property
    def treatment(self) -> Hashable:
        """What must be equal for two parameters to share a batch."""
        flipped = self.rule is not None and self.matrices.flipped  # which way round a rule sees them
        return (self.param.device, self.update_dtype, self.compute_dtype, self.scheme, self.rule, flipped)

    def item(self, count: int, *, with_: Hashable = None) -> BatchItem:
        """``count`` of its matrices as the planner of batches sees them; those with another ``with_`` are kept apart."""
        size = pitch(self.matrices.rows, self.matrices.cols, self.update_dtype) * self.update_dtype.itemsize
        steps = self.scheme.steps if isinstance(self.scheme, Scheme) else ()
        scratch = scratch_bytes(self.matrices.rows, self.matrices.cols, steps, self.compute_dtype, self.update_dtype)
        return BatchItem(count, self.matrices.rows, self.matrices.cols, (self.treatment, with_), size + scratch)
