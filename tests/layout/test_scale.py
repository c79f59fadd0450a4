"""Thousands of ranks, from metadata alone."""

from __future__ import annotations

import math

import torch.distributed as dist

from meshmuon.layout import Layout, Mesh, Replicated, Sharded, shard_matrices
from meshmuon.layout.cuts import tiles

RANKS = 2048


def mesh(*shape: int) -> Mesh:
    assert math.prod(shape) == RANKS
    return Mesh(shape, tuple(range(RANKS)))


def test_fsdp() -> None:
    layout = Layout((8192, 1024), mesh(RANKS), (Sharded(0),))
    assert len(layout.holders()) == RANKS
    assert layout.boxes(2047) == (((8188, 8192), (0, 1024)),)
    (sharded,) = shard_matrices(layout, 0)
    assert [(piece.rows, piece.cols, piece.holders) for piece in sharded.pieces] == [
        (((4 * rank, 4 * rank + 4),), ((0, 1024),), (rank,)) for rank in range(RANKS)
    ]
    assert sharded.replicas == 1
    assert not dist.is_initialized()


def test_fsdp_with_fewer_rows_than_ranks() -> None:
    (sharded,) = shard_matrices(Layout((1000, 64), mesh(RANKS), (Sharded(0),)), 0)
    assert len(sharded.pieces) == 1000
    assert set(sharded.holdings) == set(range(1000))
    assert sharded.piece_of(1000) is None
    assert [rank for _, rank in sharded.senders(17)] == list(range(1000))


def test_fsdp_with_uneven_rows() -> None:
    """3,000 rows over 2,048 ranks are two rows for each of the first 1,500."""
    (sharded,) = shard_matrices(Layout((3000, 8), mesh(RANKS), (Sharded(0),)), 0)
    assert [piece.shape for piece in sharded.pieces] == [(2, 8)] * 1500


def test_hsdp_and_tensor_parallel() -> None:
    layout = Layout((4096, 1024), mesh(4, 64, 8), (Replicated(), Sharded(0), Sharded(1)))
    holders = layout.holders()
    assert len(holders) == 512
    assert {len(ranks) for ranks in holders.values()} == {4}
    (sharded,) = shard_matrices(layout, 0)
    assert len(sharded.pieces) == 512
    assert {piece.shape for piece in sharded.pieces} == {(64, 128)}
    assert sharded.replicas == 4
    assert {piece.holders for piece in sharded.pieces} == {tuple(512 * k + part for k in range(4)) for part in range(512)}
    assert [rank for _, rank in sharded.senders(600)] == list(range(512, 1024))
    assert [set(one.holdings) for one in sharded.separate_replicas] == [set(range(512 * k, 512 * (k + 1))) for k in range(4)]


def test_strided() -> None:
    """FSDP over tensor parallel on the same dim: the last axis cuts into eight, each of these into 256."""
    layout = Layout((8192, 64), mesh(256, 8), (Sharded(0, 8), Sharded(0)))
    (sharded,) = shard_matrices(layout, 0)
    assert len(sharded.pieces) == RANKS
    for rank in range(RANKS):
        data, tensor = divmod(rank, 8)
        first = 1024 * tensor + 4 * data
        assert layout.held_ranges(rank) == (((first, first + 4),), ((0, 64),))
        assert sharded.piece_of(rank) == sharded.pieces[sharded.holdings[rank][0]]
        assert sharded.pieces[sharded.holdings[rank][0]].rows == ((first, first + 4),)


def test_strided_alone() -> None:
    """Without the axis that cut first, each rank holds a range of every one of its pieces."""
    layout = Layout((8192, 64), mesh(256, 8), (Sharded(0, 8), Sharded(1)))
    (sharded,) = shard_matrices(layout, 0)
    assert len(sharded.pieces) == RANKS
    assert {len(piece.rows) for piece in sharded.pieces} == {8}
    assert tiles(8192, {piece.rows for piece in sharded.pieces})
    assert {piece.shape for piece in sharded.pieces} == {(32, 8)}


def test_experts() -> None:
    layout = Layout((256, 1024, 512), mesh(64, 32), (Sharded(0), Sharded(1)))
    sharded_matrices = shard_matrices(layout, 1)
    assert len(sharded_matrices) == 256
    assert len({id(one) for one in sharded_matrices}) == 64
    for expert, sharded in enumerate(sharded_matrices):
        assert [piece.holders for piece in sharded.pieces] == [(32 * (expert // 4) + part,) for part in range(32)]


def test_convolution() -> None:
    (sharded,) = shard_matrices(Layout((2048, 512, 3, 3), mesh(256, 8), (Sharded(0), Sharded(1))), 0)
    assert len(sharded.pieces) == RANKS
    assert {piece.shape for piece in sharded.pieces} == {(8, 576)}
    assert sharded.pieces[-1].cols == ((4032, 4608),)


def test_replicated() -> None:
    (sharded,) = shard_matrices(Layout((64, 64), mesh(RANKS), (Replicated(),)), 0)
    assert sharded.whole
    assert sharded.replicas == RANKS
    assert sharded.pieces[0].holders == tuple(range(RANKS))
    assert [rank for _, rank in sharded.senders(5)] == [5]
