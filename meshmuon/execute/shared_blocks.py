"""Scales of momentum in int8 whose blocks several ranks or several shards share: found before any shard is filled.

(64, 300) over 4 ranks by columns: each holds 75 columns, and blocks of 128 are cut at columns 75, 150 and 225. Every
rank finds the largest magnitude of its part of each block, and one small reduction over the ranks that share rows gives
all of them the scales that one device would have found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import copy_to
from ..torch_compat import as_dtensor, local_part
from ..transport import has_part, reduce_over_axes
from .elementwise import accumulate
from .int8_momentum import Int8Momentum
from .shards import grouped
from .step_param import RunningStep, StepParam


class BlockMaxima(NamedTuple):
    """What the scales of a parameter's new momentum follow from, as this rank sees it."""

    parts: Sequence[StepParam]  # the parts of the parameter
    momentum: Int8Momentum  # all that this rank has of it
    maxima: Tensor  # (2, rows, blocks): the largest magnitude in each block, and whether any element has changed

    @classmethod
    def of(cls, parts: Sequence[StepParam], numbers: Tensor, changed: Tensor | None) -> BlockMaxima:
        """Of new ``numbers``; without ``changed``, all of them have."""
        momentum = whole_momentum(parts[0])
        changed = torch.ones_like(numbers) if changed is None else changed.float()
        return cls(parts, momentum, torch.stack([momentum.largest(numbers), momentum.largest(changed)]))


def whole_momentum(step_param: StepParam) -> Int8Momentum:
    """All momentum in int8 that this rank has of a parameter."""
    blocks, scales = step_param.blocks, step_param.momentum_scales
    assert blocks is not None
    assert scales is not None
    return Int8Momentum.whole(local_part(step_param.momentum), local_part(scales), blocks)


def find_shared_scales(step: RunningStep) -> None:
    """Finds and stores the new scales of all momenta whose blocks are shared. Ranks that share some call in the
    same step.
    """
    shares = [
        k for k, each in enumerate(step.params) if each.blocks is not None and each.blocks.shared and k not in step.idle
    ]
    found = []
    for indices in grouped((k for k in shares if has_part(step.params[k].param)), lambda k: step.params[k].param):
        parts = [step.params[k] for k in indices]
        numbers, settings = whole_momentum(parts[0]).numbers(), parts[0].settings
        before = numbers.clone() if isinstance(settings.retain, Tensor) else None
        if numbers.numel():
            accumulate([numbers], [local_part(parts[0].grad)], settings.retain)
        found.append(BlockMaxima.of(parts, numbers, None if before is None else numbers != before))
    store_scales(found)


def store_scales(found: Sequence[BlockMaxima]) -> None:
    """Stores the scales that follow from the maxima of all ranks; the step parameters keep the old ones."""
    for entry, maxima in zip(found, _over_ranks(found), strict=True):
        for step_param in entry.parts:
            assert step_param.momentum_scales is not None
            step_param.old_scales = local_part(step_param.momentum_scales).clone()
        entry.momentum.store_scales(*maxima)


def share_kept_scales(step: RunningStep, *, guarded: bool) -> None:
    """After a step in which matrices may have kept their momentum: gives ranks without columns of these the scales,
    too.

    (64, 300) in shards of 128, 128, 44 and 0 columns: the last rank sees no element of the update, so not that it has
    failed.
    """
    unseen = [
        k for k, each in enumerate(step.params) if each.blocks is not None and each.blocks.unseen and k not in step.idle
    ]
    may_stay = (k for k in unseen if (guarded or step.params[k].fallible) and has_part(step.params[k].param))
    found = []
    for indices in grouped(may_stay, lambda k: step.params[k].param):
        parts = [step.params[k] for k in indices]
        momentum = whole_momentum(parts[0])
        held = momentum.largest(torch.ones(momentum.quanta.shape, device=momentum.quanta.device))
        bits = momentum.scales.view(torch.int16)  # in the order of the scales, NaN last
        found.append(BlockMaxima(parts, momentum, torch.where(held > 0, bits.float(), 0.0)))
    for entry, bits in zip(found, _over_ranks(found), strict=True):
        entry.momentum.scales.view(torch.int16).copy_(bits)


def _over_ranks(found: Sequence[BlockMaxima]) -> list[Tensor]:
    """The maxima over all ranks that share the blocks, in the order of ``found``."""

    def ranks_of(k: int) -> object:
        param, blocks = found[k].parts[0].param, found[k].parts[0].blocks
        sharded = as_dtensor(param)
        return None if sharded is None or blocks is None else (sharded.device_mesh, blocks.reduced_axes, param.device)

    reduced: dict[int, Tensor] = {}
    for indices in grouped(range(len(found)), ranks_of):
        first, entries = found[indices[0]].parts[0], [found[k].maxima for k in indices]
        assert first.blocks is not None
        flat = copy_to(torch.cat([maxima.flatten() for maxima in entries]), first.work_device)
        reduce_over_axes(flat, first.param, first.blocks.reduced_axes)
        of_entries = torch.split(copy_to(flat, first.param.device), [maxima.numel() for maxima in entries])
        reduced |= {k: maxima.view(found[k].maxima.shape) for k, maxima in zip(indices, of_entries, strict=True)}
    return [reduced[k] for k in range(len(found))]
