"""The numbers of a measured step: a table with a row for each matrix and each parameter of AdamW.

First come rows of what several ranks know, which all ranks add up in a single reduction; then those of what only this
rank knows; then one more, where ranks write what another rank reports.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from ..agree.step_decision import StepDecision
from ..execute import MatrixKey
from ..layout import Layout
from ..matrices import MatrixSet, with_stars, without_wrappers
from ..params.param_record import ParamRecord
from ..plan import NO_WAVE, Plan
from .spectra import ITERATIONS, start_vector
from .weights import LocalMatrices, counts_here

DTYPE = torch.float32


class Column(IntEnum):
    """The columns of the table. Norms are squared, since ranks add them up. Rows of AdamW have the first three."""

    GRADIENT = 0
    WEIGHT = 1  # before the step
    UPDATE = 2  # before it is multiplied by the learning rate
    MOMENTUM = 3
    LANCZOS = 4  # the rest: the coefficients of the Lanczos iteration on the momentum


@dataclass(frozen=True, slots=True)
class Measured:
    """A parameter of the plan, with a row for each of its matrices; or one that AdamW steps, with one row."""

    name: str  # with the part of a fused weight
    index: int  # in ``Plan.params``; of AdamW's, among all parameters of the optimizer
    record: ParamRecord
    shared: bool  # whether several ranks know it
    matrices: MatrixSet | None  # None for AdamW's

    @property
    def names(self) -> list[str]:
        stacked = self.matrices is not None and self.matrices.stack_dims
        return [f"{self.name}[{k}]" for k in range(self.rows)] if stacked else [self.name]

    @property
    def kind(self) -> str:
        """The name without wrappers, and with ``*`` for numbers."""
        return with_stars(without_wrappers(self.name)) + (" (adamw)" if self.matrices is None else "")

    @property
    def rows(self) -> int:
        """Number of its rows in the table."""
        return 1 if self.matrices is None else self.matrices.count

    @property
    def elements(self) -> int:
        """Of each matrix."""
        return self.record.param.numel() if self.matrices is None else self.matrices.rows * self.matrices.cols


def _measured(
    decision: StepDecision, params: Sequence[ParamRecord], layouts: Sequence[tuple[Layout, ...]]
) -> Iterator[Measured]:
    """Parameters of the plan in its order, then those of AdamW; the same on all ranks as far as they are shared."""
    several = decision.exchange is not None
    for index, (planned, (k, part)) in enumerate(zip(decision.plan.params, decision.planned_parts, strict=True)):
        parts = params[k].matrix_sets or ()
        name = planned.name if len(parts) == 1 else f"{planned.name}[part {part}]"
        yield Measured(name, index, params[k], several and not planned.private, parts[part])
    for index, record in enumerate(params):
        if not record.param_group["use_muon"]:
            yield Measured(record.name, index, record, several and bool(layouts[index]), None)


def _reported(plan: Plan, rank: int, *, by_owners: bool) -> dict[MatrixKey, bool]:
    """Whether this rank reports what it finds out about a whole matrix: the first of all that compute it does."""
    reported: dict[MatrixKey, bool] = {}
    for task in plan.tasks:
        if (task.param, task.matrix) not in reported:
            first = task.owner if by_owners and task.wave != NO_WAVE else min(task.sharded.holdings)
            reported[task.param, task.matrix] = plan.params[task.param].private or rank == first
    return reported


class Numbers:
    """The flat tensor and its parts, made when a plan is new and used at every measured step.

    Args:
        decision: what all ranks have agreed to do.
        params: all parameters of the optimizer.
        layouts: theirs.
        by_owners: whether the owners of matrices see them whole; otherwise all ranks of their meshes do.
    """

    def __init__(
        self,
        decision: StepDecision,
        params: Sequence[ParamRecord],
        layouts: Sequence[tuple[Layout, ...]],
        *,
        by_owners: bool,
    ) -> None:
        self.plan, rank, self._device = decision.plan, decision.rank, params[0].param.device
        self.measured = tuple(_measured(decision, params, layouts))
        self._reported = _reported(self.plan, rank, by_owners=by_owners)
        self._made: dict[tuple[object, ...], Tensor] = {}
        self._lay_out()
        of_params = {k: LocalMatrices.of(planned, rank, self._device) for k, planned in enumerate(self.plan.params)}
        # Index of a parameter of the plan → what this rank counts of it, and the rows of all of these.
        self.local = {k: matrices for k, matrices in of_params.items() if matrices is not None}
        local_rows = [self.first_rows[k] + matrices.numbers for k, matrices in self.local.items()]
        self.local_rows = torch.cat([self.indices(()), *local_rows])
        # Index of a parameter of AdamW → its row, if this rank counts it.
        adamw = {k: one.index for k, one in enumerate(self.measured) if one.matrices is None}
        self.adamw_rows = {index: self.first_rows[k] for k, index in adamw.items() if counts_here(layouts[index], rank)}

    def _lay_out(self) -> None:
        shared_first = sorted(range(len(self.measured)), key=lambda k: not self.measured[k].shared)
        rows = {k: self.measured[k].rows for k in shared_first}
        *first_rows, self._nowhere = itertools.accumulate(rows.values(), initial=0)
        # By the index in ``measured``, which is that in ``Plan.params`` for those of the plan.
        self.first_rows = dict(zip(rows, first_rows, strict=True))
        self.table = torch.zeros(self._nowhere + 1, Column.LANCZOS + 2 * ITERATIONS, dtype=DTYPE, device=self._device)
        self.reduced = self.table[: sum(count for k, count in rows.items() if self.measured[k].shared)].view(-1)

    def rows_of(self, matrices: Sequence[MatrixKey]) -> Tensor:
        """Where this rank writes about these matrices of the plan."""
        return self._once(
            ("matrices", *matrices),
            lambda: torch.tensor(
                [self.first_rows[p] + m if self._reported[p, m] else self._nowhere for p, m in matrices]
            ),
        )

    def indices(self, rows: Sequence[int]) -> Tensor:
        return self._once(("rows", *rows), lambda: torch.tensor(rows, dtype=torch.long))

    def start_vector(self, size: int, dtype: torch.dtype) -> Tensor:
        """``spectra.start_vector`` on the device."""
        return self._once(("start vector", size, dtype), lambda: start_vector(size).to(dtype))

    def _once(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` returns, on the device, where it is copied only once: the host waits for such a copy."""
        if key not in self._made:
            with torch.device("cpu"):
                self._made[key] = make().to(self._device)
        return self._made[key]

    def write(self, rows: Tensor, column: int, values: Tensor) -> None:
        """Writes (rows, columns) into the table, from a column on."""
        self.table[:, column : column + values.size(1)].index_copy_(0, rows, values.to(DTYPE))
