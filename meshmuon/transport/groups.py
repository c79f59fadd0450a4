"""Process groups: one that exists already wherever its ranks fit, else a new one."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

__all__ = ["exchange_group", "host_group"]

_torch_name = c10d._process_group_name
_wanted = threading.local()


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
    """A new group under a name that all its members find by themselves.

    torch names a group that is made by its members alone after the number of groups that this process has seen. That number
    differs between ranks as soon as they are in different meshes, and members with different names wait for each other forever.
    """
    base = "meshmuon " + hashlib.sha1(f"{backend} {list(ranks)}".encode(), usedforsecurity=False).hexdigest()
    known = sum(name.startswith(base) for name in c10d._world.pg_names.values())
    c10d._process_group_name = _group_name  # type: ignore[assignment]
    _wanted.name = f"{base} {known}"
    try:
        group: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    finally:
        _wanted.name = None
    return group


def _group_name(ranks: list[int], use_hashed_name: bool) -> str:
    """The name that this thread has asked for, else torch's own."""
    name: str | None = getattr(_wanted, "name", None)
    return _torch_name(ranks, use_hashed_name) if name is None else name


def _moves_host_memory(group: dist.ProcessGroup) -> bool:
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True
