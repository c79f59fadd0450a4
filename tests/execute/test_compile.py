"""The compiled orthogonalisation: one graph per shape, for any number of shapes, and the eager result.

Inductor itself is not run here: its first use takes longer than a test may. What is compiled is the same function with
the same graph for every backend; "aot_eager" runs the whole of torch.compile except the generation of code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import list_backends, register_backend

from meshmuon import Muon, polar_express
from meshmuon.ortho import blocks_for
from tests.support.reference import (
    LR,
    Shape,
    assert_moved_within_rounding,
    copies,
    engine_muon,
    group,
    make_params,
    polar_factor,
    run,
)

CALLS: list[int] = []
GRAPHS: list[int] = []  # products in each compiled graph


def _counting(graph: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
    GRAPHS.append(sum("bmm" in str(node.target) for node in graph.graph.nodes))

    def call(*args: Any) -> Any:
        CALLS.append(GRAPHS[-1])
        return graph.forward(*args)

    return call


if "meshmuon_counting" not in list_backends(exclude_tags=()):
    register_backend(_counting, name="meshmuon_counting")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    CALLS.clear()
    GRAPHS.clear()
    yield
    torch._dynamo.reset()


def both(shapes: tuple[Shape, ...], backend: str, **options: Any) -> tuple[list[nn.Parameter], ...]:
    start = make_params(*shapes)
    compiled, eager = copies(start), copies(start)
    run(engine_muon([group(compiled)], lr=LR, compile=backend, **options), compiled, range(3))
    run(engine_muon([group(eager)], lr=LR, **options), eager, range(3))
    return compiled, eager, start


def test_aot_eager_equals_eager() -> None:
    """The same products in the same order and dtype: at most a rounding of each, amplified as in any float32 run."""
    compiled, eager, start = both(((8, 12), (12, 8), (8, 12)), "aot_eager", form="standard")
    assert_moved_within_rounding(compiled, eager, start, 3, polar_express())


def test_more_than_eight_shapes_are_all_compiled() -> None:
    """torch.compile gives up at the ninth shape of a function unless told otherwise, and runs it eagerly without a
    word.
    """
    shapes = tuple((6, 7 + k) for k in range(11))
    compiled, eager, start = both(shapes, "meshmuon_counting", form="standard", ns_steps=2)
    assert_moved_within_rounding(compiled, eager, start, 3, polar_express(steps=2))
    assert len(GRAPHS) == len(shapes)
    assert len(CALLS) == (1 + 3) * len(shapes), "once while the plan is prepared, and in three steps"


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)], ids=str)
@pytest.mark.parametrize("form", ["standard", "gram", "auto"])
def test_one_graph_holds_all_products(form: str, shape: Shape) -> None:
    """No breaks: choosing the form is done before tracing, not traced."""
    compiled, eager, start = both((shape,), "meshmuon_counting", form=form)
    assert_moved_within_rounding(compiled, eager, start, 3, polar_express())
    blocks = blocks_for(*shape, polar_express(steps=5), form=form, dtype=torch.float32)
    assert [4 * 5 - len(blocks)] == GRAPHS  # two products a block, and 4·steps − 3·blocks inside them


def test_empty_parameters_beside_compiled_ones() -> None:
    params = make_params((0, 4), (6, 8))
    start = copies(params)
    run(engine_muon([group(params)], lr=LR, compile="meshmuon_counting", form="standard"), params, range(2))
    assert not torch.equal(params[1], start[1])


def test_callable_schemes_compile_too() -> None:
    compiled, eager, start = both(((6, 8),), "meshmuon_counting", scheme=polar_factor)
    assert_moved_within_rounding(compiled, eager, start, 3, polar_express(steps=10))
    assert len(CALLS) == 3


@pytest.mark.parametrize(("option", "backend"), [(True, "inductor"), ("aot_eager", "aot_eager")])
def test_backend(option: bool | str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def record(function: Callable[..., Tensor], *, backend: str, dynamic: bool) -> Callable[..., Tensor]:
        asked.append((backend, dynamic))
        return function

    monkeypatch.setattr(torch, "compile", record)
    params = make_params((6, 8), (8, 6))
    twins = copies(params)
    run(engine_muon([group(params)], lr=LR, compile=option, form="standard"), params, range(2))
    run(engine_muon([group(twins)], lr=LR, form="standard"), twins, range(2))
    assert asked == [(backend, False)] * 2
    assert_moved_within_rounding(params, twins, make_params((6, 8), (8, 6)), 2, polar_express())


def test_nothing_is_compiled_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", None)
    params = make_params((6, 8))
    run(Muon([group(params)], lr=LR), params, [0])
