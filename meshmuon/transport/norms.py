"""Norms over ranks: one small word per rank, added up or compared by one all-reduce per group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .channels import reduce
from .failures import named_phase
from .groups import moves


@dataclass(frozen=True, slots=True)
class NormWord:
    """What one rank knows of a norm."""

    value: Tensor  # sum of powers, or the largest magnitude, of the elements that this rank counts; without dims
    nan: Tensor  # above 0 if a NaN was left out of ``value``, since a maximum over ranks may lose it
    failed: bool  # this rank cannot continue
    difference: float  # tells whether ranks were given the same; where words are added up, those of ranks that agree give 0
    opposite: float  # where the maximum is taken, minus ``difference``, so that the two cancel for ranks that agree; else 0


@dataclass(frozen=True, slots=True)
class ReducedNorm:
    """The words of all ranks together, as tensors without dims."""

    value: Tensor  # sum of powers, or the largest magnitude, over all ranks
    nan: Tensor  # some rank left out a NaN
    unusable: Tensor  # some rank cannot continue, or ranks were not given the same


def norm_device(devices: Iterable[torch.device], groups: Sequence[dist.ProcessGroup]) -> torch.device:
    """Where a word is put: on the tensors' device if ``groups`` take such tensors, accelerators first; alike on every rank."""
    host = torch.device("cpu")
    candidates = [*dict.fromkeys(device for device in devices if device.type != "cpu"), host]
    if torch.accelerator.is_available() and (current := torch.accelerator.current_accelerator()) is not None:
        candidates.append(torch.device(current.type, torch.accelerator.current_device_index()))
    return next((device for device in candidates if all(moves(group, device) for group in groups)), host)


def reduce_norm(word: NormWord, groups: Sequence[dist.ProcessGroup], *, largest: bool) -> ReducedNorm:
    """Reduces ``word`` over one group after the other, each with one all-reduce; the host does not wait for the device."""
    flags = float(word.failed), word.difference, word.opposite
    # Filled, not copied from the host: a copy would make the host wait.
    packed = torch.stack([word.value, word.nan, *(torch.full_like(word.value, flag) for flag in flags)])
    for group in groups:
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM  # looked up here: not every build of torch has it
        with named_phase("reduction of the gradients' norm", group):
            reduce(packed, group, operation)
        # Later groups join ranks with other parameters: they are only told whether the ranks before them differed.
        packed[3] += packed[4]
        packed[4] = 0.0
    value, nan, failed, difference, _ = packed.unbind()
    return ReducedNorm(value, nan > 0, (failed + difference.abs()) != 0)
