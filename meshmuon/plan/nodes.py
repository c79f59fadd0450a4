"""Which ranks share a node, and the elements that travel between nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import ConfigError
from ..layout import ShardedMatrix


@dataclass(frozen=True, slots=True, repr=False)
class Nodes:
    """The ranks of each node. Nodes are in the order of their lowest ranks, so that the same division is always the
    same value.

    Ranks 0 to 3 on one node and 4 to 7 on another: ``Nodes(((0, 1, 2, 3), (4, 5, 6, 7)))``.
    """

    ranks: tuple[tuple[int, ...], ...]
    _node_of: dict[int, int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        nodes = tuple(sorted(tuple(sorted(node)) for node in self.ranks if node))
        node_of = {rank: k for k, node in enumerate(nodes) for rank in node}
        if len(node_of) != sum(map(len, nodes)):
            raise ConfigError(f"Nodes: a rank is on two nodes, or twice on one: {self.ranks}")
        object.__setattr__(self, "ranks", nodes)
        object.__setattr__(self, "_node_of", node_of)

    @classmethod
    def of(cls, node_of_rank: Mapping[int, object]) -> Nodes:
        """Ranks with equal values share a node: {0: "a", 1: "b", 2: "a"} has the nodes (0, 2) and (1,)."""
        nodes: dict[object, list[int]] = {}
        for rank, node in node_of_rank.items():
            nodes.setdefault(node, []).append(rank)
        return cls(tuple(map(tuple, nodes.values())))

    @classmethod
    def in_order(cls, ranks: Iterable[int], sizes: Sequence[int]) -> Nodes:
        """Ranks 0, 1, … fill nodes of these ``sizes``; of these, only ``ranks`` are kept."""
        node_of = [node for node, size in enumerate(sizes) for _ in range(size)]
        return cls.of({rank: node_of[rank] for rank in ranks})

    def among(self, ranks: Iterable[int]) -> Nodes | None:
        """The nodes of some of the ranks; None if these share one node."""
        chosen = tuple(ranks)
        if missing := [rank for rank in chosen if rank not in self._node_of]:
            raise ConfigError(f"Nodes: it is not known on which nodes ranks {missing} are; {self} lists others only.")
        nodes = Nodes.of({rank: self._node_of[rank] for rank in chosen})
        return nodes if nodes.several else None

    @property
    def several(self) -> bool:
        return len(self.ranks) > 1

    def node_of(self, rank: int) -> int:
        return self._node_of[rank]

    def __repr__(self) -> str:
        sizes = set(map(len, self.ranks))
        in_order = [rank for node in self.ranks for rank in node] == list(range(sum(map(len, self.ranks))))
        return (
            f"Nodes({len(self.ranks)} of {sizes.pop()} ranks)"
            if in_order and len(sizes) == 1
            else f"Nodes({self.ranks})"
        )


class Crossings:
    """Number of elements of a matrix that travel between nodes, for each owner; cached by matrix."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self._by_matrix: dict[ShardedMatrix, dict[tuple[int, int], tuple[int, int]]] = {}

    def of(self, sharded: ShardedMatrix, owner: int) -> int:
        """Elements that the gather and the scatter send between nodes: the owner receives one replica and sends to
        all.
        """
        return self._crossing(sharded)[sharded.holdings[owner][1], self.nodes.node_of(owner)][0]

    def fewest(self, sharded: ShardedMatrix) -> int:
        """Elements between nodes with the best owner."""
        return min(crossing for crossing, _ in self._crossing(sharded).values())

    def fewest_apart(self, sharded: ShardedMatrix) -> int:
        """Elements between nodes with the best owner of each replica, if each replica computes for itself."""
        fewest: dict[int, int] = {}
        for (replica, _), (_, gathered) in self._crossing(sharded).items():
            fewest[replica] = min(fewest.get(replica, gathered), gathered)
        return 2 * sum(fewest.values())

    def depend_on_owner(self, sharded: ShardedMatrix) -> bool:
        """Whether the number depends on the owner."""
        return len({crossing for crossing, _ in self._crossing(sharded).values()}) > 1

    def _crossing(self, sharded: ShardedMatrix) -> dict[tuple[int, int], tuple[int, int]]:
        """(replica, node) of an owner → elements between nodes in gather and scatter, and in the gather alone."""
        if sharded not in self._by_matrix:
            one_replica: dict[tuple[int, int], int] = {}  # (replica, node) → elements that its ranks hold
            all_replicas: dict[int, int] = {}  # node → elements, counted once for each holder
            for rank, (piece, replica) in sharded.holdings.items():
                node, size = self.nodes.node_of(rank), sharded.sizes[piece]
                one_replica[replica, node] = one_replica.get((replica, node), 0) + size
                all_replicas[node] = all_replicas.get(node, 0) + size
            copies = sharded.size * sharded.replicas
            self._by_matrix[sharded] = {
                (replica, node): (sharded.size - held + copies - all_replicas[node], sharded.size - held)
                for (replica, node), held in one_replica.items()
            }
        return self._by_matrix[sharded]
