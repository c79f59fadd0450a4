"""Orthogonalisation as the optimizer runs it: buffers and views are made once, before the first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshmuon import Workspace
from meshmuon.ortho import (
    Orthogonalizer,
    Scheme,
    Scratch,
    blocks_for,
    call_scheme,
    iterate,
    reserve_scratch,
    scheme_for,
)
from meshmuon.ortho.kernels.products import products_for

__all__ = ["prepare"]


def prepare(
    batches: Sequence[Tensor], scheme: Scheme | Orthogonalizer, dtype: torch.dtype = torch.float32
) -> Callable[[], None]:
    """What orthogonalises all batches, (count, rows, cols), into memory of its own; they share one workspace."""
    workspace, outs = Workspace(), [torch.empty_like(batch) for batch in batches]
    chosen = [scheme_for(scheme, batch.size(1), batch.size(2), dtype) for batch in batches]
    for batch, own in zip(batches, chosen, strict=True):
        reserve_scratch(batch, own, form="auto", dtype=dtype, workspace=workspace)
    calls = [_call(batch, out, own, dtype, workspace) for batch, out, own in zip(batches, outs, chosen, strict=True)]

    def run() -> None:
        for call in calls:
            call()

    return run


def _call(
    batch: Tensor, out: Tensor, scheme: Scheme | Orthogonalizer, dtype: torch.dtype, workspace: Workspace
) -> Callable[[], None]:
    if not isinstance(scheme, Scheme):

        def call() -> None:
            out.copy_(call_scheme(scheme, batch))

    else:
        scratch, products = Scratch(workspace, batch, dtype, out), products_for(batch.device)
        blocks = blocks_for(batch.size(1), batch.size(2), scheme, form="auto", dtype=dtype)

        def call() -> None:
            iterate(batch, scheme.steps, blocks, scratch, products)

    return call
