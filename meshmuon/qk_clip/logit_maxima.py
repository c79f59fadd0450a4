"""The largest attention logit of each head, exactly, without storing the logits of all heads and positions at once.

A logit is (q·k)·scale for a query and a key that the mask does not hide. Products are computed for one block of queries
at a time, in float32 regardless of the dtype of q and k (in float64 for float64 inputs).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import ConfigError

DEFAULT_BLOCK_BYTES = 64 * 2**20
_MASKED = -1e4
"""A value of an additive mask that hides a key: this or less (−10000, −1e9, a dtype's lowest number, −∞). More is a
bias.
"""


@torch.no_grad()
def head_maxima(
    q: Tensor, k: Tensor, *, causal: bool, scale: float | None = None, mask: Tensor | None = None, block_bytes: int
) -> Tensor:
    """The largest logit of each query head over the batch and all positions, (heads,); −∞ for a head without visible
    keys.

    q is (..., heads, queries, dim), k is (..., key heads, keys, dim): dims before the heads are the batch, and each key
    head serves an equal group of consecutive query heads. ``causal``, ``scale`` and ``mask`` are those of
    ``MaxLogits.observe``. A mask's numbers above −10000 are ignored, since scaling Wq and Wk does not change them.
    """
    q, k, mask = _four_dims(q, k, mask)
    batch, heads, queries, dim = q.shape
    scale = 1 / math.sqrt(dim) if scale is None else float(scale)
    shared, keys = heads // k.shape[1], k.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    maxima = torch.full((heads,), -math.inf, dtype=dtype, device=q.device)
    if not (batch and queries and keys):
        return maxima
    query_bytes = heads * keys * dtype.itemsize  # logits of one query, of all heads
    batch_step = min(batch, max(1, block_bytes // (query_bytes * queries)))
    query_step = min(queries, max(1, block_bytes // (query_bytes * batch_step)))
    exact = _multiplied_as_they_are(q, k)
    for b in range(0, batch, batch_step):
        keys_t = k[b : b + batch_step].to(k.dtype if exact else dtype).transpose(-1, -2).flatten(0, 1)
        for t in range(0, queries, query_step):
            block = q[b : b + batch_step, :, t : t + query_step]
            visible_keys = min(keys, t + block.shape[2]) if causal else keys
            # Query heads that share a key head are stacked along the queries: the key head need not be repeated.
            grouped = (block if exact else block.to(dtype)).reshape(-1, shared * block.shape[2], dim)
            visible = keys_t[..., :visible_keys]
            products = torch.bmm(grouped, visible, out_dtype=dtype) if exact else torch.bmm(grouped, visible)
            logits = products.mul_(scale).view(*block.shape[:3], visible_keys)
            if causal:
                later = torch.ones(block.shape[2], visible_keys, dtype=torch.bool, device=q.device).triu_(t + 1)
                logits.masked_fill_(later, -math.inf)
            if mask is not None:
                part = mask[b : b + batch_step, :, t : t + query_step, :visible_keys]
                logits.masked_fill_(~part if part.dtype == torch.bool else part <= _MASKED, -math.inf)
            maxima = torch.maximum(maxima, logits.amax((0, 2, 3)))
            del logits, products  # frees them before the next block is computed
    return maxima


def _multiplied_as_they_are(q: Tensor, k: Tensor) -> bool:
    """Whether the device multiplies numbers of 16 bits exactly and adds up in float32; elsewhere they are converted
    first.
    """
    return q.is_cuda and q.dtype == k.dtype and q.dtype in (torch.bfloat16, torch.float16)


def _four_dims(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """q and k as (batch, heads, positions, dim), and the mask as (batch, heads, queries, keys); views wherever
    possible.
    """
    if min(q.dim(), k.dim()) < 3 or q.shape[-1] != k.shape[-1]:
        raise ConfigError(
            f"MaxLogits: q {tuple(q.shape)} and k {tuple(k.shape)} must both be (batch, heads, positions, dim)."
        )
    if not k.shape[-3] or q.shape[-3] % k.shape[-3]:
        raise ConfigError(f"MaxLogits: {q.shape[-3]} query heads cannot share {k.shape[-3]} key heads equally.")
    batch: tuple[int, ...] = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3])  # type: ignore[no-untyped-call]
    logits_shape = (*batch, q.shape[-3], q.shape[-2], k.shape[-2])
    if mask is not None:
        try:
            mask = mask.expand(logits_shape)
        except RuntimeError:
            raise ConfigError(
                f"MaxLogits: the mask {tuple(mask.shape)} does not expand to the logits {logits_shape}."
            ) from None
        mask = mask.reshape(math.prod(batch), *logits_shape[-3:])
    q, k = (
        tensor.expand(*batch, *tensor.shape[-3:]).reshape(math.prod(batch), *tensor.shape[-3:]) for tensor in (q, k)
    )
    return q, k, mask
