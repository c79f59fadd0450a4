"""What every rank sends and receives in every exchange of a plan, counted without listing the transfers.

Tens of thousands of matrices share a few hundred ``ShardedMatrix`` objects, and these share even fewer sets of holders. Pieces
are therefore summed per wave and object, and peers per wave and set of holders. Only the ranks of an owner's own node are looked
at one by one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import ShardedMatrix
from ..plan import NO_WAVE, Plan
from .rank_index import RankIndex


@dataclass(frozen=True)
class Direction:
    """One exchange of every wave, the gather or the scatter. Tensors are (waves, ranks), ranks as in ``Traffic.index``."""

    sent: Tensor  # bytes that each rank sends to others
    received: Tensor
    sent_inside: Tensor  # of these, to ranks of its own node
    received_inside: Tensor
    peers: Tensor  # to how many ranks it sends, or from how many it receives, whichever is more
    messages: Tensor  # (waves,): pairs of ranks that send something
    largest: Tensor  # (waves,): bytes of the largest message

    def reversed(self) -> Direction:
        """The same bytes the other way, as results travel where no replicas share them."""
        return replace(
            self,
            sent=self.received,
            received=self.sent,
            sent_inside=self.received_inside,
            received_inside=self.sent_inside,
        )


@dataclass(frozen=True)
class Traffic:
    """All exchanges of a plan."""

    index: RankIndex
    gather: Direction
    scatter: Direction
    shard_elements: Tensor  # (waves, ranks): elements of each rank's shards that a wave steps
    peers: Tensor  # (ranks,): ranks to or from which it sends anything in a step
    between_blocks: Tensor  # (blocks, blocks): bytes that the ranks of a block send to those of another
    block_ranks: int  # ranks of a block: a node, several where there are many, or a rank if there is one node
    relayed: bool  # exchanges between nodes go in two hops; bytes are counted once, from their first rank to their last
    direct_peers: int  # most peers of a rank in one exchange, if everything were sent directly


class _Pieces(NamedTuple):
    """The holders of a matrix."""

    ranks: Tensor  # (pieces, replicas): positions
    sizes: Tensor  # (pieces,): elements
    holders: frozenset[int]
    replicas: tuple[frozenset[int], ...]


_MOST_BLOCKS = 64


class TrafficCounter:
    """Counts the traffic of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._nodes = plan, plan.options.nodes
        self._index, self._count = RankIndex(plan.ranks), len(plan.ranks)
        self._direct_peers = 0
        # (wave, matrix, owner) → bytes per element that travel, and (wave, matrix, replica) → the same over all owners
        self._owned: dict[tuple[int, ShardedMatrix, int], int] = defaultdict(int)
        self._elements: dict[tuple[int, ShardedMatrix], int] = defaultdict(int)
        for task in plan.tasks:
            if task.wave != NO_WAVE:
                self._owned[task.wave, task.sharded, task.owner] += plan.params[task.param].itemsize
                self._elements[task.wave, task.sharded] += 1
        self._pieces = {sharded: self._pieces_of(sharded) for _, sharded in self._elements}

    def _pieces_of(self, sharded: ShardedMatrix) -> _Pieces:
        ranks = self._index.tensor([piece.holders for piece in sharded.pieces])
        replicas = tuple(frozenset(column) for column in zip(*(piece.holders for piece in sharded.pieces), strict=True))
        return _Pieces(ranks, torch.tensor(sharded.sizes), frozenset(sharded.holdings), replicas)

    @property
    def relayed(self) -> bool:
        """Whether exchanges between nodes go in two hops (``meshmuon/plan/relays.py``)."""
        return self._plan.options.max_peers is not None and self._nodes is not None

    def _peers_through_relays(self) -> int:
        """The other ranks of a node, and one rank of each node that a rank relays for."""
        assert self._nodes is not None
        size = max(map(len, self._nodes.ranks))
        return size - 1 + -(-(len(self._nodes.ranks) - 1) // size)

    def count(self) -> Traffic:
        """Everything."""
        shape = len(self._plan.wave_lanes), self._count
        elements = torch.zeros(shape, dtype=torch.int64)
        for (wave, sharded), tasks in self._elements.items():
            pieces = self._pieces[sharded]
            elements[wave].index_add_(0, pieces.ranks.flatten(), (pieces.sizes * tasks).repeat_interleave(sharded.replicas))
        gather = self._bytes(gather=True)
        replicated = any(sharded.replicas > 1 for sharded in self._pieces)
        scatter = self._bytes(gather=False) if replicated else gather.reversed()
        blocks, block_ranks = self._between_blocks()
        peers = self._all_peers()
        if self.relayed:
            peers = torch.minimum(peers, torch.full_like(peers, self._peers_through_relays()))
        return Traffic(self._index, gather, scatter, elements, peers, blocks, block_ranks, self.relayed, self._direct_peers)

    def _bytes(self, *, gather: bool) -> Direction:
        """The pieces go from holders to owners in the gather, and from owners to all replicas in the scatter."""
        shape = len(self._plan.wave_lanes), self._count
        holders = torch.zeros(shape, dtype=torch.int64)
        # Lists: tens of thousands of single entries are written, and each would take microseconds in a tensor.
        owners, owners_inside, holders_inside, staying = ([[0] * self._count for _ in range(shape[0])] for _ in range(4))
        all_owners: dict[tuple[int, ShardedMatrix, int], int] = defaultdict(int)
        for (wave, sharded, owner), itemsize in self._owned.items():
            piece, replica = sharded.holdings[owner]
            own = sharded.sizes[piece]
            total = sharded.size if gather else sharded.size * sharded.replicas
            at = self._index.of(owner)
            row, near = holders_inside[wave], 0
            for rank in () if self._nodes is None else self._nodes.ranks[self._nodes.node_of(owner)]:
                held = sharded.holdings.get(rank)
                if held is not None and rank != owner and (not gather or held[1] == replica):
                    size = sharded.sizes[held[0]] * itemsize
                    row[self._index.of(rank)] += size
                    near += size
            owners[wave][at] += (total - own) * itemsize
            owners_inside[wave][at] += near
            staying[wave][at] += own * itemsize
            all_owners[wave, sharded, replica if gather else -1] += itemsize
        for (wave, sharded, replica), itemsize in all_owners.items():
            pieces = self._pieces[sharded]
            ranks = pieces.ranks.flatten() if replica < 0 else pieces.ranks[:, replica]
            sizes = pieces.sizes.repeat_interleave(sharded.replicas) if replica < 0 else pieces.sizes
            holders[wave].index_add_(0, ranks, sizes * itemsize)
        peers, messages = self._peers(gather=gather)
        self._direct_peers = max(self._direct_peers, int(peers.max()) if peers.numel() else 0)
        if self.relayed:
            peers = torch.minimum(peers, torch.full_like(peers, self._peers_through_relays()))
        by_owners, near_owners, near_holders = (
            torch.tensor(rows, dtype=torch.int64).reshape(shape) for rows in (owners, owners_inside, holders_inside)
        )
        by_holders = holders - torch.tensor(staying, dtype=torch.int64).reshape(shape)
        if self._nodes is None:  # everything stays inside the only node
            near_owners, near_holders = by_owners, by_holders
        largest = self._largest(gather=gather)
        if gather:
            return Direction(by_holders, by_owners, near_holders, near_owners, peers, messages, largest)
        return Direction(by_owners, by_holders, near_owners, near_holders, peers, messages, largest)

    def _peers(self, *, gather: bool) -> tuple[Tensor, Tensor]:
        """How many ranks each rank exchanges with in each wave, and how many pairs of ranks do."""
        shape = len(self._plan.wave_lanes), self._count
        peers, messages = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[0], dtype=torch.int64)
        owners_of: dict[int, dict[frozenset[int], set[int]]] = defaultdict(lambda: defaultdict(set))
        for wave, sharded, owner in self._owned:
            owners_of[wave][self._holders(sharded, owner, gather=gather)].add(owner)
        for wave, by_holders in owners_of.items():
            row = [0] * self._count
            sets_of_owner: dict[int, list[frozenset[int]]] = defaultdict(list)
            for holders, owners in by_holders.items():
                for owner in owners:
                    sets_of_owner[owner].append(holders)
            for members, sets in _ranks_by_sets(list(by_holders)).items():
                owners = set().union(*(by_holders[holders] for holders in sets))
                for rank in members:
                    row[self._index.of(rank)] = len(owners) - (rank in owners)
            messages[wave] = sum(row)
            sizes: dict[frozenset[frozenset[int]], int] = {}
            for owner, owned_sets in sets_of_owner.items():
                key = frozenset(owned_sets)
                if key not in sizes:
                    sizes[key] = len(frozenset().union(*key))
                at = self._index.of(owner)
                row[at] = max(row[at], sizes[key] - 1)
            peers[wave] = torch.tensor(row)
        return peers, messages

    def _holders(self, sharded: ShardedMatrix, owner: int, *, gather: bool) -> frozenset[int]:
        pieces = self._pieces[sharded]
        return pieces.replicas[sharded.holdings[owner][1]] if gather else pieces.holders

    def _all_peers(self) -> Tensor:
        """To or from how many ranks each rank sends anything, in the whole step."""
        by_holders: dict[frozenset[int], set[int]] = defaultdict(set)
        owned: dict[int, set[frozenset[int]]] = defaultdict(set)
        for _, sharded, owner in self._owned:
            holders = self._holders(sharded, owner, gather=False)
            by_holders[holders].add(owner)
            owned[owner].add(holders)
        peers = torch.zeros(self._count, dtype=torch.int64)
        for members, sets in _ranks_by_sets(list(by_holders)).items():
            owners = set().union(*(by_holders[holders] for holders in sets))
            sizes: dict[frozenset[frozenset[int]], int] = {}
            for rank in members:
                key = frozenset(owned.get(rank, ()))
                if key not in sizes:
                    sizes[key] = len(owners.union(*key))
                peers[self._index.of(rank)] = sizes[key] - (rank in owners)
        return peers

    def _largest(self, *, gather: bool) -> Tensor:
        """Bytes of the largest message of each wave: all pieces that one rank and one owner exchange."""
        largest = [0] * len(self._plan.wave_lanes)
        largest_piece = {sharded: max(sharded.sizes) for sharded in self._pieces}
        at_owner: dict[tuple[int, int], list[tuple[ShardedMatrix, int]]] = defaultdict(list)
        for (wave, sharded, owner), itemsize in self._owned.items():
            at_owner[wave, owner].append((sharded, itemsize))
        for (wave, owner), matrices in at_owner.items():
            if sum(itemsize * largest_piece[sharded] for sharded, itemsize in matrices) <= largest[wave]:
                continue
            sizes = torch.zeros(self._count, dtype=torch.int64)
            for sharded, itemsize in matrices:
                pieces = self._pieces[sharded]
                ranks = pieces.ranks[:, sharded.holdings[owner][1]] if gather else pieces.ranks.flatten()
                pieces_sizes = pieces.sizes if gather else pieces.sizes.repeat_interleave(sharded.replicas)
                sizes.index_add_(0, ranks, pieces_sizes * itemsize)
            sizes[self._index.of(owner)] = 0
            largest[wave] = max(largest[wave], int(sizes.max()))
        return torch.tensor(largest, dtype=torch.int64)

    def _between_blocks(self) -> tuple[Tensor, int]:
        """What blocks of ranks send each other, in both directions of the step."""
        per_node = 1 if self._nodes is None else max(map(len, self._nodes.ranks))
        nodes = -(-self._count // per_node)
        block_ranks = per_node * -(-nodes // _MOST_BLOCKS)
        count = -(-self._count // block_ranks)
        blocks = torch.zeros(count, count, dtype=torch.int64)
        held: dict[tuple[ShardedMatrix, int], Tensor] = {}  # elements by block, of one replica or, as -1, of all
        weights: dict[tuple[ShardedMatrix, int], int] = defaultdict(int)
        for (_, sharded, owner), itemsize in self._owned.items():
            weights[sharded, owner] += itemsize
        for (sharded, owner), itemsize in weights.items():
            piece, replica = sharded.holdings[owner]
            block, own = self._index.of(owner) // block_ranks, sharded.sizes[piece]
            gathered = self._by_block(held, sharded, replica, count, block_ranks)
            scattered = self._by_block(held, sharded, -1, count, block_ranks)
            blocks[:, block] += gathered * itemsize
            blocks[block] += scattered * itemsize
            blocks[block, block] -= 2 * own * itemsize
        return blocks, block_ranks

    def _by_block(
        self, held: dict[tuple[ShardedMatrix, int], Tensor], sharded: ShardedMatrix, replica: int, count: int, block_ranks: int
    ) -> Tensor:
        if (sharded, replica) not in held:
            pieces = self._pieces[sharded]
            ranks = pieces.ranks.flatten() if replica < 0 else pieces.ranks[:, replica]
            sizes = pieces.sizes.repeat_interleave(sharded.replicas) if replica < 0 else pieces.sizes
            held[sharded, replica] = torch.zeros(count, dtype=torch.int64).index_add_(0, ranks // block_ranks, sizes)
        return held[sharded, replica]


def _ranks_by_sets(sets: list[frozenset[int]]) -> dict[tuple[int, ...], list[frozenset[int]]]:
    """Ranks that are in the same of ``sets``, with these sets."""
    of_rank: dict[int, list[int]] = defaultdict(list)
    for number, ranks in enumerate(sets):
        for rank in ranks:
            of_rank[rank].append(number)
    members: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, numbers in of_rank.items():
        members[tuple(numbers)].append(rank)
    return {tuple(ranks): [sets[number] for number in numbers] for numbers, ranks in members.items()}
