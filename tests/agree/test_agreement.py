"""Ranks that would do different things: one plan for all of them, or the same error on all of them and nothing
written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshmuon import Muon
from tests.support.cases import Case, Param, build, gradient, initial, place, run
from tests.support.small_model import world_mesh
from tests.support.tensors import local, one_text, refused, same
from tests.support.threads import run_threads

R, S0, S1 = Replicate(), Shard(0), Shard(1)
WORLD = 3


def params_of(case: Case, mesh: DeviceMesh) -> list[nn.Parameter]:
    return [nn.Parameter(place(case, [mesh], k, value)) for k, value in enumerate(initial(case))]


def give_gradients(case: Case, mesh: DeviceMesh, params: Sequence[nn.Parameter], step: int) -> None:
    for k, param in enumerate(params):
        value = gradient(case, step, k)
        param.grad = None if value is None else place(case, [mesh], k, value)


# A gradient that only some ranks have.

TORN = {
    "Muon, shared": (Param((6, 4), 0, (R,)), {"replicas": "share"}),
    "Muon, repeated": (Param((6, 4), 0, (R,)), {"replicas": "repeat"}),
    "AdamW": (Param((6,), 0, (R,), muon=False), {}),
}


@pytest.mark.parametrize("name", TORN)
@pytest.mark.parametrize("beside", [True, False], ids=["beside a shard", "alone"])
def test_replicas_with_and_without_a_gradient(name: str, beside: bool) -> None:
    torn, options = TORN[name]
    case = Case((torn, Param((8, 4), 0, (S0,))) if beside else (torn,), options)

    def main(rank: int) -> str:
        mesh = world_mesh()
        params = params_of(case, mesh)
        optimizer = build(case, params)
        give_gradients(case, mesh, params, 0)
        optimizer.step()
        give_gradients(case, mesh, params, 1)
        if rank != 1:
            params[0].grad = None
        return refused(optimizer)

    text = one_text(run_threads(WORLD, main))
    assert text.startswith("GradientError: layers.0.weight has a gradient on rank 1 and none on rank 0")


def test_hsdp_shards_may_lack_a_gradient_together() -> None:
    """All replicas of a shard without a gradient: zeros. One of them alone, right afterwards: an error."""
    case = Case((Param((7, 5), 0, (R, S0)), Param((4, 6), 0, (R, S0))))

    def grads(step: int, k: int) -> Tensor | None:
        value = gradient(case, step, k)
        if (step, k) == (1, 0):
            value[4:] = 0  # the second shard
        return value

    expected = run(case, [nn.Parameter(value) for value in initial(case)], grads)

    def main(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2, 2))
        params = params_of(case, mesh)
        optimizer = build(case, params, replicas="share")
        for step in range(case.steps):
            give_gradients(case, mesh, params, step)
            if step == 1 and rank in (1, 3):
                params[0].grad = None
            optimizer.step()
        for k, param in enumerate(params):
            same(local(param), local(place(case, [mesh], k, expected[0][k])), f"parameter {k}")
        give_gradients(case, mesh, params, 0)
        if rank in (1, 3):
            params[0].grad = None
        optimizer.step()
        give_gradients(case, mesh, params, 1)
        if rank == 1:
            params[0].grad = None
        return refused(optimizer)

    assert re.match("GradientError: .* rank 3 and none on rank 1", one_text(run_threads(4, main)))


# Ranks that were built differently.

Change = Callable[[DeviceMesh, list[tuple[str, nn.Parameter]], dict[str, Any]], object]


def other_two(value: Tensor, placement: Any = S0) -> Change:
    def change(mesh: DeviceMesh, named: list[tuple[str, nn.Parameter]], options: dict[str, Any]) -> None:
        named[1] = ("two", nn.Parameter(distribute_tensor(value, mesh, [placement], src_data_rank=None)))

    return change


def setting(**changed: Any) -> Change:
    return lambda mesh, named, options: options.update(changed)


MISMATCHES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "order": (lambda mesh, named, options: named.insert(0, named.pop(1)), ("one: rank 1 has two in its place",)),
    "shape": (other_two(torch.ones(6, 9)), ("two: rank 1 has 6×9",)),
    "placements": (other_two(torch.ones(6, 4), S1), ("two: rank 1 has 6×4 [S(1)]",)),
    "dtype": (other_two(torch.ones(6, 4).double()), ("two: rank 1 has", "float64")),
    "one parameter less": (lambda mesh, named, options: named.pop(), ("three: rank 0 has it, rank 1 does not",)),
    "chunk_size": (setting(chunk_size=1), ("rank 1 was given chunk_size=1, rank 0 chunk_size=-1: give",)),
    "warmup_step": (setting(warmup_step=0), ("rank 1 was given in_flight=1, rank 0 in_flight=6: give",)),
    "memory_budget": (setting(memory_budget=1000), ("rank 1 was given budget=1000, rank 0 budget=67108864: give",)),
    "replicas": (setting(replicas="repeat"), ("rank 1 was given replicas='repeat', rank 0 replicas='auto': give",)),
    "comm_dtype": (setting(comm_dtype=torch.bfloat16), ("one: rank 1 has", "bfloat16")),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_were_built_differently(name: str) -> None:
    change, parts = MISMATCHES[name]

    def main(rank: int) -> str:
        mesh = world_mesh()
        shapes = {"one": (7, 5), "two": (6, 4), "three": (4, 4)}
        named = [
            (n, nn.Parameter(distribute_tensor(torch.ones(s), mesh, [S0], src_data_rank=None)))
            for n, s in shapes.items()
        ]
        options: dict[str, Any] = {}
        if rank == 1:
            change(mesh, named, options)
        optimizer = Muon([{"params": named, "use_muon": True}], **options)
        for _, param in named:
            param.grad = torch.ones_like(param)
        return refused(optimizer)

    text = one_text(run_threads(WORLD, main))
    assert all(part in text for part in ("PlanMismatchError: ", *parts)), text


def test_a_shard_of_as_many_elements_in_another_shape_is_refused() -> None:
    """(6, 4) over 2 ranks: each holds (3, 4). A wrapper that stores (4, 3) would mix up the elements without an
    error.
    """

    def main(rank: int) -> str:
        mesh = world_mesh()
        part = torch.ones((4, 3) if rank == 1 else (3, 4))
        param = nn.Parameter(
            DTensor.from_local(part, mesh, [S0], run_check=False, shape=torch.Size((6, 4)), stride=(4, 1))
        )
        optimizer = Muon([{"params": [param], "names": ["turned"], "use_muon": True}])
        param.grad = DTensor.from_local(
            part.clone(), mesh, [S0], run_check=False, shape=torch.Size((6, 4)), stride=(4, 1)
        )
        return refused(optimizer)

    assert re.match(
        r"PlanError: .*turned .* should hold \(3, 4\), but it holds \(4, 3\)", one_text(run_threads(2, main))
    )
