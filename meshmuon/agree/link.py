"""The ranks that plan together, how they talk, and where an optimizer is at home."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable

import torch.distributed as dist

from ..errors import TransportError
from ..transport import Agreement, Exchange, exchange_group, host_group

__all__ = ["Home", "Link"]


class Link:
    """The ranks that plan together, and how they talk."""

    def __init__(self, ranks: tuple[int, ...], existing: Iterable[dist.ProcessGroup]) -> None:
        self.ranks = ranks
        group = exchange_group(ranks, existing)
        self.exchange = Exchange(group)
        self.agreement = Agreement(host_group(group))


class Home:
    """The process, and the default process group, in which an optimizer was built."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._world = _current_world()

    def check_process(self) -> None:
        """Refuses to wait in a fork, to which no other rank will ever answer."""
        if os.getpid() != self._process:
            raise TransportError(
                f"ranks lost each other in the agreement of a step: process {os.getpid()} is a fork of process {self._process}, "
                "which is one of several ranks; a fork has none of its connections. Step in that process only, or start new "
                'processes ("spawn") that join a process group and build their optimizer themselves.'
            )

    def check_connected(self, *, plain: bool) -> None:
        """Refuses to talk over groups of an earlier ``init_process_group``, which may still answer.

        The ranks of the new one need not be the same, and DTensors keep the groups that they were made with.

        Args:
            plain: all that ranks share are plain tensors, which have no mesh and live on with another group.
        """
        if self._world is None:  # built before there was one
            self._world = _current_world()
        elif self._world() is None or self._world() is not dist.group.WORLD:
            mend = "Build the meshes, the model and the optimizer anew and load a checkpoint."
            if plain:
                mend = "Set optimizer.replica_group to a group of the new one."
            raise TransportError(
                "ranks lost each other in the agreement of a step: destroy_process_group() has ended the process group that this "
                f"optimizer was built in. {mend}"
            )


def _current_world() -> weakref.ref[dist.ProcessGroup] | None:
    """The default process group, by whose identity a later one is told from it."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if world is None else weakref.ref(world)
