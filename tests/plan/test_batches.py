"""Batches: every matrix in exactly one, in order, alike, within the budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshmuon.plan import Batch, BatchItem, plan_batches

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
        (item_range.item, k)
        for batch in batches
        for item_range in batch.slices
        for k in range(item_range.start, item_range.stop)
    ]


@given(models, budgets, chunks)
def test_every_matrix_is_in_one_batch_of_its_kind(model: list[BatchItem], budget: int, chunk_size: int) -> None:
    batches = plan_batches(model, budget=budget, chunk_size=chunk_size)
    assert sorted(positions(batches)) == [(index, k) for index, item in enumerate(model) for k in range(item.count)]
    kinds: dict[object, list[Batch]] = {}
    for batch in batches:
        first = model[batch.slices[0].item]
        kinds.setdefault((first.rows, first.cols, first.treatment, first.matrix_bytes), []).append(batch)
        assert all(item_range.stop > item_range.start for item_range in batch.slices)
        for item in (model[item_range.item] for item_range in batch.slices):
            assert (item.rows, item.cols, item.treatment) == (batch.rows, batch.cols, first.treatment)
    for (*_, matrix_bytes), of_kind in kinds.items():  # type: ignore[misc]
        order = positions(tuple(of_kind))
        assert order == sorted(order)  # so an item's last matrix is in the last batch that touches it
        largest = max(1, budget // matrix_bytes)
        largest = min(largest, chunk_size) if chunk_size > 0 else largest
        sizes = [batch.size for batch in of_kind]
        assert max(sizes) <= largest
        assert len(sizes) == -(-sum(sizes) // largest)  # no more than needed
        assert max(sizes) - min(sizes) <= 1


def test_matrices_of_no_size() -> None:
    assert positions(plan_batches([BatchItem(2, 0, 4, "a", 0)], budget=1)) == [(0, 0), (0, 1)]
