"""The reference path: every rank gathers whole matrices, orthogonalises all of them and keeps its own shard.

It shares neither layouts nor plans nor exchanges with the executor that it verifies: torch gathers and torch cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.profiler import record_function

from ..ortho import orthogonalize
from ..ortho.kernels import products_for
from ..plan import Plan
from ..transport import Exchange, has_part, own_shard, whole
from .parts import Part, Parts, Touch
from .settings import ExecutorSettings
from .work import Work, local_part

__all__ = ["ReferenceExecutor"]


class ReferenceExecutor:
    """Runs a step the simple way, with the same interface as ``Executor``."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = settings
        self.plan: Plan | None = None

    def prepare(self, plan: Plan, rank: int, work: Sequence[Work], exchange: Exchange | None) -> None:
        """Only remembers what all ranks agreed on; nothing of it is used."""
        self.plan = plan

    def run(self, work: Sequence[Work], *, last: Callable[[], None]) -> None:
        """One step, parameter by parameter."""
        for k, one in enumerate(work):
            touch = Touch((k,), (k,))
            if not has_part(one.param):
                touch.free_gradients(work)
                continue
            with record_function("meshmuon::momentum"):
                touch.accumulate(work)
                if one.settings.nesterov:
                    update = one.grad.to(one.update_dtype, copy=True).add_(one.momentum_buffer, alpha=one.settings.momentum)
                else:
                    update = one.momentum_buffer.to(one.update_dtype, copy=True)
            touch.free_gradients(work)
            with record_function("meshmuon::gather"):
                full = whole(update)
            matrices = full.reshape(one.matrices.count, one.matrices.rows, one.matrices.cols).contiguous()
            with record_function("meshmuon::orthogonalise"):
                products = products_for(full.device, deterministic=self._settings.deterministic)
                orthogonalize(
                    matrices, one.scheme, form=self._settings.form, dtype=one.compute_dtype, out=matrices, products=products
                )
            with record_function("meshmuon::scatter"):
                shard = own_shard(matrices.view(full.shape), one.param)
            with record_function("meshmuon::update"):
                local = local_part(one.param)
                Parts([Part(k, 0, local.size(0), True, shard.view(local.shape))], work).apply(work)
        last()

    def workspace_bytes(self) -> int:
        """Nothing is kept between steps."""
        return 0
