"""The matrices inside a parameter."""

from .matrix_set import (
    CONV_OPTIONS,
    EXPERT_DIMS,
    MatrixOptions,
    MatrixSet,
    Split,
    Window,
    check_expert_keys,
    check_matrix_options,
    find_matrices,
)

__all__ = [
    "CONV_OPTIONS",
    "EXPERT_DIMS",
    "MatrixOptions",
    "MatrixSet",
    "Split",
    "Window",
    "check_expert_keys",
    "check_matrix_options",
    "find_matrices",
]
