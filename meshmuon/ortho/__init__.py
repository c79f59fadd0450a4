"""Orthogonalisation: schemes (coefficients), Newton–Schulz in its standard and Gram forms, and what it costs."""

from .cost import orthogonalize_flops
from .iteration import iterate
from .newton_schulz import (
    FORMS,
    blocks_for,
    call_scheme,
    default_compute_dtype,
    expected_flops,
    fallback_reason,
    is_mixed,
    orthogonalize,
    reserve_scratch,
    scheme_for,
)
from .rational import Rational
from .schemes import (
    AUTO,
    Orthogonalizer,
    Scheme,
    SchemeLike,
    SchemeName,
    Step,
    halley,
    hybrid,
    keller,
    polar_express,
    resolve_scheme,
    zolotarev,
)
from .scratch import Scratch, scratch_bytes
from .workspace import Workspace, aligned_matrices, pitch
