"""Orthogonalisation: schemes (coefficients), Newton–Schulz in its standard and Gram forms, and what it costs."""

from .aligned import ALIGNMENT, aligned_matrices, pitch
from .blocks import choose_blocks, gram_blocks, standard_blocks
from .cost import orthogonalize_flops, symmetric_flops
from .iteration import Scratch, iterate, scratch_bytes
from .newton_schulz import (
    FORMS,
    blocks_for,
    call_scheme,
    check_shape,
    default_compute_dtype,
    expected_flops,
    orthogonalize,
    reserve_scratch,
)
from .schemes import Orthogonalizer, Scheme, SchemeLike, keller, polar_express, resolve_scheme
from .workspace import Workspace

__all__ = [
    "ALIGNMENT",
    "FORMS",
    "Orthogonalizer",
    "Scheme",
    "SchemeLike",
    "Scratch",
    "Workspace",
    "aligned_matrices",
    "blocks_for",
    "call_scheme",
    "check_shape",
    "choose_blocks",
    "default_compute_dtype",
    "expected_flops",
    "gram_blocks",
    "iterate",
    "keller",
    "orthogonalize",
    "orthogonalize_flops",
    "pitch",
    "polar_express",
    "reserve_scratch",
    "resolve_scheme",
    "scratch_bytes",
    "standard_blocks",
    "symmetric_flops",
]
