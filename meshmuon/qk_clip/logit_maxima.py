"""The largest attention logit of each head, exactly, without storing the logits of all heads and positions at once.

A logit is (q·k)·scale for a query and a key that the mask does not hide. Products are computed for one block of queries at a
time, in float32 regardless of the dtype of q and k (in float64 for float64 inputs).
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

DEFAULT_BLOCK_BYTES = 64 * 2**20
_MASKED = -1e4
"""A value of an additive mask that hides a key: this or less (−10000, −1e9, a dtype's lowest number, −∞). More is a bias."""

_FLEX_BLOCK = 128
_flex_failed = False


@torch.no_grad()
def head_maxima(
    q: Tensor, k: Tensor, *, causal: bool, scale: float | None = None, mask: Tensor | None = None, block_bytes: int
) -> Tensor:
    """The largest logit of each query head over the batch and all positions, (heads,); −∞ for a head without visible keys.

    q is (..., heads, queries, dim), k is (..., key heads, keys, dim): dims before the heads are the batch, and each key head
    serves an equal group of consecutive query heads. ``causal``, ``scale`` and ``mask`` are those of ``MaxLogits.observe``. A
    mask's numbers above −10000 are ignored, since scaling Wq and Wk does not change them.
    """
    global _flex_failed
    q, k, mask = _four_dims(q, k, mask)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if mask is None and scale > 0 and _flex_fits(q, k):
        try:
            return flex_maxima(q, k, causal=causal, scale=scale)
        except Exception as error:  # compilers and kernels fail in many ways; the chunked path always works
            _flex_failed = True
            warnings.warn(f"MaxLogits: flex_attention failed ({error}); using chunked products from now on.", stacklevel=2)
    return chunked_maxima(q, k, causal=causal, scale=scale, mask=mask, block_bytes=block_bytes)


def chunked_maxima(q: Tensor, k: Tensor, *, causal: bool, scale: float, mask: Tensor | None, block_bytes: int) -> Tensor:
    """As ``head_maxima``, for q and k of four dims and a mask that expands to (batch, heads, queries, keys)."""
    batch, heads, queries, dim = q.shape
    shared, keys = heads // k.shape[1], k.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    maxima = torch.full((heads,), -math.inf, dtype=dtype, device=q.device)
    if not (batch and queries and keys):
        return maxima
    query_bytes = heads * keys * dtype.itemsize  # logits of one query, of all heads
    batch_step = min(batch, max(1, block_bytes // (query_bytes * queries)))
    query_step = min(queries, max(1, block_bytes // (query_bytes * batch_step)))
    for b in range(0, batch, batch_step):
        keys_t = k[b : b + batch_step].to(dtype).transpose(-1, -2)
        for t in range(0, queries, query_step):
            block = q[b : b + batch_step, :, t : t + query_step].to(dtype)
            visible_keys = min(keys, t + block.shape[2]) if causal else keys
            # Query heads that share a key head are stacked along the queries: the key head need not be repeated.
            grouped = block.reshape(block.shape[0], k.shape[1], shared * block.shape[2], dim)
            logits = (grouped @ keys_t[..., :visible_keys]).mul_(scale).view(*block.shape[:3], visible_keys)
            if causal:
                later = torch.ones(block.shape[2], visible_keys, dtype=torch.bool, device=q.device).triu_(t + 1)
                logits.masked_fill_(later, -math.inf)
            if mask is not None:
                part = mask[b : b + batch_step, :, t : t + query_step, :visible_keys]
                logits.masked_fill_(~part if part.dtype == torch.bool else part <= _MASKED, -math.inf)
            maxima = torch.maximum(maxima, logits.amax((0, 2, 3)))
            del logits  # frees it before the next block is computed
    return maxima


def flex_maxima(q: Tensor, k: Tensor, *, causal: bool, scale: float, attention: Callable[..., Any] | None = None) -> Tensor:
    """As ``head_maxima`` without a mask, from the largest scores that ``flex_attention`` computes on its way.

    The tests do not run it on a GPU. They pass torch's eager implementation as ``attention``.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    blocks = causal_blocks(q.shape[2], k.shape[2], q.device) if causal else None
    options = {"block_mask": blocks, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    _, aux = (attention or _compiled_flex())(q, k, k, **options, return_aux=AuxRequest(max_scores=True))
    largest: Tensor = aux.max_scores
    return largest.amax((0, 2)).to(torch.float32)


@lru_cache(maxsize=16)
def causal_blocks(queries: int, keys: int, device: torch.device) -> Any:
    """The block mask of causal attention; torch's own function would first allocate queries × keys booleans."""
    from torch.nn.attention.flex_attention import BlockMask

    rows, cols = -(-queries // _FLEX_BLOCK), -(-keys // _FLEX_BLOCK)
    row, col = torch.arange(rows, device=device), torch.arange(cols, device=device)
    visible = (row + 1).clamp(max=cols)  # blocks of keys that a block of queries sees, in part or whole
    # Left of the diagonal a block is visible as a whole, unless it reaches beyond the last query or key.
    full = torch.where((row + 1) * _FLEX_BLOCK <= queries, row.clamp(max=keys // _FLEX_BLOCK), 0)
    counts_and_indices = (visible - full, (full[:, None] + col) % cols, full, col.expand(rows, cols))
    partial_count, partial_index, full_count, full_index = (
        tensor.to(torch.int32).contiguous()[None, None] for tensor in counts_and_indices
    )
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        full_count,
        full_index,
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=_not_later,
        seq_lengths=(queries, keys),
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
    """Whether flex_attention gives the same: in half precision on CUDA, where its products are exact in float32 too."""
    if _flex_failed or not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or not (q.numel() and k.numel()):
        return False
    return flex_gives_max_scores()


def _four_dims(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """q and k as (batch, heads, positions, dim), and the mask as (batch, heads, queries, keys); views wherever possible."""
    if min(q.dim(), k.dim()) < 3 or q.shape[-1] != k.shape[-1]:
        raise ConfigError(f"MaxLogits: q {tuple(q.shape)} and k {tuple(k.shape)} must both be (batch, heads, positions, dim).")
    if not k.shape[-3] or q.shape[-3] % k.shape[-3]:
        raise ConfigError(f"MaxLogits: {q.shape[-3]} query heads cannot share {k.shape[-3]} key heads equally.")
    batch: tuple[int, ...] = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3])  # type: ignore[no-untyped-call]
    logits_shape = (*batch, q.shape[-3], q.shape[-2], k.shape[-2])
    if mask is not None:
        try:
            mask = mask.expand(logits_shape)
        except RuntimeError:
            raise ConfigError(f"MaxLogits: the mask {tuple(mask.shape)} does not expand to the logits {logits_shape}.") from None
        mask = mask.reshape(math.prod(batch), *logits_shape[-3:])
    q, k = (tensor.expand(*batch, *tensor.shape[-3:]).reshape(math.prod(batch), *tensor.shape[-3:]) for tensor in (q, k))
    return q, k, mask
