"""Process groups: one that exists already wherever its ranks fit, else a new one."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from .failures import named_phase

__all__ = ["exchange_group", "host_group", "moves", "shared_group"]

_torch_name = c10d._process_group_name
_wanted = threading.local()
_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_shared_lock = threading.Lock()


def exchange_group(ranks: Sequence[int], existing: Iterable[dist.ProcessGroup]) -> dist.ProcessGroup:
    """A group of exactly ``ranks`` (ascending): the first of ``existing`` that fits, the default group, or a new one.

    A new one is made by its own members alone: ranks outside, such as other pipeline stages, need not call.
    """
    return _fitting(ranks, existing) or _new_group(ranks, None)


def shared_group(ranks: tuple[int, ...], existing: Iterable[dist.ProcessGroup]) -> dist.ProcessGroup:
    """As ``exchange_group``, for callers that keep nothing: asked again for the same ranks, it gives the same group.

    What it has made is forgotten together with the default group, so that nothing outlives ``destroy_process_group``.
    """
    group = _fitting(ranks, existing)
    if group is not None:
        return group
    default = dist.group.WORLD
    assert default is not None
    with _shared_lock:
        known = _shared.setdefault(default, {})
    if ranks not in known:
        known[ranks] = _new_group(ranks, None)
    return known[ranks]


def moves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` moves memory of ``device``."""
    return _moves_host_memory(group) if device.type == "cpu" else _has_backend(group, device)


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that moves host memory: ``group`` itself where it can, else a gloo group beside it."""
    if _moves_host_memory(group):
        return group
    return _new_group(dist.get_process_group_ranks(group), "gloo")


def _fitting(ranks: Sequence[int], existing: Iterable[dist.ProcessGroup]) -> dist.ProcessGroup | None:
    default = dist.group.WORLD
    group: dist.ProcessGroup
    for group in (*existing, *(() if default is None else (default,))):
        if dist.get_process_group_ranks(group) == list(ranks):
            return group
    return None


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
        with named_phase("agreement"):
            group: dist.ProcessGroup = dist.new_group(
                list(ranks), backend=backend, use_local_synchronization=True, **_usual_timeout()
            )
    finally:
        _wanted.name = None
    return group


def _usual_timeout() -> dict[str, Any]:
    """The default group's ``timeout``, if any; torch would let a new group wait for half an hour whatever that is."""
    default = dist.group.WORLD
    for device in ("cpu", "cuda"):
        if default is not None and _has_backend(default, torch.device(device)):
            found = getattr(getattr(default._get_backend(torch.device(device)), "options", None), "_timeout", None)
            if isinstance(found, timedelta):
                return {"timeout": found}
    return {}


def _group_name(ranks: list[int], use_hashed_name: bool) -> str:
    """The name that this thread has asked for, else torch's own."""
    name: str | None = getattr(_wanted, "name", None)
    return _torch_name(ranks, use_hashed_name) if name is None else name


def _moves_host_memory(group: dist.ProcessGroup) -> bool:
    return _has_backend(group, torch.device("cpu"))


def _has_backend(group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True
