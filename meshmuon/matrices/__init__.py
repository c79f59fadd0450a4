"""The matrices inside a parameter."""

from .inside import MatrixSet, matrices_inside

__all__ = ["MatrixSet", "matrices_inside"]
