"""A batch of whole matrices, orthogonalised in place; everything that it needs is made once."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..device import Graphs, replay_for, wide_sums
from ..errors import KernelError, OrthogonalizeError
from ..ortho import (
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
from ..ortho.kernels.products import BlockedProducts
from .settings import ExecutorSettings
from .step_param import UNOBSERVED, MatrixKey, Observer, RunningStep, StepParam

ShowGram: TypeAlias = Callable[[Tensor], None]

_MOST_NAMES = 5  # that an error lists
MATRICES = "matrices"
"""The memory in which batches are orthogonalised, one after the other."""


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """Where batches are orthogonalised. Those of one ``name`` share their memory, those of one workspace their scratch.

    Batches of one kind (name, shape, dtypes, scheme) have the same addresses: they share one ``PreparedOrtho`` or CUDA
    graph.
    """

    workspace: Workspace
    name: str = MATRICES
    prepared: dict[Hashable, PreparedOrtho] = field(default_factory=dict)  # by the kind of batch
    graphs: Graphs = field(default_factory=list)  # of all kinds

    def stacked(self, size: int, template: StepParam) -> Tensor:
        """The matrices of a batch, (size, rows, cols)."""
        shape = size, template.matrix_set.rows, template.matrix_set.cols
        return self.workspace.take_matrices(self.name, shape, template.update_dtype, template.work_device)

    def flat(self, size: int, template: StepParam) -> Tensor:
        """The same memory as a flat tensor, with the gaps between matrices."""
        elements = size * pitch(template.matrix_set.rows, template.matrix_set.cols, template.update_dtype)
        return self.workspace.take(self.name, (elements,), template.update_dtype, template.work_device)

    def reserve(self, size: int, template: StepParam, form: str) -> None:
        """Grows the workspace to what a batch needs, before any batch keeps views of it: growing moves it."""
        stacked, dtype = self.stacked(size, template), template.compute_dtype
        reserve_scratch(stacked, template.scheme, form=form, dtype=dtype, workspace=self.workspace)


class OrthoBatch:
    """A batch's matrices, in memory that batches share one after the other.

    If a scheme or a rule of the user raises, the batch has failed. The step continues without its matrices, because
    other ranks wait for this one, and then returns the error. Nothing else may fail here in the middle of a step:
    ``try_out`` has run the batch before.
    """

    def __init__(
        self, matrices: Mapping[MatrixKey, str], template: StepParam, memory: BatchMemory, settings: ExecutorSettings
    ) -> None:
        self.matrices = list(matrices)
        self._names = list(matrices.values())  # of each matrix, that of its parameter
        self._params = [param for param, _ in matrices]  # of each matrix, the index of its parameter
        self._param_set = frozenset(self._params)
        self.stacked = memory.stacked(len(matrices), template)  # (size, rows, cols)
        self._per_input = list(template.memories.values())
        # For each rule that keeps numbers between steps, (size, outputs), or (size, inputs) if there is one per input.
        self.rule_state = [
            aligned_matrices(
                (len(matrices), 1, template.matrix_set.lr_shape[per_input]), template.update_dtype, self.stacked.device
            )
            .zero_()
            .squeeze(1)
            for per_input in self._per_input
        ]
        self._rules, self._flipped = template.rules, template.matrix_set.flipped
        self._one_by_one = settings.deterministic
        dtypes = template.compute_dtype, template.update_dtype
        # A callable need not be hashable; what is prepared for it keeps it alive.
        scheme = template.scheme if isinstance(template.scheme, Scheme) else id(template.scheme)
        kind = memory.name, self.stacked.shape, scheme, dtypes, template.work_device
        self.first_of_kind = kind not in memory.prepared
        if self.first_of_kind:
            memory.prepared[kind] = prepare_ortho(self.stacked, template, memory, settings)
        self._prepared = memory.prepared[kind]
        self._fallible = template.fallible
        # Where updates are guarded, NaN for each matrix that is not finite, else 0.
        self._nonfinite = self.stacked.new_zeros(len(matrices)) if settings.guarded else None
        own_kernels = type(settings.products(self.stacked.device)) is not BlockedProducts
        # a graph is recorded then
        self._tries = own_kernels or (settings.cuda_graphs and self.stacked.device.type == "cuda")

    @torch.no_grad()
    def try_out(self) -> None:
        """Runs kernels of the library once, on matrices that any scheme leaves as they are, if there are any.

        A Triton without a C compiler, or tiles that do not fit, are noticed while the plan is prepared, and not in a
        step.
        """
        if not self._tries or self._fallible or not self.stacked.numel():
            return
        try:
            self.stacked.zero_().diagonal(dim1=-2, dim2=-1).fill_(1.0)
            self._prepared.run()
        except Exception as error:
            size = " × ".join(map(str, self.stacked.shape))
            raise KernelError(
                f"kernels do not run on {self.stacked.device} for a batch of {size}: {type(error).__name__}: {error}. "
                "If that cannot be mended, set MESHMUON_KERNELS=torch."
            ) from error

    def is_idle(self, idle: AbstractSet[int]) -> bool:
        """Whether none of its matrices is stepped."""
        return bool(idle) and self._param_set <= idle

    def orthogonalise(self, step: RunningStep) -> bool:
        """Replaces every matrix by its orthogonalised update, with what its rule does before and after.

        The results of idle parameters have no meaning. At least one matrix must belong to another parameter. Returns
        whether it succeeded. If not, the rule state is as it was, and the error is among the step's ``failures``.
        Callers keep no reference to it: its traceback refers to their frames, and the cycle would keep the optimizer
        alive.
        """
        if step.only_compiles:
            self._spoil_nonfinite(step, [])
            return True
        observer = step.observer
        may_undo = self._fallible or self._nonfinite is not None
        rule_state = [numbers.clone() for numbers in self.rule_state] if may_undo else []
        with observer.phase("orthogonalise"):
            try:
                if step.idle:
                    self._overwrite_idle(step.idle)
                # What a rule makes of the momentum before has another Gram matrix.
                gram_follows = observer is not UNOBSERVED and not self._rules and self._prepared.run_showing is not None
                observer.momentum(self.matrices, self.stacked, gram_follows=gram_follows)
                batches = self._seen_by_rules() if self._rules else []
                for stacked, _ in batches:
                    for rule in self._rules:
                        rule.before(stacked)
                self._run_prepared(observer, shows_gram=gram_follows)
                for stacked, memories in batches:
                    for rule in self._rules:
                        rule.after(stacked, next(memories) if rule.remembers() else None)
                observer.update(self.matrices, self.stacked)
                self._spoil_nonfinite(step, rule_state)
            except Exception as error:
                if not self._fallible:
                    raise
                for numbers, before in zip(self.rule_state, rule_state, strict=True):
                    numbers.copy_(before)
                step.failures.append(
                    orthogonalize_error(self._names, f"{type(error).__name__}: {error}", self.matrices)
                )
                step.failures[-1].__cause__ = error
                return False
        return True

    def _spoil_nonfinite(self, step: RunningStep, rule_state: Sequence[Tensor]) -> None:
        """If updates are guarded, makes a matrix NaN that is not finite, so that each holder sees it in its piece.

        Its rule state becomes the given one again. All other bits stay.
        """
        flags = self._nonfinite
        if flags is None or not self.stacked.numel():
            return
        torch.linalg.vector_norm(self.stacked, math.inf, dim=(1, 2), out=flags)
        flags.mul_(0.0)  # ∞ and NaN become NaN
        if (
            idle := [flag for flag, param in zip(flags, self._params, strict=True) if param in step.idle]
            if step.idle
            else []
        ):
            torch._foreach_zero_(idle)
        step.elementwise.fill_if([self.stacked], flags[:, None, None], math.nan)
        for numbers, before in zip(self.rule_state, rule_state, strict=False):
            numbers.copy_(torch.where(flags.isnan()[:, None], before, numbers))
        step.checked.append((self._names, flags))

    def _run_prepared(self, observer: Observer, *, shows_gram: bool = False) -> None:
        if shows_gram and self._prepared.run_showing is not None:
            self._prepared.run_showing(partial(observer.gram, self.matrices))
        else:
            self._prepared.run()

    def _seen_by_rules(self) -> list[tuple[Tensor, Iterator[Tensor]]]:
        """Batches (batch, outputs, inputs) with the memories of the rules that remember: one of all matrices, or
        one of each.
        """
        size = 1 if self._one_by_one else len(self.stacked)
        batches = torch.split(self.stacked.mT if self._flipped else self.stacked, size)
        of_rules = zip(self.rule_state, self._per_input, strict=True)
        memories = [torch.split(numbers.unsqueeze(1 if per_input else 2), size) for numbers, per_input in of_rules]
        return [(stacked, iter([of_rule[k] for of_rule in memories])) for k, stacked in enumerate(batches)]

    def _overwrite_idle(self, idle: AbstractSet[int]) -> None:
        """Overwrites the matrices of idle parameters with an active one: a user's scheme or rule may fail on
        arbitrary memory.
        """
        positions = [k for k, param in enumerate(self._params) if param in idle]
        active = next(k for k, param in enumerate(self._params) if param not in idle)
        for stacked in (self.stacked, *self.rule_state):
            if positions:
                torch._foreach_copy_([stacked[k] for k in positions], [stacked[active]] * len(positions))


def orthogonalize_error(
    names: Iterable[str], reason: str, matrices: Iterable[MatrixKey], where: str = ""
) -> OrthogonalizeError:
    """The error for parameters whose matrices could not be orthogonalised."""
    distinct = tuple(dict.fromkeys(names))
    listed = ", ".join(distinct[:_MOST_NAMES]) + ", …" * (len(distinct) > _MOST_NAMES)
    error = OrthogonalizeError(f"{where}{listed} kept weights and momentum in this step, which failed: {reason}")
    error.names, error.where, error.reason, error.matrices = distinct, where, reason, tuple(matrices)
    return error


def joined_errors(errors: Sequence[OrthogonalizeError]) -> OrthogonalizeError:
    """One error that names the parameters of all, with the reason of the first."""
    first = errors[0]
    matrices = (key for error in errors for key in error.matrices)
    joined = orthogonalize_error(
        (name for error in errors for name in error.names), first.reason, matrices, first.where
    )
    joined.__cause__, joined.known_to_all = first.__cause__, first.known_to_all
    return joined


class PreparedOrtho(NamedTuple):
    """What orthogonalises a batch in its memory. No argument says which: the memory is part of it."""

    run: Callable[[], None]
    run_showing: Callable[[ShowGram], None] | None  # also shows the Gram matrices, where it can


def prepare_ortho(
    stacked: Tensor, template: StepParam, memory: BatchMemory, settings: ExecutorSettings
) -> PreparedOrtho:
    """What orthogonalises ``stacked``: ``iterate`` with reused buffers, or a CUDA graph of that.

    Gram matrices are shown in at least 32 bits. Inverses may wait for the device, which no graph can record.
    """
    scheme, dtype, form = template.scheme, template.compute_dtype, settings.form
    if not stacked.numel():
        return PreparedOrtho(lambda: None, None)
    graphs = memory.graphs if settings.cuda_graphs else None
    if not isinstance(scheme, Scheme):

        def call() -> None:
            stacked.copy_(call_scheme(scheme, stacked, one_by_one=settings.deterministic))

        return PreparedOrtho(replay_for(stacked.device, call, graphs), None)
    products = settings.products(stacked.device)
    blocks = blocks_for(stacked.size(1), stacked.size(2), scheme, form=form, dtype=dtype)
    steps, scratch = scheme.steps, Scratch(memory.workspace, stacked, dtype, stacked)

    def run(show_gram: ShowGram | None = None) -> None:
        with wide_sums(stacked.device, dtype):
            iterate(stacked, steps, blocks, scratch, products, show_gram)

    replay = replay_for(stacked.device, run, None if scheme.rational else graphs)
    return PreparedOrtho(replay, run if dtype.itemsize >= 4 and replay is run else None)
