"""Process groups: an existing one where its ranks fit, else a new one."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from ..torch_compat import backend_of, new_named_group, timeout_of
from .failures import named_phase


@dataclass
class _MadeGroups:
    """The groups of the same ranks that this module has made under the present default group."""

    groups: list[dist.ProcessGroup] = field(default_factory=list)
    shared: dist.ProcessGroup | None = None
    # names are counted: two threads would take the same one
    making: threading.RLock = field(default_factory=threading.RLock)


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], _MadeGroups]] = weakref.WeakKeyDictionary()
_turns: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.RLock] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # of these dictionaries


def exchange_group(ranks: Sequence[int], existing: Iterable[dist.ProcessGroup]) -> dist.ProcessGroup:
    """A group of exactly ``ranks`` (ascending): the first of ``existing`` that fits, the default group, or a new one.

    Only its members need to call: other ranks, such as those of other pipeline stages, take no part in making a new
    group.
    """
    return _fitting(ranks, existing) or _new_group(ranks)


def shared_group(ranks: tuple[int, ...], existing: Iterable[dist.ProcessGroup]) -> dist.ProcessGroup:
    """As ``exchange_group``, but the same ranks always get the same group, for callers that do not keep it.

    New groups are forgotten together with the default group, so that nothing outlives ``destroy_process_group``.
    """
    if group := _fitting(ranks, existing):
        return group
    made = _made_of(ranks)
    with made.making:
        if made.shared is None:
            made.shared = _new_group(ranks)
        return made.shared


def turn_of(group: dist.ProcessGroup) -> threading.RLock:
    """The lock of ``group``: the thread that holds it is the only one of this process that communicates over the group.

    Collectives of one group meet by the order in which they are started. If two threads started some at the same time,
    a collective of one could meet another's on another rank.
    """
    with _lock:
        return _turns.setdefault(group, threading.RLock())


@contextmanager
def turns_of(groups: Iterable[dist.ProcessGroup]) -> Iterator[None]:
    """Holds the turns of several groups, taken in the order of their names: no two callers ever wait for each other."""
    with ExitStack() as turns:
        for group in sorted(groups, key=lambda group: group.group_name):
            turns.enter_context(turn_of(group))
        yield


def moves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether collectives of ``group`` take tensors of ``device``."""
    return _moves_host_memory(group) if device.type == "cpu" else backend_of(group, device) is not None


def _fitting(ranks: Sequence[int], existing: Iterable[dist.ProcessGroup]) -> dist.ProcessGroup | None:
    groups = [*existing, *filter(None, [dist.group.WORLD])]
    return next((group for group in groups if dist.get_process_group_ranks(group) == list(ranks)), None)


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A new group, under a name that each of its members derives without communicating; it ends with the default
    group.
    """
    base = "meshmuon " + hashlib.sha1(f"{list(ranks)}".encode(), usedforsecurity=False).hexdigest()
    made = _made_of(tuple(ranks))
    with made.making, named_phase("agreement"):
        # Without a timeout torch gives a new group half an hour, regardless of the default group.
        group = new_named_group(f"{base} {len(made.groups)}", ranks, timeout_of_group(_default()))
        made.groups.append(group)
    weakref.finalize(_default(), group.shutdown).atexit = False
    return group


def _made_of(ranks: tuple[int, ...]) -> _MadeGroups:
    with _lock:
        return _made.setdefault(_default(), {}).setdefault(ranks, _MadeGroups())


def _default() -> dist.ProcessGroup:
    default = dist.group.WORLD
    assert default is not None
    return default


def timeout_of_group(group: dist.ProcessGroup) -> timedelta | None:
    """How long collectives of ``group`` wait for a rank, if its backend tells."""
    timeouts = (timeout_of(backend_of(group, torch.device(device))) for device in ("cpu", "cuda"))
    return next((timeout for timeout in timeouts if timeout is not None), None)


def _moves_host_memory(group: dist.ProcessGroup) -> bool:
    return backend_of(group, torch.device("cpu")) is not None
