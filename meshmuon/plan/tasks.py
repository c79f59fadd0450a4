"""What a plan is made from, parameters and options, and what it is made of: matrices as tasks, and pieces that
travel.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, NewType, TypeAlias, get_args

from ..errors import ConfigError
from ..layout import Layout, Piece, ShardedMatrix, shard_matrices
from ..matrices import Window
from .cost import CostModel, repr_of_given
from .nodes import Nodes
from .wire import Wire

PartIndex = NewType("PartIndex", int)
"""Counts the parts of a plan, ``Plan.params``: parameters, and each matrix of a fused one."""

EVERY_HOLDER = -1
NO_WAVE = -1
Replicas: TypeAlias = Literal["auto", "share", "repeat"]
REPLICA_OPTIONS = get_args(Replicas)
DEFAULT_IN_FLIGHT = 6


@dataclass(frozen=True, slots=True)
class PlannedParam:
    """A part of the plan: one parameter, or one matrix of a fused one."""

    name: str
    layouts: tuple[Layout, ...]  # how it lies on its mesh; several if sibling meshes have copies of it
    stack_dims: int  # leading dims that index the matrices: 0, or 1 for a stack of experts
    # what must be equal for matrices to travel together: device types, dtype on the wire and dtype of the update
    lane: Hashable
    itemsize: int  # bytes per element on the wire to the owner
    flops: int  # FLOPs of orthogonalising one of its matrices
    # if ``replicas`` is "auto": whether replicas share one owner; None leaves it to the rates
    share: bool | None = None
    private: bool = False  # known to this rank alone (a plain tensor): neither balanced nor part of the digest
    window: Window | None = None  # which rows and columns of the parameter its matrices are; None for all of them
    staged: bool = False  # in host memory, while its matrices travel and are orthogonalised on a device
    how: str = ""  # how its matrices are computed, as text that ranks compare
    compute_dtype: str = ""  # of the products, as in ``how``
    itemsize_back: int | None = None  # ``itemsize`` of results on the way back; None if it is the same

    @property
    def wire(self) -> Wire:
        """Bytes on the wire in both directions."""
        return Wire(self.itemsize, self.itemsize if self.itemsize_back is None else self.itemsize_back)

    @property
    def count(self) -> int:
        """Number of matrices."""
        return self.layouts[0].shape[0] if self.stack_dims else 1

    def sharded_matrices(self, layout: Layout) -> tuple[ShardedMatrix, ...]:
        """Who holds which pieces of each of its matrices, on the mesh of ``layout``."""
        return shard_matrices(layout, self.stack_dims, self.window)

    def __str__(self) -> str:
        layouts = "; ".join(map(str, self.layouts))
        return (
            f"{self.name}: {'×'.join(map(str, self.layouts[0].shape))} {layouts}, {self.lane}, {self.flops} FLOPs, "
            f"{self.how}"
        )


@dataclass(frozen=True, slots=True, repr=False)
class PlanOptions:
    """The options that decide on a plan, together with the parameters.

    A single matrix larger than ``budget`` still gets a wave. All exchange buffers of a rank together may take
    3 · ``budget`` · ``in_flight`` bytes: room for what it gathers, as much of its own shards, and results for other
    replicas. Only the total is checked. If even waves of one matrix per owner need more, they take that much; so do
    waves of a given ``chunk_size``.
    """

    cost: CostModel  # what work and traffic cost
    # "share" (one replica computes for all), "repeat" (each for itself) or "auto" (the cheaper one)
    replicas: str = "auto"
    chunk_size: int = -1  # most matrices per wave over all ranks; -1 leaves it to ``budget`` and the overlap
    budget: int = 64 * 2**20  # bytes that an owner may gather per wave
    # most waves between their first and last exchange; fewer where buffers would be too large
    in_flight: int = DEFAULT_IN_FLIGHT
    nodes: Nodes | None = None  # which ranks share a node; None if all do

    def __post_init__(self) -> None:
        if self.replicas not in REPLICA_OPTIONS:
            raise ConfigError(f"replicas={self.replicas!r} is unknown; write one of {REPLICA_OPTIONS}.")
        if self.nodes is not None and not self.nodes.several:
            object.__setattr__(self, "nodes", None)

    def __repr__(self) -> str:
        return repr_of_given(self)


@dataclass(frozen=True, slots=True)
class Task:
    """One matrix to orthogonalise.

    A matrix that is cut into pieces, and that each replica computes for itself, is one task per replica. A matrix that
    every holder has whole and computes for itself is one task, with the owner ``EVERY_HOLDER``.
    """

    param: PartIndex  # its part in ``Plan.params``
    matrix: int  # index of the matrix in the part
    sharded: ShardedMatrix  # who holds which piece of it
    cost: float  # what it costs the rank that orthogonalises it
    owner: int = EVERY_HOLDER  # the rank that orthogonalises it, or ``EVERY_HOLDER``
    wave: int = NO_WAVE  # number of its wave, whose lane is ``Plan.wave_lanes[wave]``; ``NO_WAVE`` if nothing travels

    def placed(self, owner: int, wave: int = NO_WAVE) -> Task:  # ``dataclasses.replace`` takes three times as long
        return Task(self.param, self.matrix, self.sharded, self.cost, owner, wave)


@dataclass(frozen=True, slots=True)
class PieceTransfer:
    """A piece of the matrix of task number ``task``, sent from rank ``source`` to rank ``target``."""

    task: int
    source: int
    target: int
    piece: Piece
