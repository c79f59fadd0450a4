"""How matrices are batched changes no bit of the result: with one thread always, with more when deterministic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.reference import LR, Shape, assert_same_bits, engine_muon, group, make_params, run

SMALL: tuple[Shape, ...] = (
    (8, 12),
    (12, 8),
    (8, 12),
    (33, 50),
    (8, 12),
    (33, 50),
    (5, 7, 6),
    (3, 8, 12),
    (20, 20),
    (1, 9),
    (9, 1),
)
BLOCKED: tuple[Shape, ...] = ((390, 390), (390, 390))
BATCHINGS: list[dict[str, Any]] = [
    {"chunk_size": 1},
    {"chunk_size": 2},
    {"chunk_size": 3},
    {"memory_budget": 1},
    {"memory_budget": 20_000},
    {"deterministic": True},
    {"deterministic": True, "chunk_size": 2},
    {"cuda_graphs": True},
]


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def results(shapes: tuple[Shape, ...], steps: int = 2, **options: Any) -> list[nn.Parameter]:
    params = make_params(*shapes)
    run(engine_muon([group(params, prefix="experts")], lr=LR, expert_keys=["experts"], **options), params, range(steps))
    return params


@pytest.mark.parametrize("options", BATCHINGS, ids=str)
@pytest.mark.parametrize("form", ["auto", "standard", "gram"])
def test_one_thread(options: dict[str, Any], form: str) -> None:
    assert_same_bits(results(SMALL, form=form, **options), results(SMALL, form=form))


@pytest.mark.parametrize("options", [{"chunk_size": 1}, {"deterministic": True}], ids=str)
def test_one_thread_blocked_products(options: dict[str, Any]) -> None:
    assert_same_bits(results(BLOCKED, 1, **options), results(BLOCKED, 1))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("options", [{"chunk_size": 1}, {"chunk_size": 2}, {"memory_budget": 20_000}], ids=str)
def test_two_threads_when_deterministic(options: dict[str, Any]) -> None:
    assert_same_bits(results(SMALL, deterministic=True, **options), results(SMALL, deterministic=True))


@pytest.mark.usefixtures("two_threads")
def test_two_threads_blocked_products_when_deterministic() -> None:
    """One Newton–Schulz step: threads that wait for each other are slow on a busy machine."""
    options: dict[str, Any] = {"deterministic": True, "ns_steps": 1}
    assert_same_bits(results(BLOCKED, 1, chunk_size=1, **options), results(BLOCKED, 1, **options))


class Products(TorchDispatchMode):
    """Notes how many matrices each product multiplies at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "bmm" in func.name() and args[-1].dtype == torch.float32:  # float64 is where the form is chosen
            self.sizes.add(args[-1].size(0))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("deterministic", "sizes"), [(True, {1}), (False, {3})])
def test_deterministic_multiplies_matrices_one_by_one(deterministic: bool, sizes: set[int]) -> None:
    """Whether batched products differ depends on the machine's BLAS; that there are none does not."""
    with Products() as products:
        results(((8, 12),) * 3, deterministic=deterministic)
    assert products.sizes == sizes
