"""The largest attention logit of each head, exactly, without the logits of all heads and positions at once.

A logit is (q·k)·scale of a query and a key that the mask lets meet. Products are taken in float32 (float64 for float64 inputs)
whatever the dtype of q and k, a block of queries at a time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..torch_compat import flex_gives_max_scores

__all__ = ["DEFAULT_BLOCK_BYTES", "causal_blocks", "chunked_maxima", "flex_maxima", "head_maxima"]

DEFAULT_BLOCK_BYTES = 64 * 2**20
_MASKED = -1e4
"""An additive mask of this or less (−10000, −1e9, a dtype's lowest number, −∞) hides a key; more is a bias."""

_FLEX_BLOCK = 128
_flex_failed = False


@torch.no_grad()
def head_maxima(
    q: Tensor, k: Tensor, *, causal: bool, scale: float | None = None, mask: Tensor | None = None, block_bytes: int
) -> Tensor:
    """The largest logit of each query head, over the batch and all positions; −∞ for a head that sees nothing.

    Args:
        q: queries, (..., heads, queries, dim); dims before the heads are the batch.
        k: keys, (..., key heads, keys, dim); each key head serves an equal group of consecutive query heads.
        causal: query t sees keys 0 to t, as in ``F.scaled_dot_product_attention(is_causal=True)``.
        scale: factor of the logits, 1/√dim unless given.
        mask: as SDPA's ``attn_mask``: booleans, true where a key is seen, or numbers to add, of which those of −10000 or less
            hide a key. Other numbers are no part of a logit here: no scaling of Wq and Wk changes them.
        block_bytes: about the most memory that logits may take at a time.
    """
    q, k, mask = _four_dims(q, k, mask)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if mask is None and scale > 0 and _flex_fits(q, k):
        try:
            return flex_maxima(q, k, causal=causal, scale=scale)
        except Exception as error:  # compilers and kernels fail in many ways, and the other path always works
            _give_up_flex(error)
    return chunked_maxima(q, k, causal=causal, scale=scale, mask=mask, block_bytes=block_bytes)


def chunked_maxima(q: Tensor, k: Tensor, *, causal: bool, scale: float, mask: Tensor | None, block_bytes: int) -> Tensor:
    """As ``head_maxima``, for q and k of four dims and a mask that expands to (batch, heads, queries, keys)."""
    batch, heads, queries, dim = q.shape
    shared, keys = heads // k.shape[1], k.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    found = torch.full((heads,), -math.inf, dtype=dtype, device=q.device)
    if not (batch and queries and keys):
        return found
    row = heads * keys * dtype.itemsize  # logits of one query
    some = min(batch, max(1, block_bytes // (row * queries)))
    step = min(queries, max(1, block_bytes // (row * some)))
    for b in range(0, batch, some):
        near = k[b : b + some].to(dtype).transpose(-1, -2)
        for t in range(0, queries, step):
            rows = q[b : b + some, :, t : t + step].to(dtype)
            seen = min(keys, t + rows.shape[2]) if causal else keys
            # The queries of a group meet one key head, which therefore need not be repeated.
            grouped = rows.reshape(rows.shape[0], k.shape[1], shared * rows.shape[2], dim)
            logits = (grouped @ near[..., :seen]).mul_(scale).view(*rows.shape[:3], seen)
            if causal:
                later = torch.ones(rows.shape[2], seen, dtype=torch.bool, device=q.device).triu_(t + 1)
                logits.masked_fill_(later, -math.inf)
            if mask is not None:
                visible = mask[b : b + some, :, t : t + step, :seen]
                logits.masked_fill_(~visible if visible.dtype == torch.bool else visible <= _MASKED, -math.inf)
            found = torch.maximum(found, logits.amax((0, 2, 3)))
            del logits  # before the next block is made
    return found


def flex_maxima(q: Tensor, k: Tensor, *, causal: bool, scale: float, attention: Callable[..., Any] | None = None) -> Tensor:
    """As ``head_maxima`` without a mask, through the largest scores that ``flex_attention`` finds on its way.

    Not run on a GPU by this project's tests; they run it with ``attention`` replaced by torch's own eager implementation.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    blocks = causal_blocks(q.shape[2], k.shape[2], q.device) if causal else None
    options = {"block_mask": blocks, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    _, aux = (attention or _compiled_flex())(q, k, k, **options, return_aux=AuxRequest(max_scores=True))
    largest: Tensor = aux.max_scores
    return largest.amax((0, 2)).to(torch.float32)


@lru_cache(maxsize=16)
def causal_blocks(queries: int, keys: int, device: torch.device) -> Any:
    """The block mask of causal attention, without the queries × keys booleans that torch's own function makes first."""
    from torch.nn.attention.flex_attention import BlockMask

    rows, cols = -(-queries // _FLEX_BLOCK), -(-keys // _FLEX_BLOCK)
    row, col = torch.arange(rows, device=device), torch.arange(cols, device=device)
    seen = (row + 1).clamp(max=cols)
    # Left of the diagonal a block is seen whole, unless it reaches beyond the last query or key.
    full = torch.where((row + 1) * _FLEX_BLOCK <= queries, row.clamp(max=keys // _FLEX_BLOCK), 0)
    parts = (seen - full, (full[:, None] + col) % cols, full, col.expand(rows, cols))
    some, some_at, whole, whole_at = (one.to(torch.int32).contiguous()[None, None] for one in parts)
    return BlockMask.from_kv_blocks(
        some, some_at, whole, whole_at, BLOCK_SIZE=_FLEX_BLOCK, mask_mod=_not_later, seq_lengths=(queries, keys)
    )


def _not_later(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)

    def run(*args: Any, **options: Any) -> Any:
        with torch.compiler.set_stance("default"):  # even while the model around it runs eagerly
            return compiled(*args, **options)

    return run


def _flex_fits(q: Tensor, k: Tensor) -> bool:
    """Half precision on CUDA: there its products are exact in float32, as the chunked ones are."""
    if _flex_failed or not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or not (q.numel() and k.numel()):
        return False
    return flex_gives_max_scores()


def _give_up_flex(error: Exception) -> None:
    global _flex_failed
    _flex_failed = True
    warnings.warn(f"MaxLogits: flex_attention failed ({error}); using chunked products from now on.", stacklevel=3)


def _four_dims(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """q and k as (batch, heads, positions, dim) and a mask that can be sliced like their logits; views wherever possible."""
    if min(q.dim(), k.dim()) < 3 or q.shape[-1] != k.shape[-1]:
        raise ConfigError(f"MaxLogits: q {tuple(q.shape)} and k {tuple(k.shape)} must be (batch, heads, positions, dim) both.")
    if not k.shape[-3] or q.shape[-3] % k.shape[-3]:
        raise ConfigError(f"MaxLogits: {q.shape[-3]} query heads and {k.shape[-3]} key heads are no equal groups.")
    batch: tuple[int, ...] = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3])  # type: ignore[no-untyped-call]
    positions = (*batch, q.shape[-3], q.shape[-2], k.shape[-2])
    if mask is not None:
        try:
            mask = mask.expand(positions)
        except RuntimeError:
            raise ConfigError(f"MaxLogits: the mask {tuple(mask.shape)} does not expand to the logits {positions}.") from None
        mask = mask.reshape(math.prod(batch), *positions[-3:])
    q, k = (one.expand(*batch, *one.shape[-3:]).reshape(math.prod(batch), *one.shape[-3:]) for one in (q, k))
    return q, k, mask
