"""Spreads: every piece is what its rank holds, pieces tile the matrix, replicas are full copies."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmuon.errors import PlanError
from meshmuon.layout import Piece, Replicated, ShardedMatrix, shard_matrices
from meshmuon.layout.layout import coordinates
from tests.support.layouts import Case, random_case, random_placement, random_shape, select, split

# (how many leading dims count matrices, how many dims the parameter has): vectors as columns, matrices, convolutions,
# experts.
KINDS = [(0, 1), (0, 2), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 3), (1, 4)]


def build(seed: int) -> tuple[Case, int]:
    rng = random.Random(seed)
    stack_dims, dims = rng.choice(KINDS)
    case = random_case(rng)
    shape, placements = random_shape(rng, dims), tuple(random_placement(rng, dims) for _ in case.mesh.shape)
    return replace(case, shape=shape, placements=placements), stack_dims


parameters = st.integers(0, 2**32).map(build)
thorough = settings(max_examples=200)


def blocks(case: Case, stack_dims: int) -> list[dict[int, torch.Tensor]]:
    """For each matrix the non-empty local blocks, from torch: entry i is element i of the matrix."""
    matrices = case.shape[0] if stack_dims else 1
    size = math.prod(case.shape[stack_dims:])
    found: list[dict[int, torch.Tensor]] = [{} for _ in range(matrices)]
    for rank, tensor in split(case).items():
        if tensor.numel():
            for block in tensor if stack_dims else tensor[None]:
                flat = block.reshape(block.shape[0], -1)
                index = int(flat[0, 0]) // size
                assert rank not in found[index]
                found[index][rank] = flat - index * size
    return found


def matrix(case: Case, stack_dims: int) -> torch.Tensor:
    rows, cols = case.shape[stack_dims], math.prod(case.shape[stack_dims + 1 :])
    return torch.arange(rows * cols).reshape(rows, cols)


@thorough
@given(parameters)
def test_a_piece_is_the_local_block(parameter: tuple[Case, int]) -> None:
    case, stack_dims = parameter
    whole, expected = matrix(case, stack_dims), blocks(case, stack_dims)
    sharded_matrices = shard_matrices(case.layout, stack_dims)
    assert len(sharded_matrices) == len(expected)
    for sharded, held in zip(sharded_matrices, expected, strict=True):
        assert (sharded.rows, sharded.cols, sharded.size) == (*whole.shape, whole.numel())
        assert sharded.holdings.keys() == held.keys()  # those that hold nothing are not in it
        for rank in range(20):
            piece = sharded.piece_of(rank)
            assert (piece is None) == (rank not in held)
            if piece is not None:
                assert torch.equal(select(whole, (piece.rows, piece.cols)), held[rank])
                assert piece.shape == tuple(held[rank].shape)
                assert piece.size == held[rank].numel()


@thorough
@given(parameters)
def test_a_replica_is_a_full_copy(parameter: tuple[Case, int]) -> None:
    case, stack_dims = parameter
    layout, whole = case.layout, matrix(case, stack_dims)
    where = coordinates(case.mesh)
    axes = [axis for axis, one in enumerate(layout.placements) if isinstance(one, Replicated)]
    for sharded, held in zip(shard_matrices(layout, stack_dims), blocks(case, stack_dims), strict=True):
        assert sharded.replicas == math.prod(case.mesh.shape[axis] for axis in axes)
        assert len(held) == len(sharded.pieces) * sharded.replicas
        order = []
        for replica in range(sharded.replicas if sharded.pieces else 0):
            ranks = [piece.holders[replica] for piece in sharded.pieces]
            assert torch.equal(torch.cat([held[rank].flatten() for rank in ranks]).sort().values, whole.flatten())
            assert [sharded.holdings[rank] for rank in ranks] == [(k, replica) for k in range(len(ranks))]
            (at,) = {tuple(where[rank][axis] for axis in axes) for rank in ranks}  # one coordinate on the replica axes
            order.append(at)
        assert order == sorted(order)


@thorough
@given(parameters)
def test_who_sends(parameter: tuple[Case, int]) -> None:
    case, stack_dims = parameter
    for sharded, held in zip(shard_matrices(case.layout, stack_dims), blocks(case, stack_dims), strict=True):
        whole = torch.arange(sharded.size)
        for owner, (_, replica) in sharded.holdings.items():
            senders = sharded.senders(owner)
            assert [piece for piece, _ in senders] == list(sharded.pieces)
            assert all(sharded.piece_of(rank) is piece for piece, rank in senders)
            assert owner in {rank for _, rank in senders}  # it has its own piece
            assert {sharded.holdings[rank][1] for _, rank in senders} == {replica}
            assert torch.equal(torch.cat([held[rank].flatten() for _, rank in senders]).sort().values, whole)
            assert {rank for rank in range(20) if sharded.sends_to(rank, owner)} == {rank for _, rank in senders}


@thorough
@given(parameters)
def test_whole_and_separate_replicas(parameter: tuple[Case, int]) -> None:
    case, stack_dims = parameter
    for sharded, held in zip(shard_matrices(case.layout, stack_dims), blocks(case, stack_dims), strict=True):
        assert sharded.whole == all(block.numel() == sharded.size for block in held.values())
        separate = sharded.separate_replicas
        assert len(separate) == sharded.replicas
        for k, one in enumerate(separate):
            assert (one.rows, one.cols, one.replicas) == (sharded.rows, sharded.cols, 1)
            assert one.pieces == tuple(Piece(piece.rows, piece.cols, (piece.holders[k],)) for piece in sharded.pieces)
        assert sorted(rank for one in separate for rank in one.holdings) == sorted(held)


@thorough
@given(parameters)
def test_matrices_held_alike_share_a_spread(parameter: tuple[Case, int]) -> None:
    case, stack_dims = parameter
    sharded_matrices = shard_matrices(case.layout, stack_dims)
    for sharded, held in zip(sharded_matrices, blocks(case, stack_dims), strict=True):
        for other, theirs in zip(sharded_matrices, blocks(case, stack_dims), strict=True):
            if held:
                assert (sharded is other) == (held.keys() == theirs.keys())
    assert shard_matrices(case.layout, stack_dims) is sharded_matrices


def test_the_random_parameters_are_of_every_kind() -> None:
    """What the properties above are shown: experts over several axes, strided columns, ranks without a piece, no
    elements.
    """
    cases = [build(seed) for seed in range(400)]
    flat = [
        (case, stack_dims, sharded) for case, stack_dims in cases for sharded in shard_matrices(case.layout, stack_dims)
    ]
    assert sum(stack_dims == 1 and bool(case.layout.axes(0)) for case, stack_dims in cases) > 60
    assert sum(any(len(piece.rows) > 1 for piece in sharded.pieces) for *_, sharded in flat) > 40
    assert sum(any(len(piece.cols) > 1 for piece in sharded.pieces) for *_, sharded in flat) > 40
    assert sum(0 < len(sharded.holdings) < len(case.mesh.ranks) for case, _, sharded in flat) > 40
    assert sum(sharded.replicas > 1 and not sharded.whole for *_, sharded in flat) > 40
    assert sum(not sharded.size for *_, sharded in flat) > 40


ROWS = (((0, 1),), ((1, 2),))
ALL = ((0, 3),)


@pytest.mark.parametrize(
    ("pieces", "replicas"),
    [
        ((), 1),
        ((Piece(ROWS[0], ALL, (0,)),), 1),
        ((Piece(ROWS[0], ((0, 2),), (0,)), Piece(ROWS[1], ((0, 2),), (1,))), 1),  # in the columns
        ((Piece(ROWS[0], ALL, (0,)), Piece(ROWS[1], ((0, 2),), (1,))), 1),
        ((Piece(((0, 2),), ALL, (0,)), Piece(((0, 2),), ALL, (1,))), 1),
        ((Piece(ROWS[0], ((0, 1),), (0,)), Piece(ROWS[1], ((1, 3),), (1,))), 1),  # a diagonal: rows and columns tile
        ((Piece(ROWS[0], ALL, (0, 1)), Piece(ROWS[1], ALL, (2,))), 2),
        ((Piece(ROWS[0], ALL, (0, 1)), Piece(ROWS[1], ALL, (2, 3))), 1),
        ((Piece(ROWS[0], ALL, (0, 1, 2)), Piece(ROWS[1], ALL, (3,))), 2),  # as many holders as two replicas have
        ((Piece(ROWS[0], ALL, (0,)), Piece(ROWS[1], ALL, (0,))), 1),
        ((Piece(ROWS[0], ALL, (0, 1)), Piece(ROWS[1], ALL, (2, 0))), 2),
    ],
)
def test_a_spread_that_is_none_is_refused(pieces: tuple[Piece, ...], replicas: int) -> None:
    with pytest.raises(PlanError, match="leave a gap or overlap, or are not held by one rank"):
        ShardedMatrix(2, 3, pieces, replicas)
