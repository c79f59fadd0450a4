"""The matrices inside a parameter."""

from .inside import (
    CONV_OPTIONS,
    EXPERT_DIMS,
    Inside,
    MatrixSet,
    Split,
    Window,
    check_expert_keys,
    check_inside,
    matrices_inside,
)

__all__ = [
    "CONV_OPTIONS",
    "EXPERT_DIMS",
    "Inside",
    "MatrixSet",
    "Split",
    "Window",
    "check_expert_keys",
    "check_inside",
    "matrices_inside",
]
