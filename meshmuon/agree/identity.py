"""Which optimizer a rank steps, and the process that it belongs to.

Ranks must not mix up several optimizers of the same structure over the same ranks.

When ranks first step an optimizer together, they agree on a shared id that no other optimizer has. From then on each
rank puts the id, and how often the optimizer was stepped since, into every vote.

Before that, an optimizer is identified by its position among the optimizers of its process that look the same, in the
order in which they were built. A copy comes right behind its original. A rank may have more of them than another for
good reasons, such as an additional copy, or an optimizer for something that only this rank trains. Positions are
therefore compared only between ranks that have equally many.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import weakref
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from ..params.dtensors import ReplicaGroup, replica_ranks
from ..torch_compat import spec_of
from ..transport import sendable


class Optimizer(Protocol):
    """The part of an optimizer that identifies it."""

    param_groups: list[dict[str, Any]]

    @property
    def replica_group(self) -> ReplicaGroup | None: ...


class _Registered(NamedTuple):
    """An optimizer on the roster, the default process group in which it was built, if there was one, and its lineage.

    The lineage has the numbers of what the optimizer was copied from, oldest first, and then its own: (3, 7) is
    optimizer 7, a copy of optimizer 3. Sorting by lineage puts copies behind their original.
    """

    optimizer: weakref.ref[Optimizer]
    world: weakref.ref[dist.ProcessGroup] | None
    lineage: tuple[int, ...]


_roster: list[_Registered] = []
_numbers = itertools.count()
_lock = threading.Lock()


@sendable
class Place(NamedTuple):
    """The position of an optimizer among the living optimizers of its process that look the same, and their number."""

    position: int
    lookalikes: int


@sendable
class Pairing(NamedTuple):
    """What this rank's optimizer has in common with the optimizers of the other ranks that step with it."""

    shared_id: int = 0  # the number that the ranks have agreed on; 0 before their first common step, and after loading
    steps: int = 0  # calls of ``step`` since then, including failed ones

    def proposed_id(self) -> int:
        """A random id for all ranks, from a rank that has none; the largest proposal wins. 0 proposes nothing."""
        return 0 if self.shared_id else secrets.randbits(60) | 1


def register(optimizer: Optimizer, copied: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Puts a new optimizer on the roster and returns its lineage.

    ``copied`` is the lineage of a copy's original, whose place the copy takes once the original is gone. An optimizer
    for the same parameters as a living one counts as a copy of that one.
    """
    first_param, world = _first_param(optimizer), current_world()
    with _lock:
        _roster[:] = [registered for registered in _roster if registered.optimizer() is not None]
        if not copied and first_param is not None:
            copied = next((lineage for lineage, known in _living(world) if _first_param(known) is first_param), ())
        lineage = (*copied, next(_numbers))
        _roster.append(_Registered(weakref.ref(optimizer), None if world is None else weakref.ref(world), lineage))
    return lineage


def place_of(optimizer: Optimizer | None) -> Place:
    """The place of an optimizer. Optimizers of the same parameters count as one, since it does not matter which is
    stepped.
    """
    assert optimizer is not None, "the optimizer that plans is alive"
    with _lock:
        living = [known for _, known in _living(current_world())]
    looks = _looks(optimizer)
    lookalikes = [known for known in living if known is optimizer or _looks(known) == looks]
    first_params = list(dict.fromkeys(id(_first_param(known)) for known in lookalikes))  # in order, each once
    first_param = id(_first_param(optimizer))
    return Place(first_params.index(first_param) if first_param in first_params else 0, len(first_params))


def _living(world: dist.ProcessGroup | None) -> list[tuple[tuple[int, ...], Optimizer]]:
    """Lineages and optimizers that were built in ``world``, or before there was a process group; sorted by lineage."""
    here = [item for item in _roster if item.world is None or (world is not None and item.world() is world)]
    pairs = [(item.lineage, known) for item in here if (known := item.optimizer()) is not None]
    return sorted(pairs, key=lambda pair: pair[0])


def _first_param(optimizer: Optimizer) -> Tensor | None:
    return next((param for group in optimizer.param_groups for param in group.get("params", ())), None)


def _looks(optimizer: Optimizer) -> tuple[object, ...]:
    """What ranks could mix up two optimizers by: names, shapes and layouts, and the ranks that share them."""
    try:
        replicas = replica_ranks(optimizer.replica_group)
    except Exception:  # its process group was destroyed
        replicas = [()]
    groups = [
        # A user may have deleted the parameters to free memory.
        (group.get("param_names"), [(param.shape, param.dtype, spec_of(param)) for param in group.get("params", ())])
        for group in optimizer.param_groups
    ]
    return groups, replicas


class Home:
    """The process, and the default process group, in which an optimizer was built."""

    def __init__(self) -> None:
        self._process = os.getpid()
        world = current_world()
        self._world = None if world is None else weakref.ref(world)

    def check_process(self) -> None:
        """Raises in a forked process: it has no connections, so the other ranks would never answer."""
        if os.getpid() != self._process:
            raise TransportError(
                f"ranks lost each other in the agreement of a step: process {os.getpid()} is a fork of process "
                f"{self._process}, which is one of several ranks; a fork has none of its connections. Step in that "
                "process only, or start new "
                'processes ("spawn") that join a process group and build their optimizer themselves.'
            )

    def check_connected(self, *, plain: bool) -> None:
        """Raises if the default process group is not the one that the optimizer was built in.

        Process groups of an earlier ``init_process_group`` may still answer, but the ranks of the new one need not be
        the same. DTensors keep the process groups that they were created with. If ranks share ``plain`` tensors only,
        another process group can be used.
        """
        world = current_world()
        if self._world is None:  # built before there was one
            self._world = None if world is None else weakref.ref(world)
        elif world is None or self._world() is not world:
            remedy = "Rebuild the meshes, the model and the optimizer, and load a checkpoint."
            if plain:
                remedy = "Set optimizer.replica_group to a process group of the new one."
            raise TransportError(
                "ranks lost each other in the agreement of a step: destroy_process_group() has ended the process "
                f"group that this optimizer was built in. {remedy}"
            )


def current_rank() -> int:
    """This rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def current_world() -> dist.ProcessGroup | None:
    """The default process group, or None."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
