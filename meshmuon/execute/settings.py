"""Options of the executor that hold for a whole optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..errors import ConfigError
from ..ortho import FORMS
from ..ortho.kernels.products import Products, check_kernels, products_for

DEFAULT_MEMORY_BUDGET = 64 * 2**20


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """How matrices are batched and computed."""

    chunk_size: int = -1  # most matrices per batch, as per wave in a plan; -1 lets ``memory_budget`` decide
    memory_budget: int = DEFAULT_MEMORY_BUDGET  # bytes of scratch that one batch may use; a single larger matrix still runs
    form: str = "auto"  # ``"auto"``, ``"standard"`` or ``"gram"``
    deterministic: bool = False  # multiply the matrices of a batch one by one, so that batching does not change the results
    compile: bool | str = False  # compile the orthogonalisation per shape; a string names the backend
    cuda_graphs: bool = False  # replay the orthogonalisation of each batch as a CUDA graph (no effect on CPU)
    kernels: str = "auto"  # who computes symmetric products on a GPU

    def __post_init__(self) -> None:
        if self.chunk_size != -1 and self.chunk_size < 1:
            raise ConfigError(f"chunk_size={self.chunk_size} must be -1 (chosen by memory) or at least 1 matrix per batch.")
        if self.memory_budget < 1:
            raise ConfigError(f"memory_budget={self.memory_budget} must be a positive number of bytes.")
        if self.form not in FORMS:
            raise ConfigError(f"form={self.form!r} is unknown; write one of {FORMS}.")
        if self.compile and self.cuda_graphs:
            raise ConfigError("compile and cuda_graphs exclude each other: torch.compile records graphs of its own.")
        check_kernels(self.kernels)
        if self.compile and self.kernels in ("triton", "quack"):
            raise ConfigError(f"compile and kernels={self.kernels!r} exclude each other: torch.compile makes kernels of its own.")

    @property
    def bits(self) -> str:
        """What the bits of an update depend on beside plan and param groups, as text that ranks compare."""
        return f"kernels={getattr(self, 'kernels', 'auto')!r}"  # settings pickled before there was the option lack it

    def products(self, device: torch.device) -> Products:
        """Who multiplies on ``device``.

        ``"auto"`` is Triton on every rank, also where it is missing: ranks must not mix kernels, and fall back together.
        """
        kernels = getattr(self, "kernels", "auto")
        return products_for(device, deterministic=self.deterministic, kernels="triton" if kernels == "auto" else kernels)

    def without_kernels(self) -> ExecutorSettings:
        """The same with torch's own products."""
        return replace(self, kernels="torch")
