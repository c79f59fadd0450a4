"""The numbers of a measured step: a table with a row for each matrix and each parameter of AdamW, in one flat tensor.

All ranks add up a stretch of that tensor in a single reduction:

=================  =====================================================================================  =======
part               content                                                                                reduced
=================  =====================================================================================  =======
private vectors    a vector per matrix, of the length of its longer side, of weights that only this rank  no
                   knows
shared vectors     the same of weights that several ranks know                                            yes
seconds            one number per rank and phase                                                          yes
shared rows        rows of the table                                                                      yes
private rows       rows of what only this rank knows                                                      no
nowhere            one more row, where ranks write what another rank reports                              no
=================  =====================================================================================  =======
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from ..execute import MatrixKey
from ..matrices import MatrixSet, with_stars, without_wrappers
from ..ortho import Orthogonalizer, Scheme
from ..params.metrics_option import Metrics
from .spectra import probes

DTYPE = torch.float32

PHASES = ("momentum", "gather", "orthogonalise", "scatter", "update", "wait", "adamw", "metrics")
"""What the seconds of a step are divided into."""

_ONE_ROW = MatrixSet(1, 0, 0)


class Column(IntEnum):
    """The columns of the table. Norms are squared, since ranks add them up. Rows of AdamW have the first three."""

    GRADIENT = 0
    WEIGHT = 1  # before the step
    UPDATE = 2  # before it is multiplied by the learning rate
    MOMENTUM = 3
    WEIGHT_SIGMA = 4  # largest singular value of the weight; written after the reduction
    DEFECTS = 5  # two columns: what ``spectra.defects`` returns
    LANCZOS = 7  # the rest: the coefficients of the Lanczos iteration on the momentum


@dataclass(frozen=True, slots=True)
class Measured:
    """A parameter of the plan, with a row for each of its matrices; or one that AdamW steps, with one row."""

    name: str  # with the part of a fused weight
    group_index: int
    index: int  # in ``Plan.params``; of AdamW's, among all parameters of the optimizer
    shared: bool  # whether several ranks know it
    elements: int  # of each matrix
    muon: bool = False
    # What only Muon's have.
    matrices: MatrixSet = _ONE_ROW
    scheme: Scheme | Orthogonalizer | None = None
    dtype: str = ""
    rounding: str = ""

    @property
    def names(self) -> list[str]:
        """The name of each matrix."""
        return [f"{self.name}[{k}]" for k in range(self.matrices.count)] if self.matrices.stack_dims else [self.name]

    @property
    def kind(self) -> str:
        """The name without wrappers, and with ``*`` for numbers."""
        return with_stars(without_wrappers(self.name)) + ("" if self.muon else " (adamw)")

    @property
    def vector(self) -> int:
        """Length of a power vector."""
        return max(self.matrices.rows, self.matrices.cols)


class Numbers:
    """The flat tensor and its parts, made when a plan is new and used at every measured step.

    Args:
        measured: parameters of the plan in its order, then those of AdamW; the same on all ranks as far as they are shared.
        ranks: of the reduction, in its order.
        options: how closely steps are measured.
        reported: of each matrix of the plan, whether this rank reports it; of several ranks that compute one, one does.
        device: where all of this is.
    """

    def __init__(
        self,
        measured: Sequence[Measured],
        ranks: Sequence[int],
        options: Metrics,
        reported: Mapping[MatrixKey, bool],
        device: torch.device,
    ) -> None:
        self.measured, self.ranks, self._reported, self._device = tuple(measured), tuple(ranks), reported, device
        columns = Column.LANCZOS + 2 * options.iterations
        private_last = sorted(range(len(measured)), key=lambda k: not measured[k].shared)
        self.first_rows = [0] * len(measured)
        self._nowhere = 0
        for k in private_last:
            self.first_rows[k], self._nowhere = self._nowhere, self._nowhere + measured[k].matrices.count
        self.vector_starts: dict[int, int] = {}  # index in ``measured`` → where its vectors begin; in the order of the vectors
        self.private_vectors = vectors_end = 0
        for k in reversed(private_last) if options.weight_spectra else ():
            if measured[k].muon:
                self.vector_starts[k], vectors_end = vectors_end, vectors_end + measured[k].matrices.count * measured[k].vector
                if not measured[k].shared:
                    self.private_vectors = vectors_end
        rows_begin = vectors_end + len(ranks) * len(PHASES)
        shared_rows = sum(one.matrices.count for one in measured if one.shared)
        self.packed = torch.zeros(rows_begin + (self._nowhere + 1) * columns, dtype=DTYPE, device=device)
        self.vectors = self.packed[:vectors_end]
        self.seconds = self.packed[vectors_end:rows_begin].view(len(ranks), len(PHASES))
        self.table = self.packed[rows_begin:].view(-1, columns)
        self.reduced = self.packed[self.private_vectors : rows_begin + shared_rows * columns]
        self._made: dict[tuple[object, ...], Tensor] = {}

    @property
    def bytes_reduced(self) -> int:
        """Bytes of the reduction of a measured step; 0 on one rank."""
        return self.reduced.numel() * self.reduced.element_size() if len(self.ranks) > 1 else 0

    def rows_of(self, matrices: Sequence[MatrixKey]) -> Tensor:
        """Where this rank writes about these matrices of the plan."""
        return self._once(
            ("matrices", *matrices),
            lambda: torch.tensor([self.first_rows[p] + m if self._reported[p, m] else self._nowhere for p, m in matrices]),
        )

    def indices(self, rows: Sequence[int]) -> Tensor:
        """A tensor of these rows."""
        return self._once(("rows", *rows), lambda: torch.tensor(rows, dtype=torch.long))

    def directions(self, size: int, dtype: torch.dtype) -> Tensor:
        """``probes`` on the device."""
        return self._once(("probes", size, dtype), lambda: probes(size).to(dtype))

    def _once(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` returns, on the device, where it is copied only once: the host waits for such a copy."""
        if key not in self._made:
            with torch.device("cpu"):
                self._made[key] = make().to(self._device)
        return self._made[key]

    def write(self, rows: Tensor, column: int, values: Tensor) -> None:
        """Writes (rows, columns) into the table, from a column on."""
        self.table[:, column : column + values.size(1)].index_copy_(0, rows, values.to(DTYPE))
