"""A batch of whole matrices, orthogonalised in place; everything that it needs is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ..device import replay_for
from ..errors import KernelError, OrthogonalizeError
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
from ..ortho.kernels.products import BlockedProducts, FunctionalProducts
from ..plan import Batch
from ..torch_compat import own_graph_per_shape
from .step_param import NONE_IDLE, UNOBSERVED, ExecutorSettings, MatrixKey, Observer, StepParam, UpdateRule

ShowGram: TypeAlias = Callable[[Tensor], None]

_MOST_NAMES = 5  # that an error lists
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

    If a scheme or a rule of the user raises, the batch has failed and its error goes to ``failures``. The step continues without
    its matrices, because other ranks wait for this one, and then returns the error. Nothing else may fail here in the middle of a
    step: ``try_out`` has run the batch before.
    """

    def __init__(
        self,
        batch: Batch,
        matrices: Mapping[MatrixKey, str],
        template: StepParam,
        memory: BatchMemory,
        settings: ExecutorSettings,
        failures: list[Exception],
    ) -> None:
        self.batch = batch
        self.matrices = list(matrices)
        self._names = list(dict.fromkeys(matrices.values()))  # of their parameters
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
        self._fallible = template.fallible
        self._kernels = settings.compile or type(settings.products(self.stacked.device)) is not BlockedProducts
        # Of the last step, if it failed: names and reason. The error itself would refer to the optimizer and keep it alive.
        self._failure: tuple[tuple[str, ...], str] | None = None

    @torch.no_grad()
    def try_out(self) -> None:
        """Runs kernels and compilers of the library once, on matrices that any scheme leaves as they are, if there are any.

        A Triton without a C compiler, or tiles that do not fit, are noticed while the plan is prepared, and not in a step.
        """
        if not self._kernels or self._fallible or not self.stacked.numel():
            return
        try:
            self.stacked.zero_().diagonal(dim1=-2, dim2=-1).fill_(1.0)
            self._orthogonalise()
        except Exception as error:
            raise kernel_error(self.stacked, error) from error

    def take_failure(self) -> tuple[tuple[str, ...], str] | None:
        """Names of parameters and reason, if the last call of ``orthogonalise`` failed; told once."""
        failure, self._failure = self._failure, None
        return failure

    def is_idle(self, idle: AbstractSet[int]) -> bool:
        """Whether none of its matrices is stepped."""
        return bool(idle) and self._param_set <= idle

    def orthogonalise(self, idle: AbstractSet[int] = NONE_IDLE, observer: Observer = UNOBSERVED) -> bool:
        """Replaces every matrix by its orthogonalised update, with what its rule does before and after.

        The results of ``idle`` parameters have no meaning. At least one matrix must belong to another parameter. Returns whether
        it succeeded; if not, the rule state is as it was.
        """
        rule_state = self.rule_state.clone() if self._fallible and self.rule_state is not None else None
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
                if not self._fallible:
                    raise
                if rule_state is not None and self.rule_state is not None:
                    self.rule_state.copy_(rule_state)
                reason = f"{type(error).__name__}: {error}"
                self._failures.append(orthogonalize_error(self._names, reason))
                self._failures[-1].__cause__ = error
                self._failure = tuple(self._names), reason
                return False
        return True

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


def orthogonalize_error(names: Iterable[str], reason: str, where: str = "") -> OrthogonalizeError:
    """The error for parameters whose matrices could not be orthogonalised."""
    distinct = tuple(dict.fromkeys(names))
    listed = ", ".join(distinct[:_MOST_NAMES]) + ", …" * (len(distinct) > _MOST_NAMES)
    error = OrthogonalizeError(f"{where}{listed} kept weights and momentum in this step, which failed: {reason}")
    error.names, error.where, error.reason = distinct, where, reason
    return error


def joined_errors(errors: Sequence[OrthogonalizeError]) -> OrthogonalizeError:
    """One error that names the parameters of all, with the reason of the first."""
    first = errors[0]
    joined = orthogonalize_error((name for error in errors for name in error.names), first.reason, first.where)
    joined.__cause__, joined.known_to_all = first.__cause__, first.known_to_all
    return joined


def kernel_error(stacked: Tensor, error: Exception) -> KernelError:
    """The error for kernels that cannot orthogonalise matrices like ``stacked``, (size, rows, cols)."""
    return KernelError(
        f"kernels do not run on {stacked.device} for a batch of {' × '.join(map(str, stacked.shape))}: {type(error).__name__}: "
        f'{error}. If that cannot be mended, pass kernels="torch" and leave out compile.'
    )


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
