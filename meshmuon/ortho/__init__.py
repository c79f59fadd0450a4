"""Orthogonalisation: schemes (coefficients), Newton–Schulz in its standard and Gram forms, and what it costs."""

from .aligned import ALIGNMENT, aligned_matrices, pitch
from .blocks import choose_blocks, gram_blocks, standard_blocks, worst_error
from .choice import fallback_reason, scheme_for
from .cost import orthogonalize_cost, orthogonalize_flops
from .iteration import Scratch, iterate, scratch_bytes
from .kernels.panels import symmetric_flops
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
from .rational import Rational
from .schemes import (
    AUTO,
    Orthogonalizer,
    Scheme,
    SchemeLike,
    Step,
    halley,
    hybrid,
    keller,
    polar_express,
    resolve_scheme,
    zolotarev,
)
from .workspace import Workspace

__all__ = [
    "ALIGNMENT",
    "AUTO",
    "FORMS",
    "Orthogonalizer",
    "Rational",
    "Scheme",
    "SchemeLike",
    "Scratch",
    "Step",
    "Workspace",
    "aligned_matrices",
    "blocks_for",
    "call_scheme",
    "check_shape",
    "choose_blocks",
    "default_compute_dtype",
    "expected_flops",
    "fallback_reason",
    "gram_blocks",
    "halley",
    "hybrid",
    "iterate",
    "keller",
    "orthogonalize",
    "orthogonalize_cost",
    "orthogonalize_flops",
    "pitch",
    "polar_express",
    "reserve_scratch",
    "resolve_scheme",
    "scheme_for",
    "scratch_bytes",
    "standard_blocks",
    "symmetric_flops",
    "worst_error",
    "zolotarev",
]
