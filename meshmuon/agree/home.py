"""The process that an optimizer belongs to, and its default process group."""

from __future__ import annotations

import os
import weakref

import torch.distributed as dist

from ..errors import TransportError


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
                f"ranks lost each other in the agreement of a step: process {os.getpid()} is a fork of process {self._process}, "
                "which is one of several ranks; a fork has none of its connections. Step in that process only, or start new "
                'processes ("spawn") that join a process group and build their optimizer themselves.'
            )

    def check_connected(self, *, plain: bool) -> None:
        """Raises if the default process group is not the one that the optimizer was built in.

        Process groups of an earlier ``init_process_group`` may still answer, but the ranks of the new one need not be the same.
        DTensors keep the process groups that they were created with. If ranks share ``plain`` tensors only, another process group
        can be used.
        """
        world = current_world()
        if self._world is None:  # built before there was one
            self._world = None if world is None else weakref.ref(world)
        elif world is None or self._world() is not world:
            remedy = "Rebuild the meshes, the model and the optimizer, and load a checkpoint."
            if plain:
                remedy = "Set optimizer.replica_group to a process group of the new one."
            raise TransportError(
                "ranks lost each other in the agreement of a step: destroy_process_group() has ended the process group that this "
                f"optimizer was built in. {remedy}"
            )


def current_rank() -> int:
    """This rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def current_world() -> dist.ProcessGroup | None:
    """The default process group, or None."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
