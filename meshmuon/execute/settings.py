"""The optimizer's options for batching and computing matrices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import torch

from ..device import device_memory, memory_budget_for
from ..errors import ConfigError
from ..ortho import FORMS
from ..ortho.kernels.products import Products, kernels_asked_for, products_for

CommDtypeLike: TypeAlias = "torch.dtype | tuple[torch.dtype | None, torch.dtype | None] | None"
"""``comm_dtype`` as users write it; None is the default."""


class CommDtype(NamedTuple):
    """Dtypes on the wire."""

    gather: torch.dtype  # of what goes to the owners
    scatter: torch.dtype  # of what comes back

    @classmethod
    def of(cls, given: CommDtypeLike, default: torch.dtype) -> CommDtype:
        gather, scatter = given if isinstance(given, (tuple, list)) else (given, given)
        return cls(gather or default, scatter or default)

    def __str__(self) -> str:
        return str(self.gather) if self.gather == self.scatter else f"({self.gather}, {self.scatter})"


FULL_PRECISION = CommDtype(torch.float32, torch.float32)


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """How matrices are batched and computed."""

    chunk_size: int = -1  # most matrices per batch, as per wave in a plan; -1 lets ``memory_budget`` decide
    memory_budget: int | None = None  # bytes of scratch that one batch may use; a single larger matrix still runs
    form: str = "auto"  # ``"auto"``, ``"standard"`` or ``"gram"``
    # multiply the matrices of a batch one by one, so that batching does not change the results
    deterministic: bool = False
    cuda_graphs: bool = False  # replay the orthogonalisation of each batch as a CUDA graph (no effect on CPU)
    kernels: str = field(default_factory=kernels_asked_for)  # who computes symmetric products on a GPU
    guarded: bool = False  # a matrix whose update is not finite keeps weights, momentum and rule state

    def __post_init__(self) -> None:
        if self.chunk_size != -1 and self.chunk_size < 1:
            raise ConfigError(
                f"chunk_size={self.chunk_size} must be -1 (chosen by memory) or at least 1 matrix per batch."
            )
        if self.memory_budget is not None and self.memory_budget < 1:
            raise ConfigError(f"memory_budget={self.memory_budget} must be a positive number of bytes.")
        if self.form not in FORMS:
            raise ConfigError(f"form={self.form!r} is unknown; write one of {FORMS}.")

    @property
    def bits(self) -> str:
        """What the bits of an update depend on beside plan and param groups, as text that ranks compare."""
        return f"kernels={self.kernels!r}"

    def products(self, device: torch.device) -> Products:
        """Who multiplies on ``device``.

        ``"auto"`` is Triton on every rank, also where it is missing: ranks must not mix kernels, and fall back
        together.
        """
        kernels = "triton" if self.kernels == "auto" else self.kernels
        return products_for(device, deterministic=self.deterministic, kernels=kernels)

    def batch_bytes(self, device: torch.device) -> int:
        """Bytes of scratch that one batch may use on ``device``: by default twice what a GPU's owners gather per
        wave.
        """
        memory = device_memory(device)
        return self.memory_budget or memory_budget_for(memory) * (1 if memory is None else 2)

    def fuses(self, device: torch.device) -> bool:
        """Whether elementwise work on ``device`` is done by kernels over lists of tensors."""
        return device.type == "cuda" and self.kernels != "torch"

    def without_kernels(self) -> ExecutorSettings:
        """The same with torch's own products."""
        return replace(self, kernels="torch")
