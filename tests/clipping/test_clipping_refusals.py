"""Clipping that cannot be: the same error on every rank, nothing written, nothing that hangs."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshmuon.clipping.grad_norm import clip_grad_norm_, total_grad_norm
from meshmuon.errors import ConfigError, GradientError, MeshmuonError, PlanMismatchError
from tests.clipping.test_clipping_on_meshes import ORDERS, on_mesh, stage
from tests.support.cases import Case, Param
from tests.support.random_layouts import Layouts
from tests.support.tensors import local
from tests.support.threads import run_threads

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def decision(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        return "found", str(float(call()))
    except MeshmuonError as error:
        return type(error).__name__, str(error)


def raises_everywhere(world: int, main: Callable[[int], Any], kind: type[Exception], text: str) -> None:
    found = run_threads(world, lambda rank: decision(lambda: main(rank)))
    assert len(set(found)) == 1, found
    assert found[0][0] == kind.__name__, found[0]
    assert text in found[0][1]


TORN: dict[str, tuple[Layouts, Param]] = {
    "replicated": (Layouts((2, 2)), Param((8, 4), 0, (R, S0))),
    "sibling slices": (Layouts((2, 2), ("b",)), Param((8, 4), 1, (S0,))),
    "plain": (Layouts((2, 2)), Param((8, 4), None)),
}


@pytest.mark.parametrize("without_gradient", [0, 3])
@pytest.mark.parametrize("name", TORN)
def test_replicas_of_which_some_have_no_gradient(name: str, without_gradient: int) -> None:
    layouts, param = TORN[name]
    case = Case((Param((4, 4), 0, (S0, S0)), param))

    def main(rank: int) -> Tensor:
        params = on_mesh(case, layouts.build())
        if rank == without_gradient:
            params[1].grad = None
        return clip_grad_norm_(params, 0.1)

    raises_everywhere(4, main, GradientError, f"none on rank {without_gradient}, which hold the same elements")


@pytest.mark.parametrize("rank_that_fails", [1, 6])
def test_a_failure_in_one_stage_is_every_stages(rank_that_fails: int) -> None:
    def main(rank: int) -> Tensor:
        params, mesh, _ = stage(rank)
        if rank == rank_that_fails:
            params[0].grad = elsewhere(params[0])
        return clip_grad_norm_(params, 1.0, pp_group=mesh["pp"].get_group())

    raises_everywhere(8, main, GradientError, f"rank {rank_that_fails}: parameter 0 of shape")


def test_a_pipeline_group_that_is_no_pipeline() -> None:
    def main(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        params = on_mesh(Case((Param((4, 4), 0, (S0, S1)),)), [mesh])
        return total_grad_norm(params, pp_group=mesh["dp"].get_group())

    raises_everywhere(4, main, ConfigError, "already connect, so they would be counted more than once")


# What is not finite, on one rank only.

PARTS = {"a shard": 0, "a replica": 1, "a plain tensor": 2}


def spoiled(rank: int, where: str, bad: float) -> list[nn.Parameter]:
    """Rank 3, which counts neither replicas nor plain tensors, has one bad element."""
    case = Case((Param((8, 4), 0, (R, S0)), Param((3, 4), 0, (R, R)), Param((5,), None)))
    params = on_mesh(case, [init_device_mesh("cpu", (2, 2))])
    if rank == 3:
        grad = params[PARTS[where]].grad
        assert grad is not None
        (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[1] = bad
    return params


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", PARTS)
def test_one_rank_that_is_not_finite(where: str, bad: float, order: float) -> None:
    def main(rank: int) -> tuple[float, bool]:
        params = spoiled(rank, where, bad)
        before = [local(param.grad) for param in params]  # type: ignore[arg-type]
        with pytest.raises(GradientError, match=f"of all gradients is {abs(bad)}; nothing was changed"):
            clip_grad_norm_(params, 1.0, order, error_if_nonfinite=True)
        kept = all(
            torch.equal(local(p.grad).nan_to_num(), was.nan_to_num()) for p, was in zip(params, before, strict=True)
        )  # type: ignore[arg-type]
        return float(clip_grad_norm_(params, 1.0, order)), kept

    for found, kept in run_threads(4, main):
        assert kept
        assert math.isnan(found) if math.isnan(bad) else found == math.inf


# What cannot be clipped.


def sparse(param: nn.Parameter) -> Tensor:
    return torch.zeros(param.shape).to_sparse()


def unreduced(param: nn.Parameter) -> Tensor:
    return DTensor.from_local(torch.ones(param.shape), param.device_mesh, [Partial(), Partial()], run_check=False)  # type: ignore[attr-defined]


def elsewhere(param: nn.Parameter) -> Tensor:
    return DTensor.from_local(torch.ones(param.shape), param.device_mesh, [R, R], run_check=False)  # type: ignore[attr-defined]


BAD: dict[str, tuple[int, Callable[[nn.Parameter], Tensor], str]] = {
    "sparse": (1, sparse, "has a gradient of layout torch.sparse_coo"),
    "unreduced": (0, unreduced, "not reduced yet"),
    "elsewhere": (0, elsewhere, "laid out differently"),
}


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("ranks", [(2,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("name", BAD)
def test_bad_gradients_are_refused_on_all_ranks_and_nothing_is_written(
    name: str, ranks: tuple[int, ...], order: float
) -> None:
    which, make, text = BAD[name]

    def main(rank: int) -> Tensor:
        case = Case((Param((8, 4), 0, (R, S0)), Param((6,), None)))
        params = on_mesh(case, [init_device_mesh("cpu", (2, 2))])
        other = params[1 - which].grad
        assert other is not None
        before = local(other)
        if rank in ranks:
            with torch.no_grad():
                params[which].grad = make(params[which])
        try:
            return clip_grad_norm_(params, 0.1, order)
        finally:
            assert torch.equal(local(other), before)

    raises_everywhere(4, main, GradientError, text)


DIFFERENT: dict[str, tuple[Callable[[int, list[nn.Parameter]], dict[str, Any]], str]] = {
    "lists": (
        lambda rank, params: {"parameters": params[:1] if rank == 1 else params},
        "parameter 1 of shape (3, 4): rank 0 has it, rank 1 does not",
    ),
    "order": (
        lambda rank, params: {"parameters": params[::-1] if rank == 2 else params},
        "parameter 0 of shape (8, 4): rank 2 has parameter 0 of shape (3, 4) in its place",
    ),
    "limit": (
        lambda rank, params: {"parameters": params, "max_norm": 1.0 + (rank == 0)},
        "rank 0 was given max_norm=2.0, rank 1 max_norm=1.0: give",
    ),
}


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_clip_different_things(name: str, order: float) -> None:
    make, text = DIFFERENT[name]

    def main(rank: int) -> Tensor:
        params = on_mesh(Case((Param((8, 4), 0, (S0,)), Param((3, 4), 0, (R,)))), [init_device_mesh("cpu", (4,))])
        return clip_grad_norm_(**{"max_norm": 1.0, "norm_type": order, **make(rank, params)})

    raises_everywhere(4, main, PlanMismatchError, text)


@pytest.mark.parametrize("what", ["option", "missing", "pipeline"])
def test_an_error_keeps_nothing_alive(what: str) -> None:
    """A process group that outlives destroy_process_group in a cycle of references may end the process with an
    abort.
    """

    def main(rank: int) -> bool:
        params, mesh, _ = stage(rank)
        if what == "missing" and rank == 3:
            params[-1].grad = None  # a plain tensor, of which the other ranks of the stage have the gradient
        watch = weakref.ref(params[0])
        limit = -1.0 if what != "missing" and rank == 1 else 1.0
        said, _ = decision(
            lambda: clip_grad_norm_(params, limit, pp_group=mesh["pp"].get_group() if what != "option" else None)
        )
        assert said == (
            "found" if what == "option" and rank >= 4 else "GradientError" if what == "missing" else "ConfigError"
        )
        params.clear()
        return watch() is None

    gc.disable()
    try:
        assert run_threads(8, main) == [True] * 8
    finally:
        gc.enable()
