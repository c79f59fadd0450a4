"""Which rank holds which elements of a tensor, from shapes and placements alone."""

from .layout import Layout, Mesh, Placement, Ranges, Replicated, Sharded, coordinates, flat_index, length, local_indices
from .sharded_matrix import Piece, ShardedMatrix, shard_matrices
