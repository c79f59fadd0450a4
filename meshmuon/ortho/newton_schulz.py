"""Orthogonalisation of a matrix or a batch: picks dtype, scheme and form, then runs the iteration."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from .. import torch_compat
from ..device import HOST, wide_sums
from ..errors import ConfigError
from .blocks import choose_blocks, gram_blocks, is_safe, standard_blocks, worst_error
from .cost import orthogonalize_cost
from .iteration import iterate
from .kernels.products import Products, products_for
from .rational import Rational
from .schemes import AUTO, Orthogonalizer, Scheme, halley, hybrid, polar_express, resolve_scheme, zolotarev
from .scratch import SHORT, Scratch
from .workspace import Workspace, aligned_matrices, is_aligned

Form: TypeAlias = Literal["auto", "standard", "gram"]
FORMS = get_args(Form)
_SMALLEST_SHORT = 100  # short side from which bfloat16 pays on CPUs that multiply in it


def default_compute_dtype(
    device: torch.device, dtype: torch.dtype, scheme: Scheme | Orthogonalizer = AUTO, short_side: int = 1 << 20
) -> torch.dtype:
    r"""float16 on a GPU, bfloat16 on a CPU that multiplies in it, float32 everywhere else; float64 stays float64.

    float16 and not bfloat16 on a GPU: both run at the same speed, X is rescaled so that the range of float16 suffices,
    and its three more digits leave a sixth of bfloat16's error. On a CPU float32 also stays for matrices whose short
    side makes it the faster one, and for ``scheme``\ s that have rational steps or are code of the user.
    """
    if dtype == torch.float64:
        return dtype
    if device.type == "cuda":
        return torch.float16
    polynomial = isinstance(scheme, Scheme) and not scheme.rational
    in_short = (
        device.type == "cpu" and polynomial and short_side >= _SMALLEST_SHORT and torch_compat.cpu_multiplies_bfloat16()
    )
    return torch.bfloat16 if in_short else torch.float32


def is_mixed(scheme: Scheme | Orthogonalizer | None, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether large products are in bfloat16 and inverses in float32: ``AUTO`` in bfloat16 on a CPU that multiplies
    in it.
    """
    return (
        scheme == AUTO and dtype == torch.bfloat16 and device.type == "cpu" and torch_compat.cpu_multiplies_bfloat16()
    )


def scheme_for(
    scheme: Scheme | Orthogonalizer, rows: int, cols: int, dtype: torch.dtype, device: torch.device = HOST
) -> Scheme | Orthogonalizer:
    """The scheme that orthogonalises a rows × cols matrix on ``device`` with products in ``dtype``.

    ``AUTO`` becomes the cheapest scheme whose worst error on [1e-3, 1], rounding included, is at most that of
    ``polar_express``; on a GPU, where inverses may make the host wait, ``polar_express`` itself; and ``halley`` with
    one quintic where products are mixed. A scheme with rational steps becomes ``polar_express`` in 16 bits. Everything
    else stays as it is.
    """
    if not isinstance(scheme, Scheme):
        return scheme
    if scheme == AUTO:
        if is_mixed(scheme, dtype, device):
            return halley(quintics=1)
        return polar_express() if device.type == "cuda" else _cheapest(rows, cols, dtype)
    if not scheme.rational:
        return scheme
    if dtype in SHORT:
        return polar_express()
    if not is_safe(scheme, dtype):
        smallest_pole = min(min(step.poles) for step in scheme.steps if isinstance(step, Rational))
        raise ConfigError(
            f"scheme {scheme.name!r} ({scheme.source}) is not safe in {str(dtype).removeprefix('torch.')}: its "
            f"smallest pole is {smallest_pole:.2g}, and rounding could make R + pole·I indefinite. Raise l (1e-3 is "
            "usual), or pass compute_dtype=torch.float64."
        )
    return scheme


def fallback_reason(scheme: Scheme | Orthogonalizer, dtype: torch.dtype) -> str | None:
    """Why a matrix is not orthogonalised by the scheme that its param group names; None where it is."""
    if isinstance(scheme, Scheme) and scheme.rational and dtype in SHORT:
        name = str(dtype).removeprefix("torch.")
        return f"polar_express instead of {scheme.name}: {name} is too short for inverses"
    return None


@lru_cache(maxsize=4096)
def _cheapest(rows: int, cols: int, dtype: torch.dtype) -> Scheme:
    default = polar_express()
    if dtype in SHORT:
        return default
    bound = worst_error(default, dtype)
    candidates = [default, *(scheme for scheme in (hybrid(), zolotarev()) if worst_error(scheme, dtype) <= bound)]
    return min(
        candidates,
        key=lambda scheme: orthogonalize_cost(rows, cols, scheme.steps, choose_blocks(rows, cols, scheme, dtype)),
    )


