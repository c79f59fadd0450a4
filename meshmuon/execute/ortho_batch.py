"""A batch of whole matrices, orthogonalised in place; everything that it needs is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

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
    pitch,
    reserve_scratch,
)
from ..ortho.kernels import FunctionalProducts
from ..plan import Batch
from ..torch_compat import own_graph_per_shape
from .observer import UNOBSERVED, MatrixKey, Observer
from .settings import ExecutorSettings
from .step_param import NONE_IDLE, StepParam, UpdateRule

ShowGram: TypeAlias = Callable[[Tensor], None]

MATRICES = "matrices"
"""The memory in which batches are orthogonalised, one after the other."""


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """Where batches are orthogonalised. Those of one ``name`` share their memory, those of one workspace their scratch."""

    workspace: Workspace
    name: str = MATRICES

    def stacked(self, batch: Batch, template: StepParam) -> Tensor:
        """The matrices of a batch, (size, rows, cols)."""
        shape = (batch.size, batch.rows, batch.cols)
        return self.workspace.take_matrices(self.name, shape, template.update_dtype, template.work_device)

    def flat(self, batch: Batch, template: StepParam) -> Tensor:
        """The same memory as a flat tensor, with the gaps between matrices."""
        size = batch.size * pitch(batch.rows, batch.cols, template.update_dtype)
        return self.workspace.take(self.name, (size,), template.update_dtype, template.work_device)


class OrthoBatch:
    """A batch's matrices, in memory that batches share one after the other.

    If a batch cannot be orthogonalised (a user's scheme raises, memory runs out), it becomes zeros, which change no parameter,
    and its error goes to ``failures``. The step continues, because other ranks wait for this one, and then returns the error.
    """

    def __init__(
        self,
        batch: Batch,
        matrices: Sequence[MatrixKey],
        template: StepParam,
        memory: BatchMemory,
        settings: ExecutorSettings,
        failures: list[Exception],
    ) -> None:
        self.batch = batch
        self.matrices = matrices
        self._params = [param for param, _ in matrices]  # of each matrix, the index of its parameter
        self._param_set = frozenset(self._params)
        self.stacked = memory.stacked(batch, template)  # (size, rows, cols)
        self.rule_state: Tensor | None = None  # (size, outputs) where the rule keeps numbers between steps
        if template.rule_state is not None:
            outputs = template.matrix_set.lr_shape[0]
            self.rule_state = (
                aligned_matrices((batch.size, 1, outputs), template.update_dtype, template.work_device).zero_().squeeze(1)
            )
        self._rule, self._flipped = template.rule, template.matrix_set.flipped
        self._one_by_one = settings.deterministic
        runs = _orthogonaliser(self.stacked, template, memory.workspace, settings)
        self._orthogonalise, self._orthogonalise_showing = runs
        self._failures = failures

    def is_idle(self, idle: AbstractSet[int]) -> bool:
        """Whether none of its matrices is stepped."""
        return bool(idle) and self._param_set <= idle

    def orthogonalise(self, idle: AbstractSet[int] = NONE_IDLE, observer: Observer = UNOBSERVED) -> None:
        """Replaces every matrix by its orthogonalised update, with what its rule does before and after.

        The results of ``idle`` parameters have no meaning. At least one matrix must belong to another parameter.
        """
        with observer.phase("orthogonalise"):
            try:
                if idle:
                    self._overwrite_idle(idle)
                # What a rule makes of the momentum before has another Gram matrix.
                gram_follows = observer is not UNOBSERVED and self._rule is None and self._orthogonalise_showing is not None
                observer.momentum(self.matrices, self.stacked, gram_follows=gram_follows)
                if self._rule is None:
                    self._orthogonalise_for(observer, shows_gram=gram_follows)
                else:
                    seen = seen_by_rule(self.stacked, self.rule_state, flipped=self._flipped, one_by_one=self._one_by_one)
                    apply_rule(self._rule, partial(self._orthogonalise_for, observer), seen)
                observer.update(self.matrices, self.stacked)
            except Exception as error:
                self.stacked.zero_()
                self._failures.append(error)

    def _orthogonalise_for(self, observer: Observer, *, shows_gram: bool = False) -> None:
        if shows_gram and self._orthogonalise_showing is not None:
            self._orthogonalise_showing(partial(observer.gram, self.matrices))
        else:
            self._orthogonalise()
        observer.orthogonalised(self.matrices, self.stacked)

    def _overwrite_idle(self, idle: AbstractSet[int]) -> None:
        """Overwrites the matrices of idle parameters with an active one: a user's scheme or rule may fail on arbitrary memory."""
        positions = [k for k, param in enumerate(self._params) if param in idle]
        active = next(k for k, param in enumerate(self._params) if param not in idle)
        for stacked in (self.stacked, self.rule_state):
            if stacked is not None and positions:
                torch._foreach_copy_([stacked[k] for k in positions], [stacked[active]] * len(positions))


SeenByRule: TypeAlias = "list[tuple[Tensor, Tensor | None]]"
"""Batches of matrices, (batch, outputs, inputs), each with its rule state, (batch, outputs, 1)."""


def seen_by_rule(stacked: Tensor, rule_state: Tensor | None, *, flipped: bool, one_by_one: bool) -> SeenByRule:
    """Matrices and their rule state as a rule sees them: all in one batch, or each in a batch of its own."""
    seen = stacked.mT if flipped else stacked
    column = None if rule_state is None else rule_state.unsqueeze(-1)
    if not one_by_one:
        return [(seen, column)]
    return [(seen[k : k + 1], None if column is None else column[k : k + 1]) for k in range(len(seen))]


def apply_rule(rule: UpdateRule, orthogonalise: Callable[[], None], seen: SeenByRule) -> None:
    """Orthogonalises matrices in place, with what ``rule`` does before and after."""
    for stacked, _ in seen:
        rule.before(stacked)
    orthogonalise()
    for stacked, rule_state in seen:
        rule.after(stacked, rule_state)


def reserve_ortho_batches(batches: Iterable[tuple[Batch, StepParam, BatchMemory]], settings: ExecutorSettings) -> None:
    """Grows workspaces to their final size, before batches keep views of them: growing moves them."""
    for batch, template, memory in batches:
        stacked, dtype = memory.stacked(batch, template), template.compute_dtype
        reserve_scratch(stacked, template.scheme, form=settings.form, dtype=dtype, workspace=memory.workspace)


def _orthogonaliser(
    stacked: Tensor, template: StepParam, workspace: Workspace, settings: ExecutorSettings
) -> tuple[Callable[[], None], Callable[[ShowGram], None] | None]:
    """What orthogonalises ``stacked`` in place: eager with reused buffers, a CUDA graph of that, or compiled.

    Where it can also show the Gram matrices that it computes, in at least 32 bits, the second does so.
    """
    scheme, dtype, form = template.scheme, template.compute_dtype, settings.form
    if not stacked.numel():
        return lambda: None, None
    if settings.compile:
        return _compiled(stacked, scheme, dtype, settings), None
    showing: Callable[[ShowGram], None] | None = None
    if not isinstance(scheme, Scheme):

        def orthogonalise() -> None:
            stacked.copy_(call_scheme(scheme, stacked, one_by_one=settings.deterministic))

    else:
        products = settings.products(stacked.device)
        blocks = blocks_for(stacked.size(1), stacked.size(2), scheme, form=form, dtype=dtype)
        steps, scratch = scheme.steps, Scratch(workspace, stacked, dtype, stacked)

        def orthogonalise() -> None:
            iterate(stacked, steps, blocks, scratch, products)

        if dtype.itemsize >= 4:
            showing = partial(iterate, stacked, steps, blocks, scratch, products)
    replay = replay_for(stacked.device, orthogonalise, graphs=settings.cuda_graphs)
    return replay, showing if replay is orthogonalise else None


def _compiled(
    stacked: Tensor, scheme: Scheme | Orthogonalizer, dtype: torch.dtype, settings: ExecutorSettings
) -> Callable[[], None]:
    backend = settings.compile if isinstance(settings.compile, str) else "inductor"
    eager = scheme if not isinstance(scheme, Scheme) else _traceable(stacked, scheme, dtype, settings.form)
    compiled = torch.compile(eager, backend=backend, dynamic=False)

    def orthogonalise() -> None:
        with own_graph_per_shape(), torch.autocast(stacked.device.type, enabled=False):
            stacked.copy_(call_scheme(compiled, stacked, one_by_one=settings.deterministic))

    return orthogonalise


def _traceable(stacked: Tensor, scheme: Scheme, dtype: torch.dtype, form: str) -> Orthogonalizer:
    steps, blocks = scheme.steps, blocks_for(stacked.size(1), stacked.size(2), scheme, form=form, dtype=dtype)

    def eager(x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        iterate(x, steps, blocks, Scratch(Workspace(), x, dtype, result), FunctionalProducts())
        return result

    return eager
