"""The matrices inside a parameter."""

from .inside import CONV_OPTIONS, MatrixSet, check_expert_keys, matrices_inside

__all__ = ["CONV_OPTIONS", "MatrixSet", "check_expert_keys", "matrices_inside"]
