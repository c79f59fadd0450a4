"""On which nodes the ranks are: what each rank reads from its environment, and what all ranks settle on.

A launcher such as torchrun tells every rank the number of ranks per node, from which it knows the nodes of all ranks.
Without one, or where nodes have different numbers of ranks, a rank knows only the name of its own node. Ranks put what
they know into their votes. If that differs, they tell each other the names of their nodes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError, PlanMismatchError
from ..plan import Nodes
from ..transport import sendable

RANKS_PER_NODE = "MESHMUON_RANKS_PER_NODE"


sendable(Nodes)


@sendable
@dataclass(frozen=True, slots=True)
class NodeView:
    """What one rank knows of the nodes of the ranks that it plans with."""

    setting: str  # the user's MESHMUON_RANKS_PER_NODE; "" without one
    name: str  # of this rank's node: equal on all ranks of a node
    nodes: Nodes | None  # of all ranks; None as long as only ``name`` is known

    @classmethod
    def from_environment(cls, rank: int, ranks: Sequence[int], world: int) -> NodeView:
        """What the environment of ``rank`` says about ``ranks``, which are among ``world`` ranks."""
        setting = os.environ.get(RANKS_PER_NODE, "").strip()
        sizes = _sizes_of(setting, world) if setting else _sizes_from_launcher(rank, world)
        return cls(setting, node_name(rank, world), Nodes.in_order(ranks, sizes) if sizes else None)

    @property
    def compared(self) -> str:
        """What must be equal on all ranks, as text."""
        return f"{self.setting} {self.name if self.nodes is None else self.nodes}"


def node_name(rank: int, world: int) -> str:
    """A name that the ranks of a node have in common: its number by the user's setting, or what the launcher and
    host call it.
    """
    setting = os.environ.get(RANKS_PER_NODE, "").strip()
    if setting:
        return f"node {Nodes.in_order(range(world), _sizes_of(setting, world)).node_of(rank)}"
    return f"{os.environ.get('GROUP_RANK', '')} {socket.gethostname()}".strip()


def settled_nodes(views: Mapping[int, NodeView]) -> Nodes:
    """The nodes of all ranks, from the view of each; the same on all of them."""
    ranks = sorted(views)
    first = views[ranks[0]]
    for rank in ranks:
        if views[rank].setting != first.setting:
            raise PlanMismatchError(
                f"rank {rank} has {RANKS_PER_NODE}={views[rank].setting!r} in its environment, rank {ranks[0]} has "
                f"{first.setting!r}. Set it to the same value on every rank, or on none."
            )
    return Nodes.of({rank: views[rank].name for rank in ranks})


def _sizes_of(setting: str, world: int) -> tuple[int, ...]:
    """Ranks per node, in the order of ranks: of "8" over 24 ranks (8, 8, 8), of "8,8,4" over 20 ranks (8, 8, 4)."""
    words = [word.strip() for word in setting.split(",")]
    sizes = tuple(int(word) for word in words if word.isascii() and word.isdigit())
    if len(sizes) == len(words) and min(sizes) > 0:
        if len(sizes) == 1 and world % sizes[0] == 0:
            return sizes * (world // sizes[0])
        if sum(sizes) == world:
            return sizes
    raise ConfigError(
        f"{RANKS_PER_NODE}={setting!r} does not divide {world} ranks into nodes. Write the number of ranks per node, "
        "such as 8, or the number of each node in the order of ranks, such as 8,8,4."
    )


def _sizes_from_launcher(rank: int, world: int) -> tuple[int, ...]:
    """Ranks per node, from what torchrun sets; empty without it, or if nodes must have different numbers of ranks."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
    words = [os.environ.get(name, "") for name in names]
    if not all(word.isascii() and word.isdigit() for word in words):
        return ()
    size, local_rank, node = map(int, words)
    if not size or world % size or rank != node * size + local_rank:
        return ()
    return (size,) * (world // size)
