"""Which optimizer a rank steps: ranks must not mix up several optimizers of the same structure over the same ranks.

When ranks first step an optimizer together, they agree on a shared id that no other optimizer has. From then on each rank puts
the id, and how often the optimizer was stepped since, into every vote.

Before that, an optimizer is identified by its position among the optimizers of its process that look the same, in the order in
which they were built. A copy comes right behind its original. A rank may have more of them than another for good reasons, such as
an additional copy, or an optimizer for something that only this rank trains. Positions are therefore compared only between ranks
that have equally many.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import weakref
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from ..params.dtensors import ReplicaGroup, replica_ranks
from ..torch_compat import spec_of
from ..transport import sendable
from .home import current_world


class Optimizer(Protocol):
    """The part of an optimizer that identifies it."""

    param_groups: list[dict[str, Any]]

    @property
    def replica_group(self) -> ReplicaGroup | None: ...


class _Registered(NamedTuple):
    """An optimizer on the roster, the default process group in which it was built, if there was one, and its lineage.

    The lineage has the numbers of what the optimizer was copied from, oldest first, and then its own: (3, 7) is optimizer 7, a
    copy of optimizer 3. Sorting by lineage puts copies behind their original.
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

    ``copied`` is the lineage of a copy's original, whose place the copy takes once the original is gone. An optimizer for the
    same parameters as a living one counts as a copy of that one.
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
    """The place of an optimizer. Optimizers of the same parameters count as one, since it does not matter which is stepped."""
    assert optimizer is not None, "the optimizer that plans is alive"
    with _lock:
        living = [known for _, known in _living(current_world())]
    lookalikes = [known for known in living if known is optimizer or _looks_like(optimizer, known)]
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


def _looks_like(optimizer: Optimizer, other: Optimizer) -> bool:
    """Whether ranks could mix up the two optimizers: the same names, shapes and layouts, over the same ranks."""
    return _looks(optimizer) == _looks(other) and _replicas(optimizer) == _replicas(other)


def _looks(optimizer: Optimizer) -> list[tuple[object, list[tuple[object, ...]]]]:
    return [
        # A user may have deleted the parameters to free memory.
        (group.get("param_names"), [(param.shape, param.dtype, spec_of(param)) for param in group.get("params", ())])
        for group in optimizer.param_groups
    ]


def _replicas(optimizer: Optimizer) -> object:
    try:
        return replica_ranks(optimizer.replica_group)
    except Exception:  # its process group was destroyed
        return None
