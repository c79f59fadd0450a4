"""Orthogonalisation: schemes (coefficients), Newton–Schulz in its standard and Gram forms, and what it costs."""

from .blocks import choose_blocks, gram_blocks, standard_blocks
from .cost import orthogonalize_flops, symmetric_flops
from .iteration import Scratch, iterate, scratch_bytes
from .newton_schulz import FORMS, blocks_for, check_shape, default_compute_dtype, expected_flops, orthogonalize, reserve_scratch
from .schemes import Orthogonalizer, Scheme, SchemeLike, keller, polar_express, resolve_scheme
from .workspace import Workspace

__all__ = [
    "FORMS",
    "Orthogonalizer",
    "Scheme",
    "SchemeLike",
    "Scratch",
    "Workspace",
    "blocks_for",
    "check_shape",
    "choose_blocks",
    "default_compute_dtype",
    "expected_flops",
    "gram_blocks",
    "iterate",
    "keller",
    "orthogonalize",
    "orthogonalize_flops",
    "polar_express",
    "reserve_scratch",
    "resolve_scheme",
    "scratch_bytes",
    "standard_blocks",
    "symmetric_flops",
]
