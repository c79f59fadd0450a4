"""Process groups: an existing one where its ranks fit, else a new one."""

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

_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_making: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], threading.RLock]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # of these dictionaries, whose first keys are default groups, or the group itself
_turns: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.RLock] = weakref.WeakKeyDictionary()


def exchange_group(ranks: Sequence[int], existing: Iterable[dist.ProcessGroup]) -> dist.ProcessGroup:
    """A group of exactly ``ranks`` (ascending): the first of ``existing`` that fits, the default group, or a new one.

    Only its members need to call: other ranks, such as those of other pipeline stages, take no part in making a new group.
    """
    return _fitting(ranks, existing) or _new_group(ranks)


def shared_group(ranks: tuple[int, ...], existing: Iterable[dist.ProcessGroup]) -> dist.ProcessGroup:
    """As ``exchange_group``, but the same ranks always get the same group, for callers that do not keep it.

    New groups are forgotten together with the default group, so that nothing outlives ``destroy_process_group``.
    """
    group = _fitting(ranks, existing)
    if group is not None:
        return group
    default = dist.group.WORLD
    assert default is not None
    with _making_of(ranks):
        known = _shared.setdefault(default, {})
        if ranks not in known:
            known[ranks] = _new_group(ranks)
        return known[ranks]


def turn_of(group: dist.ProcessGroup) -> threading.RLock:
    """The lock of ``group``: who holds it is the only thread of this process that steps over the group.

    Collectives of one group meet by the order in which they are started. If two threads stepped over it at the same time, a
    collective of one could meet another's on another rank.
    """
    with _lock:
        return _turns.setdefault(group, threading.RLock())


def moves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether collectives of ``group`` take tensors of ``device``."""
    return _moves_host_memory(group) if device.type == "cpu" else backend_of(group, device) is not None


def _fitting(ranks: Sequence[int], existing: Iterable[dist.ProcessGroup]) -> dist.ProcessGroup | None:
    default = dist.group.WORLD
    group: dist.ProcessGroup
    for group in (*existing, *(() if default is None else (default,))):
        if dist.get_process_group_ranks(group) == list(ranks):
            return group
    return None


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A new group, under a name that each of its members derives without communicating."""
    base = "meshmuon " + hashlib.sha1(f"{list(ranks)}".encode(), usedforsecurity=False).hexdigest()
    with _making_of(tuple(ranks)), named_phase("agreement"):
        known = sum(name.startswith(base) for name in group_names())
        return new_named_group(f"{base} {known}", ranks, None, _usual_timeout())


def _making_of(ranks: tuple[int, ...]) -> threading.RLock:
    """The lock under which groups of ``ranks`` are made: their names are counted, so that two threads would take the same one."""
    default = dist.group.WORLD
    assert default is not None
    with _lock:
        return _making.setdefault(default, {}).setdefault(ranks, threading.RLock())


def timeout_of_group(group: dist.ProcessGroup) -> timedelta | None:
    """How long collectives of ``group`` wait for a rank, if its backend tells."""
    for device in ("cpu", "cuda"):
        timeout = timeout_of(backend_of(group, torch.device(device)))
        if timeout is not None:
            return timeout
    return None


def _usual_timeout() -> timedelta | None:
    """The default group's timeout, if known; without it torch gives a new group half an hour, regardless of the default group."""
    default = dist.group.WORLD
    return None if default is None else timeout_of_group(default)


def _moves_host_memory(group: dist.ProcessGroup) -> bool:
    return backend_of(group, torch.device("cpu")) is not None
