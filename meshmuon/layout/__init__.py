"""Who holds which part of a tensor, from shapes and placements alone."""

from .cuts import Ranges, clip, cut, length, merged
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
    "clip",
    "coordinates",
    "cut",
    "flat_index",
    "length",
    "merged",
    "shard_matrices",
]
