"""What a plan is made of: parameters, the matrices inside them as tasks, and the pieces that travel."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NewType

from ..layout import Layout, Piece, ShardedMatrix, shard_matrices
from ..matrices import Window

PartIndex = NewType("PartIndex", int)
"""Counts ``Plan.params``: the parameters of a plan, and of a fused one each part."""

EVERY_HOLDER = -1
NO_WAVE = -1


@dataclass(frozen=True, slots=True)
class PlannedParam:
    """One parameter, or one part of a fused one."""

    name: str
    layouts: tuple[Layout, ...]  # how it lies on its mesh; several if sibling meshes have copies of it
    stack_dims: int  # how many leading dims index the matrices (0, or 1 for a stack of experts)
    lane: Hashable  # what must be equal for matrices to travel together: device types, dtype on the wire and dtype of the update
    itemsize: int  # bytes per element on the wire
    flops: int  # FLOPs of orthogonalising one of its matrices
    share: bool | None = None  # if ``replicas`` is "auto": whether replicas share one owner; None leaves it to the cost model
    private: bool = False  # known to this rank alone (a plain tensor): neither balanced nor part of the digest
    window: Window | None = None  # which rows and columns of the parameter its matrices are; None for all of them
    staged: bool = False  # in host memory, while its matrices travel and are orthogonalised on a device
    how: str = ""  # how its matrices are computed, as text that ranks compare
    compute_dtype: str = ""  # of the products, as in ``how``

    @property
    def count(self) -> int:
        """Number of matrices."""
        return self.layouts[0].shape[0] if self.stack_dims else 1

    def sharded_matrices(self, layout: Layout) -> tuple[ShardedMatrix, ...]:
        """Who holds which pieces of each of its matrices, on the mesh of ``layout``."""
        return shard_matrices(layout, self.stack_dims, self.window)

    def __str__(self) -> str:
        layouts = "; ".join(map(str, self.layouts))
        return f"{self.name}: {'×'.join(map(str, self.layouts[0].shape))} {layouts}, {self.lane}, {self.flops} FLOPs, {self.how}"


@dataclass(frozen=True, slots=True)
class Task:
    """One matrix to orthogonalise.

    A matrix that is cut into pieces, and that each replica computes for itself, is one task per replica. A matrix that every
    holder has whole and computes for itself is one task, with the owner ``EVERY_HOLDER``.
    """

    param: PartIndex  # its parameter in ``Plan.params``
    matrix: int  # index of the matrix in the parameter
    sharded: ShardedMatrix  # who holds which piece of it
    cost: float  # what it costs the rank that orthogonalises it
    owner: int = EVERY_HOLDER  # the rank that orthogonalises it, or ``EVERY_HOLDER``
    wave: int = NO_WAVE  # number of its wave, whose lane is ``Plan.wave_lanes[wave]``; ``NO_WAVE`` if nothing travels

    def placed(self, owner: int, wave: int = NO_WAVE) -> Task:
        """The task with an owner, and a wave."""  # ``dataclasses.replace`` takes three times as long
        return Task(self.param, self.matrix, self.sharded, self.cost, owner, wave)


@dataclass(frozen=True, slots=True)
class PieceTransfer:
    """A piece of the matrix of task number ``task``, sent from rank ``source`` to rank ``target``."""

    task: int
    source: int
    target: int
    piece: Piece
