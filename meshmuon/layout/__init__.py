"""Who holds which part of a tensor, from metadata alone."""

from .cuts import Range, Ranges, clip, cut, length, merged
from .layout import Box, Layout, Mesh, Placement, Replicated, Sharded, coordinates, flat_index
from .spread import Piece, Spread, spread_matrices

__all__ = [
    "Box",
    "Layout",
    "Mesh",
    "Piece",
    "Placement",
    "Range",
    "Ranges",
    "Replicated",
    "Sharded",
    "Spread",
    "clip",
    "coordinates",
    "cut",
    "flat_index",
    "length",
    "merged",
    "spread_matrices",
]
