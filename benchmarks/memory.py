"""Memory of a step, as the CPU allocator reports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Allocations", "allocations_of"]

SCALAR = 64  # bytes; the allocator's smallest block, which holds a number


@dataclass(frozen=True, slots=True)
class Allocations:
    """What one step allocated.

    Attributes:
        count: allocations larger than a number.
        numbers: allocations that hold a number or nothing.
        nbytes: bytes of all of them.
        peak: most bytes beyond those held before the step.
    """

    count: int
    numbers: int
    nbytes: int
    peak: int


def allocations_of(step: Callable[[], object]) -> Allocations:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for size in sizes:
        now += size
        peak = max(peak, now)
    taken = [size for size in sizes if size > 0]
    return Allocations(sum(s > SCALAR for s in taken), sum(s <= SCALAR for s in taken), sum(taken), peak)
