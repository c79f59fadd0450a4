"""Where the numbers of a measured step are in one flat tensor, whose beginning all ranks add up in a single reduction.

=================  ==========================================================================  =======
part               content                                                                     reduced
=================  ==========================================================================  =======
private vectors    a vector per matrix, of the length of its longer side, of parameters        no
                   that only this rank knows
shared vectors     the same of parameters that several ranks know                              yes
shared matrices    ``MatrixColumns`` numbers per matrix                                        yes
shared AdamW       ``AdamWColumns`` numbers per parameter                                      yes
seconds            one number per phase and rank                                               yes
private matrices   as above, of parameters that only this rank knows                           no
private AdamW      likewise                                                                    no
sigmas             largest singular value of each weight, as known so far                      no
extras             skipped steps, whether this one was skipped, lr of each param group         no
nowhere            where ranks write what another rank reports                                 no
=================  ==========================================================================  =======

Everything here is plain data, the same on all ranks as far as it is reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..execute import MatrixKey
from ..matrices import with_stars, without_wrappers
from ..ortho import Orthogonalizer, Scheme

PHASES = ("momentum", "gather", "orthogonalise", "scatter", "update", "wait", "adamw", "metrics")
"""What the seconds of a step are divided into."""


@dataclass(frozen=True, slots=True)
class MatrixColumns:
    """The numbers of a matrix, by column; squares of norms, since ranks add them up."""

    iterations: int  # of the Lanczos iteration

    gradient = 0
    weight = 1
    momentum = 2  # and behind it the coefficients of the Lanczos iteration

    @property
    def defects(self) -> int:
        """The first of the two columns of ``spectra.defects``."""
        return 3 + 2 * self.iterations

    @property
    def update(self) -> int:
        """The update before it is multiplied by the learning rate."""
        return self.defects + 2

    @property
    def count(self) -> int:
        """Number of columns."""
        return self.update + 1


@dataclass(frozen=True, slots=True)
class AdamWColumns:
    """The numbers of a parameter that AdamW steps, by column."""

    gradient = 0
    weight = 1
    update = 2  # before it is multiplied by the learning rate
    count = 3


@dataclass(frozen=True, slots=True)
class MeasuredMatrices:
    """The matrices of one parameter of the plan."""

    name: str  # of the parameter, with the part of a fused weight
    group_index: int
    count: int
    rows: int
    cols: int
    lr_shape: tuple[int, int]  # outputs and inputs
    stacked: bool  # whether the parameter's first dim counts matrices
    shared: bool  # whether several ranks know it
    scheme: Scheme | Orthogonalizer  # as it is used for them
    dtype: str  # of the weight
    rounding: str

    @property
    def names(self) -> list[str]:
        """The names of its matrices: of experts with their number behind."""
        return [f"{self.name}[{k}]" for k in range(self.count)] if self.stacked else [self.name]

    @property
    def kind(self) -> str:
        """The name with ``*`` for numbers: what matrices of all layers have in common."""
        return kind_of(self.name)

    @property
    def vector(self) -> int:
        """Length of a power vector."""
        return max(self.rows, self.cols)


@dataclass(frozen=True, slots=True)
class MeasuredParam:
    """A parameter that AdamW steps."""

    name: str
    group_index: int
    index: int  # among all parameters of the optimizer
    elements: int
    shared: bool


def kind_of(name: str) -> str:
    """A name without wrappers, and with ``*`` for numbers."""
    return with_stars(without_wrappers(name))


@dataclass(frozen=True)
class Packing:
    """The places of all numbers."""

    matrices: tuple[MeasuredMatrices, ...]  # in the order of ``Plan.params``
    adamw: tuple[MeasuredParam, ...]
    ranks: tuple[int, ...]  # of the reduction, in its order
    groups: int  # number of param groups
    columns: MatrixColumns
    vectors: bool  # whether power vectors are kept
    matrix_starts: tuple[int, ...] = field(init=False)  # of each of ``matrices``, where its numbers begin
    adamw_starts: tuple[int, ...] = field(init=False)
    vector_starts: tuple[int, ...] = field(init=False)  # of each of ``matrices``
    sigma_starts: tuple[int, ...] = field(init=False)  # likewise, one behind the other
    vectors_end: int = field(init=False)  # they begin at 0
    seconds: int = field(init=False)
    extras: int = field(init=False)
    reduced: slice = field(init=False)  # numbers that are added up over the ranks
    told: slice = field(init=False)  # what the host gets to see
    nowhere: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        matrix_starts, adamw_starts = [0] * len(self.matrices), [0] * len(self.adamw)
        vector_starts, sigma_starts = [0] * len(self.matrices), [0] * len(self.matrices)
        end = 0

        def place(starts: list[int], sizes: Sequence[int | None]) -> None:
            nonlocal end
            for k, size in enumerate(sizes):
                if size is not None:
                    starts[k], end = end, end + size

        def of_matrices(shared: bool, *, vectors: bool) -> list[int | None]:
            sizes = [m.count * (m.vector * self.vectors if vectors else self.columns.count) for m in self.matrices]
            return [size if m.shared is shared else None for size, m in zip(sizes, self.matrices, strict=True)]

        def of_adamw(shared: bool) -> list[int | None]:
            return [AdamWColumns.count if param.shared is shared else None for param in self.adamw]

        place(vector_starts, of_matrices(False, vectors=True))
        shared = end
        place(vector_starts, of_matrices(True, vectors=True))
        vectors_end = end
        place(matrix_starts, of_matrices(True, vectors=False))
        place(adamw_starts, of_adamw(True))
        seconds, end = end, end + len(PHASES) * len(self.ranks)
        reduced = slice(shared, end)
        place(matrix_starts, of_matrices(False, vectors=False))
        place(adamw_starts, of_adamw(False))
        place(sigma_starts, [m.count for m in self.matrices])
        extras, end = end, end + 2 + self.groups
        for name, value in (
            ("matrix_starts", tuple(matrix_starts)),
            ("adamw_starts", tuple(adamw_starts)),
            ("vector_starts", tuple(vector_starts)),
            ("sigma_starts", tuple(sigma_starts)),
            ("seconds", seconds),
            ("extras", extras),
            ("vectors_end", vectors_end),
            ("reduced", reduced),
            ("told", slice(vectors_end, end)),
            ("nowhere", end),
            ("size", end + self.columns.count),
        ):
            object.__setattr__(self, name, value)

    @property
    def bytes_reduced(self) -> int:
        """Bytes of the reduction of a measured step; 0 on one rank."""
        return (self.reduced.stop - self.reduced.start) * 4 if len(self.ranks) > 1 else 0

    def matrix_start(self, key: MatrixKey) -> int:
        """Where the numbers of a matrix begin."""
        param, matrix = key
        return self.matrix_starts[param] + matrix * self.columns.count
