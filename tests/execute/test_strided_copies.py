"""Strided copies between a flat buffer and a stage: exactly the right elements, and few copies."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshmuon.execute.buffers import PlacedPiece, strided_views
from meshmuon.layout import Layout, Mesh, Piece, Ranges, Sharded
from meshmuon.plan import PlannedParam, PlanOptions, cost_model_for, make_plan, routes_of

UNTOUCHED = -1


def indices(ranges: Ranges) -> Tensor:
    return torch.tensor([index for start, stop in ranges for index in range(start, stop)], dtype=torch.long)


@dataclass(frozen=True)
class Case:
    rows: int
    cols: int
    matrices: int
    placed: tuple[PlacedPiece, ...]
    length: int  # of the buffer

    def stage(self, start: int = 0) -> Tensor:
        return torch.arange(start, start + self.matrices * self.rows * self.cols).view(self.matrices, self.rows, self.cols)


def random_groups(rng: random.Random, size: int) -> list[Ranges]:
    """Cuts a dim into runs and deals these to parts: neighbours, strided or shuffled."""
    edges = [0, *sorted(rng.sample(range(1, size), rng.randint(0, size - 1))), size]
    runs = list(pairwise(edges))
    if rng.random() < 0.3:
        rng.shuffle(runs)
    parts = rng.randint(1, len(runs))
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    for k, run in enumerate(runs):
        dealt[k % parts if rng.random() < 0.8 else rng.randrange(parts)].append(run)
    return [tuple(some) for some in dealt if some]


def build(seed: int) -> Case:
    rng = random.Random(seed)
    rows, cols, matrices = rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 4)
    pieces = [
        (Piece(some, others, (0,)), position)
        for position in range(matrices)
        for grid in [(random_groups(rng, rows), random_groups(rng, cols))]
        for some in grid[0]
        for others in grid[1]
        if rng.random() < 0.9  # the piece of the owner itself is in another buffer
    ]
    if rng.random() < 0.5:
        rng.shuffle(pieces)
    placed, offset = [], 0
    for piece, position in pieces:
        offset += rng.choice([0, 0, 0, 1, 3])
        placed.append(PlacedPiece(piece, offset, position))
        offset += piece.size
    return Case(rows, cols, matrices, tuple(placed), offset + rng.choice([0, 2]))


cases = st.integers(0, 2**32).map(build)


def views(case: Case, stage: Tensor, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    found = strided_views(case.placed, stage, buffer)
    assert [one.shape for one in found[0]] == [one.shape for one in found[1]]
    return found


@settings(max_examples=300)
@given(cases)
def test_from_the_stage_into_the_buffer(case: Case) -> None:
    stage, memory = case.stage(), torch.full((case.length + 5,), UNTOUCHED)
    expected = memory.clone()
    for one in case.placed:
        block = stage[one.position][indices(one.piece.rows)][:, indices(one.piece.cols)]
        expected[5 + one.offset : 5 + one.offset + one.piece.size] = block.flatten()
    before = stage.clone()
    into, back = views(case, stage, memory[5:])  # a buffer is a view of a larger one
    for target, source in zip(back, into, strict=True):
        target.copy_(source)
    assert torch.equal(memory, expected)
    assert torch.equal(stage, before)


@settings(max_examples=300)
@given(cases)
def test_from_the_buffer_into_the_stage(case: Case) -> None:
    buffer = torch.arange(case.length)
    memory = torch.full((case.matrices + 1, case.rows * case.cols + 3), UNTOUCHED)[:, :-3].unflatten(1, (case.rows, case.cols))
    expected = memory.clone()
    for one in case.placed:
        block = buffer[one.offset : one.offset + one.piece.size].view(one.piece.shape)
        rows, cols = torch.meshgrid(indices(one.piece.rows), indices(one.piece.cols), indexing="ij")
        expected[1 + one.position][rows, cols] = block
    into, back = views(case, memory[1:], buffer)  # so may be a stage
    for target, source in zip(into, back, strict=True):
        target.copy_(source)
    assert torch.equal(memory, expected)
    assert torch.equal(buffer, torch.arange(case.length))


@settings(max_examples=100)
@given(cases)
def test_no_more_copies_than_blocks(case: Case) -> None:
    blocks = sum(len(one.piece.rows) * len(one.piece.cols) for one in case.placed)
    assert len(views(case, case.stage(), torch.zeros(case.length))[0]) <= blocks


def test_nothing_to_copy() -> None:
    assert strided_views([], torch.zeros(0, 2, 3), torch.zeros(0)) == ([], [])


def even(sources: int, matrices: int, dim: int, *, by_source: bool = True) -> int:
    """Copies that the pieces of even shards over ``sources`` need; pieces lie by source, then matrix, or the other way round."""
    rows, cols = (2 * sources, 3) if dim == 0 else (3, 2 * sources)
    cut = [((2 * k, 2 * k + 2),) for k in range(sources)]
    pieces = [Piece(*((one, ((0, cols),)) if dim == 0 else (((0, rows),), one)), (k,)) for k, one in enumerate(cut)]
    order = [(k, m) for k in range(sources) for m in range(matrices)]
    if not by_source:
        order = [(k, m) for m in range(matrices) for k in range(sources)]
    placed = [PlacedPiece(pieces[k], turn * pieces[k].size, m) for turn, (k, m) in enumerate(order)]
    stage, buffer = torch.zeros(matrices, rows, cols), torch.zeros(matrices * rows * cols)
    return len(strided_views(placed, stage, buffer)[0])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("sources", "matrices"), [(2048, 1), (64, 1), (64, 5), (5, 64), (2, 100), (1, 7)])
def test_even_shards_collapse(sources: int, matrices: int, dim: int) -> None:
    """One copy per matrix or per source, whichever are fewer, and not one per piece."""
    assert even(sources, matrices, dim) == min(sources, matrices)


@pytest.mark.parametrize("dim", [0, 1])
def test_even_shards_of_neighbouring_matrices(dim: int) -> None:
    """Rows of matrix after matrix continue each other on both sides; columns do not."""
    assert even(64, 5, dim, by_source=False) == (1 if dim == 0 else 5)


@pytest.mark.parametrize("dim", [0, 1])
def test_what_an_owner_unpacks(dim: int) -> None:
    """The owner's own piece is elsewhere and parts each matrix in two: at most two copies a matrix over 255 senders."""
    mesh = Mesh((256,), tuple(range(256)))
    entries = [PlannedParam(f"p{k}", (Layout((256, 256), mesh, (Sharded(dim),)),), 0, "lane", 4, 1000) for k in range(512)]
    plan = make_plan(entries, PlanOptions(cost_model_for("cpu"), chunk_size=512))
    (wave,) = routes_of(plan, 100)
    assert len(wave.owned_tasks) == 2
    placed, offset = [], 0
    for send in wave.gather_in:
        placed.append(PlacedPiece(send.piece, offset, wave.owned_tasks.index(send.task)))
        offset += send.piece.size
    assert len(placed) == 510
    assert len(strided_views(placed, torch.zeros(2, 256, 256), torch.zeros(offset))[0]) <= 4