@torch.no_grad()
def orthogonalize(
    x: Tensor,
    scheme: str | Scheme | Orthogonalizer,
    *,
    form: str = "auto",
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    products: Products | None = None,
) -> Tensor:
    """Drives the singular values of each matrix towards 1, keeping its singular vectors.

    Any scale of ``x`` gives the same result, from 1e-38 to 1e37 (float32); a zero matrix stays zero. Nothing is
    recorded for automatic differentiation.

    Args:
        x: one matrix (rows, cols) or a batch (batch, rows, cols); left unchanged unless it is also ``out``.
        scheme: the scheme or its name, or a callable that does the whole work on a batch.
        form: ``"standard"``, ``"gram"``, or ``"auto"``: the cheaper one by counted FLOPs that is safe in ``dtype``.
        dtype: dtype of the products; float32 on CPU and float16 on GPU unless given.
        out: where the result goes, same shape as ``x``; may be ``x`` itself.
        workspace: scratch to reuse; with it and ``out``, a repeated call allocates nothing.
        products: implementation of the products; chosen by device unless given.

    Returns:
        ``out``, or a new tensor of the dtype of ``x``.
    """
    if x.dim() not in (2, 3):
        raise ConfigError(f"orthogonalize takes (rows, cols) or (batch, rows, cols), got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ConfigError(f"orthogonalize takes floating point matrices, got {x.dtype}")
    if out is not None and out.shape != x.shape:
        raise ConfigError(
            f"orthogonalize: out has shape {tuple(out.shape)}, x has {tuple(x.shape)}; they must be equal"
        )
    out = torch.empty_like(x) if out is None else out
    if x.numel() == 0:
        return out
    batch, result = (x, out) if x.dim() == 3 else (x.unsqueeze(0), out.unsqueeze(0))
    if isinstance(scheme, str):
        scheme = resolve_scheme(scheme, 5)
    elif not isinstance(scheme, Scheme) and not callable(scheme):
        raise ConfigError(f"orthogonalize takes a scheme, its name or a callable, got a {type(scheme).__name__}")
    if not isinstance(scheme, Scheme):
        result.copy_(call_scheme(scheme, batch))
        return out
    dtype = dtype or default_compute_dtype(x.device, x.dtype, scheme, min(x.shape[-2:]))
    scheme = scheme_for(scheme, x.size(-2), x.size(-1), dtype, x.device)
    assert isinstance(scheme, Scheme)
    blocks = blocks_for(x.size(-2), x.size(-1), scheme, form=form, dtype=dtype)
    scratch = Scratch(workspace or Workspace(), batch, dtype, result)
    with wide_sums(x.device, dtype):
        iterate(batch, scheme.steps, blocks, scratch, products or products_for(x.device))
    return out


def call_scheme(scheme: Orthogonalizer, batch: Tensor, *, one_by_one: bool = False) -> Tensor:
    """What a callable scheme makes of a batch.

    It is given the whole batch where its matrices follow each other at multiples of 64 bytes. Otherwise, or if
    ``one_by_one``, it is given one aligned matrix after the other, since its products may round by address and by
    batch.
    """
    if one_by_one or not (batch.is_contiguous() and is_aligned(batch)):
        matrix = aligned_matrices((1, *batch.shape[1:]), batch.dtype, batch.device)
        results = [_checked(scheme(matrix.copy_(batch[k : k + 1])), matrix).clone() for k in range(len(batch))]
        return torch.cat(results) if results else torch.empty_like(batch)
    return _checked(scheme(batch), batch)


def _checked(result: Any, batch: Tensor) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != batch.shape:  # copying it would broadcast
        made = tuple(result.shape) if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise ConfigError(f"the callable scheme made {made} of {tuple(batch.shape)}; it must keep the shape")
    return result


def reserve_scratch(
    x: Tensor, scheme: Scheme | Orthogonalizer, *, form: str, dtype: torch.dtype, workspace: Workspace
) -> None:
    """Grows ``workspace`` to all that ``iterate`` will take for a batch like ``x``, so that it never moves later."""
    if isinstance(scheme, Scheme):
        Scratch(workspace, x, dtype, x).reserve(
            scheme.steps, blocks_for(x.size(-2), x.size(-1), scheme, form=form, dtype=dtype)
        )


def blocks_for(rows: int, cols: int, scheme: Scheme, *, form: str, dtype: torch.dtype) -> tuple[int, ...]:
    """How the steps are cut into blocks for rows × cols matrices."""
    if dtype in SHORT and scheme.rational:  # a split step is a block of its own
        return standard_blocks(scheme)
    if form == "auto":
        return choose_blocks(rows, cols, scheme, dtype)
    if form == "gram":
        return gram_blocks(scheme, dtype)
    if form == "standard":
        return standard_blocks(scheme)
    raise ConfigError(f"form={form!r} is unknown; write one of {FORMS}")


def expected_flops(
    rows: int,
    cols: int,
    scheme: Scheme | Orthogonalizer | None,
    form: str,
    dtype: torch.dtype,
    device: torch.device = HOST,
) -> int:
    """FLOPs of orthogonalising one matrix; of a callable scheme nothing is known, it counts as five standard steps."""
    scheme = None if scheme is None else scheme_for(scheme, rows, cols, dtype, device)
    if not isinstance(scheme, Scheme):
        return orthogonalize_cost(rows, cols, polar_express().steps, (1,) * 5)
    return orthogonalize_cost(rows, cols, scheme.steps, blocks_for(rows, cols, scheme, form=form, dtype=dtype), dtype)
