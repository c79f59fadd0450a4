"""Strided copies between a flat buffer and a batch: few of them. That they move the right elements, tests/dist
shows.
"""

from __future__ import annotations

import pytest
import torch

from meshmuon.execute.buffers import PlacedPiece, strided_views
from meshmuon.layout import Layout, Mesh, Piece, Sharded
from meshmuon.plan import PlannedParam, PlanOptions, cost_model_for, make_plan, routes_of


def even(sources: int, matrices: int, dim: int, *, by_source: bool = True) -> int:
    """Copies that the pieces of even shards over ``sources`` need; pieces lie by source, then matrix, or the other
    way round.
    """
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
    entries = [
        PlannedParam(f"p{k}", (Layout((256, 256), mesh, (Sharded(dim),)),), 0, "lane", 4, 1000) for k in range(512)
    ]
    plan = make_plan(entries, PlanOptions(cost_model_for("cpu"), chunk_size=512))
    (wave,) = routes_of(plan, 100)
    assert len(wave.owned_tasks) == 2
    placed, offset = [], 0
    for send in wave.gather_in:
        placed.append(PlacedPiece(send.piece, offset, wave.owned_tasks.index(send.task)))
        offset += send.piece.size
    assert len(placed) == 510
    assert len(strided_views(placed, torch.zeros(2, 256, 256), torch.zeros(offset))[0]) <= 4
