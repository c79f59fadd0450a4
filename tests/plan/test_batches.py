"""Batches: every matrix in exactly one, in order, alike, within the budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmuon.plan import Batch, BatchItem, ItemRange, plan_batches

items = st.builds(
    BatchItem,
    count=st.integers(0, 7),
    rows=st.integers(1, 3),
    cols=st.integers(1, 3),
    treatment=st.sampled_from(["fp32", "bf16"]),
    matrix_bytes=st.just(0),
).map(lambda item: BatchItem(item.count, item.rows, item.cols, item.treatment, 10 * item.rows * item.cols))
models = st.lists(items, max_size=12)
budgets = st.integers(1, 400)
chunks = st.one_of(st.just(-1), st.integers(1, 9))


def positions(batches: tuple[Batch, ...]) -> list[tuple[int, int]]:
    return [
        (item_range.item, k) for batch in batches for item_range in batch.slices for k in range(item_range.start, item_range.stop)
    ]


@given(models, budgets, chunks)
def test_every_matrix_exactly_once(model: list[BatchItem], budget: int, chunk_size: int) -> None:
    found = positions(plan_batches(model, budget=budget, chunk_size=chunk_size))
    assert sorted(found) == [(index, k) for index, item in enumerate(model) for k in range(item.count)]


@given(models, budgets, chunks)
def test_a_batch_holds_what_is_alike(model: list[BatchItem], budget: int, chunk_size: int) -> None:
    for batch in plan_batches(model, budget=budget, chunk_size=chunk_size):
        assert batch.size > 0
        assert all(item_range.stop > item_range.start for item_range in batch.slices)
        assert {(model[item_range.item].rows, model[item_range.item].cols) for item_range in batch.slices} == {
            (batch.rows, batch.cols)
        }
        assert len({model[item_range.item].treatment for item_range in batch.slices}) == 1


@given(models, budgets, chunks)
def test_order_of_items_is_kept(model: list[BatchItem], budget: int, chunk_size: int) -> None:
    """Within a kind; so an item's last matrix is in the last batch that touches it."""
    kinds: dict[object, list[tuple[int, int]]] = {}
    for item, k in positions(plan_batches(model, budget=budget, chunk_size=chunk_size)):
        kinds.setdefault((model[item].rows, model[item].cols, model[item].treatment), []).append((item, k))
    for order in kinds.values():
        assert order == sorted(order)


@given(models, budgets, chunks)
def test_budget_and_chunk_size_are_kept(model: list[BatchItem], budget: int, chunk_size: int) -> None:
    for batch in plan_batches(model, budget=budget, chunk_size=chunk_size):
        needed = batch.size * model[batch.slices[0].item].matrix_bytes
        assert needed <= budget or batch.size == 1
        assert chunk_size == -1 or batch.size <= chunk_size


@given(models, budgets, chunks)
def test_no_more_batches_than_needed_and_even_ones(model: list[BatchItem], budget: int, chunk_size: int) -> None:
    kinds: dict[object, list[int]] = {}
    for batch in plan_batches(model, budget=budget, chunk_size=chunk_size):
        first = model[batch.slices[0].item]
        kinds.setdefault((first.rows, first.cols, first.treatment, first.matrix_bytes), []).append(batch.size)
    for (*_, matrix_bytes), sizes in kinds.items():  # type: ignore[misc]
        largest = max(1, budget // matrix_bytes)
        largest = min(largest, chunk_size) if chunk_size > 0 else largest
        assert len(sizes) == -(-sum(sizes) // largest)
        assert max(sizes) - min(sizes) <= 1


@given(models, budgets, chunks)
def test_the_plan_is_data(model: list[BatchItem], budget: int, chunk_size: int) -> None:
    """Equal input gives an equal, hashable plan."""
    first = plan_batches(model, budget=budget, chunk_size=chunk_size)
    assert hash(first) == hash(plan_batches(list(model), budget=budget, chunk_size=chunk_size))


def test_an_example() -> None:
    model = [
        BatchItem(1, 4, 6, "a", 100),
        BatchItem(5, 4, 6, "a", 100),
        BatchItem(2, 6, 4, "a", 100),
        BatchItem(1, 4, 6, "b", 100),
    ]
    assert plan_batches(model, budget=300) == (
        Batch(4, 6, (ItemRange(0, 0, 1), ItemRange(1, 0, 2))),
        Batch(4, 6, (ItemRange(1, 2, 5),)),
        Batch(6, 4, (ItemRange(2, 0, 2),)),
        Batch(4, 6, (ItemRange(3, 0, 1),)),
    )


@pytest.mark.parametrize("model", [[], [BatchItem(0, 3, 4, "a", 100)]])
def test_nothing_to_do(model: list[BatchItem]) -> None:
    assert plan_batches(model, budget=100) == ()


def test_matrices_of_no_size() -> None:
    assert positions(plan_batches([BatchItem(2, 0, 4, "a", 0)], budget=1)) == [(0, 0), (0, 1)]
