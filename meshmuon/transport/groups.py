"""Process groups: one that exists already wherever its ranks fit, else a new one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

__all__ = ["exchange_group", "host_group"]


def exchange_group(ranks: Sequence[int], existing: Iterable[dist.ProcessGroup]) -> dist.ProcessGroup:
    """A group of exactly ``ranks`` (ascending): the first of ``existing`` that fits, the default group, or a new one.

    A new one is made by its own members alone: ranks outside, such as other pipeline stages, need not call.
    """
    default = dist.group.WORLD
    group: dist.ProcessGroup
    for group in (*existing, *(() if default is None else (default,))):
        if dist.get_process_group_ranks(group) == list(ranks):
            return group
    return _new_group(ranks, None)


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that moves host memory: ``group`` itself where it can, else a gloo group beside it."""
    if _moves_host_memory(group):
        return group
    return _new_group(dist.get_process_group_ranks(group), "gloo")


def _new_group(ranks: Sequence[int], backend: str | None) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    return group


def _moves_host_memory(group: dist.ProcessGroup) -> bool:
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True
