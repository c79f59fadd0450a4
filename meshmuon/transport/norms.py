"""Norms over ranks: one small word per rank, added up or compared by one all-reduce per group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .failures import named_phase
from .groups import moves

__all__ = ["NormWord", "ReducedNorm", "norm_device", "reduce_norm"]


@dataclass(frozen=True, slots=True)
class NormWord:
    """What one rank knows of a norm.

    Attributes:
        value: sum of powers, or the largest magnitude, of what this rank counts; without dims.
        nan: above 0 if a NaN was left out of ``value``, since a maximum over ranks may lose it.
        failed: this rank cannot go on.
        difference: shows whether ranks were given the same. Where words are added up, those of ranks that agree add up to 0.
        opposite: where the largest is taken, minus ``difference``, so that the two cancel for ranks that agree; else 0.
    """

    value: Tensor
    nan: Tensor
    failed: bool
    difference: float
    opposite: float


@dataclass(frozen=True, slots=True)
class ReducedNorm:
    """What all ranks know together, as tensors without dims: the value, whether there is a NaN, and whether to go on at all."""

    value: Tensor
    nan: Tensor
    unusable: Tensor


def norm_device(devices: Iterable[torch.device], groups: Sequence[dist.ProcessGroup]) -> torch.device:
    """Where a word is put: beside the tensors if ``groups`` move such memory, accelerators first; the same kind on every rank."""
    host = torch.device("cpu")
    wanted = [*dict.fromkeys(device for device in devices if device.type != "cpu"), host]
    if torch.accelerator.is_available() and (current := torch.accelerator.current_accelerator()) is not None:
        wanted.append(torch.device(current.type, torch.accelerator.current_device_index()))
    return next((device for device in wanted if all(moves(group, device) for group in groups)), host)


def reduce_norm(word: NormWord, groups: Sequence[dist.ProcessGroup], *, largest: bool) -> ReducedNorm:
    """Reduces ``word`` over one group after the other, each with one all-reduce; the host does not wait for the device."""
    facts = float(word.failed), word.difference, word.opposite
    # Filled rather than copied from the host, which would wait.
    packed = torch.stack([word.value, word.nan, *(torch.full_like(word.value, fact) for fact in facts)])
    for group in groups:
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM  # asked for here: not every torch has them
        with named_phase("reduction of the gradients' norm", group):
            dist.all_reduce(packed, operation, group=group)
        # Later groups join ranks with other parameters: they only hear whether the ranks before them differed.
        packed[3] += packed[4]
        packed[4] = 0.0
    value, nan, failed, difference, _ = packed.unbind()
    return ReducedNorm(value, nan > 0, (failed + difference.abs()) != 0)
