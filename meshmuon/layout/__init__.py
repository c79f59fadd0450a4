"""Who holds which part of a tensor, from shapes and placements alone."""

from .cuts import Ranges, cut, length, local_indices, merged, positions
from .layout import Layout, Mesh, Placement, Replicated, Sharded, coordinates, flat_index
from .sharded_matrix import Piece, ShardedMatrix, shard_matrices

__all__ = [
    "Layout",
    "Mesh",
    "Piece",
    "Placement",
    "Ranges",
    "Replicated",
    "Sharded",
    "ShardedMatrix",
    "coordinates",
    "cut",
    "flat_index",
    "length",
    "local_indices",
    "merged",
    "positions",
    "shard_matrices",
]
