"""Process groups: one that exists already wherever its ranks fit, else a new one."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ..torch_compat import backend_of, group_names, new_named_group, timeout_of
from .failures import named_phase

__all__ = ["exchange_group", "host_group", "moves", "shared_group"]

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
    """A new group under a name that all its members find by themselves, without a word from other ranks."""
    base = "meshmuon " + hashlib.sha1(f"{backend} {list(ranks)}".encode(), usedforsecurity=False).hexdigest()
    known = sum(name.startswith(base) for name in group_names())
    with named_phase("agreement"):
        return new_named_group(f"{base} {known}", ranks, backend, _usual_timeout())


def _usual_timeout() -> timedelta | None:
    """The default group's timeout, if it says; torch would let a new group wait for half an hour whatever that is."""
    default = dist.group.WORLD
    for device in ("cpu", "cuda"):
        found = None if default is None else timeout_of(backend_of(default, torch.device(device)))
        if found is not None:
            return found
    return None


def _moves_host_memory(group: dist.ProcessGroup) -> bool:
    return _has_backend(group, torch.device("cpu"))


def _has_backend(group: dist.ProcessGroup, device: torch.device) -> bool:
    return backend_of(group, device) is not None
