"""The stage: where a batch of whole matrices is orthogonalised in place, with everything it needs made once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.profiler import record_function

from ..device import replay_for
from ..ortho import (
    Orthogonalizer,
    Scheme,
    Scratch,
    Workspace,
    aligned_matrices,
    blocks_for,
    call_scheme,
    iterate,
    reserve_scratch,
)
from ..ortho.kernels import FunctionalProducts, products_for
from ..plan import Batch
from ..torch_compat import own_graph_per_shape
from .settings import ExecutorSettings
from .step_param import StepParam, UpdateRule

__all__ = ["OrthoBatch", "apply_rule", "reserve_ortho_batches", "seen_by_rule"]


class OrthoBatch:
    """A batch's matrices, (size, rows, cols), in memory that all stages share one after the other.

    A batch that cannot be orthogonalised (a user's scheme raises, memory runs out) becomes zeros, which step nothing, and its
    error is put into ``failures``. The step goes on, since other ranks wait for this one, and raises when it is done.
    """

    def __init__(
        self, batch: Batch, like: StepParam, workspace: Workspace, settings: ExecutorSettings, failures: list[Exception]
    ) -> None:
        self.batch = batch
        self.matrices = _take(batch, like, workspace)
        self.rule_state: Tensor | None = None  # (size, outputs), where the rule remembers
        if like.rule_state is not None:
            outputs = like.matrices.lr_shape[0]
            self.rule_state = aligned_matrices((batch.size, 1, outputs), like.update_dtype, like.param.device).zero_().squeeze(1)
        self._rule, self._flipped = like.rule, like.matrices.flipped
        self._one_by_one = settings.deterministic
        self._orthogonalise = _orthogonaliser(self.matrices, like, workspace, settings)
        self._failures = failures

    def orthogonalise(self) -> None:
        """Replaces every matrix by its orthogonalised update, as its rule has it."""
        with record_function("meshmuon::orthogonalise"):
            try:
                if self._rule is None:
                    self._orthogonalise()
                else:
                    seen = seen_by_rule(self.matrices, self.rule_state, flipped=self._flipped, one_by_one=self._one_by_one)
                    apply_rule(self._rule, self._orthogonalise, seen)
            except Exception as error:
                self.matrices.zero_()
                self._failures.append(error)


SeenByRule: TypeAlias = "list[tuple[Tensor, Tensor | None]]"
"""Batches of matrices, (batch, outputs, inputs), each with its memory, (batch, outputs, 1)."""


def seen_by_rule(matrices: Tensor, rule_state: Tensor | None, *, flipped: bool, one_by_one: bool) -> SeenByRule:
    """``matrices`` and their memory as a rule sees them: all at once, or each by itself so that none depends on the others."""
    seen = matrices.mT if flipped else matrices
    numbers = None if rule_state is None else rule_state.unsqueeze(-1)
    if not one_by_one:
        return [(seen, numbers)]
    return [(seen[k : k + 1], None if numbers is None else numbers[k : k + 1]) for k in range(len(seen))]


def apply_rule(rule: UpdateRule, orthogonalise: Callable[[], None], seen: SeenByRule) -> None:
    """Orthogonalises matrices in place with what ``rule`` does before and after."""
    for matrices, _ in seen:
        rule.before(matrices)
    orthogonalise()
    for matrices, rule_state in seen:
        rule.after(matrices, rule_state)


def reserve_ortho_batches(batches: Iterable[tuple[Batch, StepParam]], workspace: Workspace, settings: ExecutorSettings) -> None:
    """Grows the workspace to its final size: it must not move once stages keep views of it."""
    for batch, like in batches:
        matrices = _take(batch, like, workspace)
        reserve_scratch(matrices, like.scheme, form=settings.form, dtype=like.compute_dtype, workspace=workspace)


def _take(batch: Batch, like: StepParam, workspace: Workspace) -> Tensor:
    return workspace.take_matrices("stage", (batch.size, batch.rows, batch.cols), like.update_dtype, like.param.device)


def _orthogonaliser(stage: Tensor, like: StepParam, workspace: Workspace, settings: ExecutorSettings) -> Callable[[], None]:
    """What orthogonalises ``stage`` in place: eager with reused buffers, a CUDA graph of that, or compiled."""
    scheme, dtype, form = like.scheme, like.compute_dtype, settings.form
    if not stage.numel():
        return lambda: None
    if settings.compile:
        return _compiled(stage, scheme, dtype, settings)
    if not isinstance(scheme, Scheme):

        def work() -> None:
            stage.copy_(call_scheme(scheme, stage, one_by_one=settings.deterministic))

    else:
        products = products_for(stage.device, deterministic=settings.deterministic)
        blocks = blocks_for(stage.size(1), stage.size(2), scheme, form=form, dtype=dtype)
        steps, scratch = scheme.steps, Scratch(workspace, stage, dtype, stage)

        def work() -> None:
            iterate(stage, steps, blocks, scratch, products)

    return replay_for(stage.device, work, graphs=settings.cuda_graphs)


def _compiled(
    stage: Tensor, scheme: Scheme | Orthogonalizer, dtype: torch.dtype, settings: ExecutorSettings
) -> Callable[[], None]:
    backend = settings.compile if isinstance(settings.compile, str) else "inductor"
    eager = scheme if not isinstance(scheme, Scheme) else _traceable(stage, scheme, dtype, settings.form)
    compiled = torch.compile(eager, backend=backend, dynamic=False)

    def work() -> None:
        with own_graph_per_shape(), torch.autocast(stage.device.type, enabled=False):
            stage.copy_(call_scheme(compiled, stage, one_by_one=settings.deterministic))

    return work


def _traceable(stage: Tensor, scheme: Scheme, dtype: torch.dtype, form: str) -> Orthogonalizer:
    steps, blocks = scheme.steps, blocks_for(stage.size(1), stage.size(2), scheme, form=form, dtype=dtype)

    def eager(x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        iterate(x, steps, blocks, Scratch(Workspace(), x, dtype, result), FunctionalProducts())
        return result

    return eager
