"""Clipping over meshes: the norm of one device on every rank, for one small all-reduce."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon.clipping.grad_norm import clip_grad_norm_, total_grad_norm
from meshmuon.errors import ConfigError, GradientError
from meshmuon.transport import groups
from tests.dist.test_meshes import MESHES, WORLD, model
from tests.support import nets
from tests.support.bounds import norm_error, unit
from tests.support.cases import Case, Param, gradient, place
from tests.support.collectives import counted_collectives
from tests.support.processes import results_of, run_ranks
from tests.support.random_layouts import DTYPES, SIZES, Layouts, mesh_layouts, placements
from tests.support.tensors import like, local, seeded
from tests.support.threads import run_threads

R, S0, S1 = Replicate(), Shard(0), Shard(1)
FSDP_OF_TP = _StridedShard(0, split_factor=2)
ORDERS = [1.0, 2.0, 3.5, math.inf]
pytestmark = pytest.mark.filterwarnings("ignore:Slicing a flattened dim")


def expected(case: Case, max_norm: float, order: float) -> tuple[Tensor, list[Tensor | None]]:
    """torch on whole tensors, widened: in float32 its own norms of order 1 are 2e-6 off for some thousand elements."""
    wholes: list[nn.Parameter] = []
    for k, one in enumerate(case.params):
        value = gradient(case, 0, k)
        param = nn.Parameter(torch.zeros(one.shape, dtype=torch.float64))
        param.grad = None if value is None else value.to(torch.float64)
        wholes.append(param)
    total = torch.nn.utils.clip_grad_norm_(wholes, max_norm, order)
    return total, [param.grad for param in wholes]


def on_mesh(case: Case, meshes: Sequence[DeviceMesh]) -> list[nn.Parameter]:
    """The case's parameters on this rank, with their gradients."""
    params = []
    for k, one in enumerate(case.params):
        param = nn.Parameter(place(case, meshes, k, torch.zeros(one.shape, dtype=one.dtype)))
        value = gradient(case, 0, k)
        param.grad = None if value is None else place(case, meshes, k, value)
        params.append(param)
    return params


def near(case: Case, order: float) -> float:
    """How far the norm may be off: it is added up in float32 at least, and given in float32 or more."""
    return norm_error(sum(math.prod(one.shape) for one in case.params), torch.float32, order) + unit(torch.float32)


def close(mine: Tensor, wanted: Tensor, dtype: torch.dtype, norm: float) -> None:
    """Clipped by a norm that is off by ``norm``; factor and product are rounded, and subnormal numbers have fewer
    digits.
    """
    limits = torch.finfo(dtype)
    rtol = norm + 4 * unit(torch.float32) + 2 * unit(dtype)
    torch.testing.assert_close(mine.to(wanted.dtype), wanted, rtol=rtol, atol=limits.tiny * limits.eps)


def check(
    case: Case,
    meshes: Sequence[DeviceMesh],
    order: float,
    foreach: bool | None = None,
    calls: dict[int, Any] | None = None,
) -> float:
    """Clips on this rank, and demands what torch finds on one device."""
    whole, _ = expected(case, math.inf, order)
    limit = float(whole) / 3
    total, clipped = expected(case, limit, order)
    params = on_mesh(case, meshes)
    if calls is not None:
        calls[dist.get_rank()].clear()
    found = clip_grad_norm_(params, limit, order, foreach=foreach)
    assert type(found) is Tensor
    assert found.shape == ()
    assert float(found) == pytest.approx(float(total), rel=near(case, order))
    for k, (param, wanted) in enumerate(zip(params, clipped, strict=True)):
        assert (param.grad is None) is (wanted is None)
        if param.grad is not None and wanted is not None:
            mine, cut = local(param.grad), local(place(case, meshes, k, wanted))
            if mine.numel() + cut.numel():
                close(mine, cut, case.params[k].dtype, near(case, order))
    return float(found)


def on_threads(case: Case, layouts: Layouts, order: float = 2.0, foreach: bool | None = None) -> None:
    found = run_threads(layouts.world, lambda rank: check(case, layouts.build(), order, foreach))
    assert len(set(found)) == 1, "ranks find different norms"


@st.composite
def cases(draw: Any) -> tuple[Case, Layouts]:
    layouts = draw(mesh_layouts())
    chosen = []
    for _ in range(draw(st.integers(1, 6))):
        dims = draw(st.integers(1, 3))
        mesh = draw(st.sampled_from([*range(len(layouts.shapes)), *range(len(layouts.shapes)), None]))
        cuts = () if mesh is None else draw(placements(dims, len(layouts.shapes[mesh])))
        shape = tuple(draw(SIZES) for _ in range(dims))
        chosen.append(Param(shape, mesh, cuts, draw(DTYPES), frozen=draw(st.integers(0, 9)) == 0))
    return Case(tuple(chosen)), layouts


@settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate], deadline=None)
@given(cases(), st.sampled_from(ORDERS), st.sampled_from([None, True, False]))
def test_random_layouts_equal_one_device(drawn: tuple[Case, Layouts], order: float, foreach: bool | None) -> None:
    on_threads(*drawn, order, foreach)


HSDP_TP = (
    Param((9, 6), 0, (R, S0, S1)),
    Param((8, 6), 0, (R, FSDP_OF_TP, S0)),
    Param((5,), 0, (R, S0, R)),
    Param((3, 3), None),
)
SLICES = (
    Param((7, 5), 0, (S0, S1)),
    Param((5, 4), 1, (S0,)),
    Param((8, 3), 2, (S1,)),
    Param((6,), 1, (R,)),
    Param((4,), None),
)
LAYOUTS: dict[str, tuple[Layouts, tuple[Param, ...]]] = {
    "replicated": (Layouts((2, 2)), (Param((6, 4), 0, (R, R)), Param((5,), 0, (R, R)))),
    "fewer rows than ranks": (Layouts((8,)), (Param((3, 4), 0, (S0,)), Param((1,), 0, (S0,)), Param((9, 2), 0, (S0,)))),
    "HSDP over TP": (Layouts((2, 2, 2)), HSDP_TP),
    "slices": (Layouts((2, 3), ("a", "b")), SLICES),
    "slices alone": (Layouts((2, 3), ("b",)), (Param((5, 4), 1, (S0,)), Param((4,), 1, (R,)))),
    "only one slice is cut": (Layouts((3, 2), ("a", "b")), (Param((6, 4), 1, (R,)), Param((6, 4), 2, (S0,)))),
    "plain": (Layouts((3,)), (Param((6, 4), None), Param((4,), None))),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_equal_one_device(name: str, order: float) -> None:
    layouts, params = LAYOUTS[name]
    on_threads(Case(params), layouts, order)


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("name", MESHES)
def test_several_meshes_take_one_all_reduce_of_five_numbers(name: str, order: float) -> None:
    meshes, cuts = MESHES[name]
    case = model(cuts)
    case = replace(case, params=(*case.params, Param((3, 3), None)))
    with counted_collectives() as calls:
        found = run_threads(WORLD, lambda rank: check(case, meshes(), order, calls=calls))
    assert len(set(found)) == 1
    assert calls == {rank: [("all_reduce", 5)] for rank in range(WORLD)}


def test_plain_tensors_alone_send_nothing() -> None:
    with counted_collectives() as calls:
        run_threads(3, lambda rank: check(Case((Param((4, 3), None),)), [], 2.0, calls=calls))
    assert calls == {rank: [] for rank in range(3)}


def test_a_union_of_meshes_makes_one_group_once() -> None:
    """Ranks 0 to 4 of 6 are connected by separate meshes, and there is no group of just these."""
    case = Case((Param((7, 5), 0, (S0,)), Param((5, 6), 1, (S1,))))

    def main(rank: int) -> list[float]:
        meshes = [DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [2, 3, 4])]
        if rank == 5:
            return []
        params = on_mesh(case, meshes)
        calls[dist.get_rank()].clear()
        return [float(total_grad_norm(params, order)) for order in (2.0, 2.0, 1.0, math.inf, 2.0)]

    for _ in range(2):  # the second world finds nothing of the first
        with counted_collectives() as calls:
            found = run_threads(6, main)
        for rank in range(5):
            assert found[rank] == found[0]
            assert sorted(calls[rank]) == [("all_reduce", 5)] * 5 + [("new_group", 0)]
        assert found[0][0] == pytest.approx(float(expected(case, math.inf, 2.0)[0]), rel=near(case, 2.0))
    gc.collect()
    assert not groups._made, "groups outlive their world"


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_missing_gradient_of_some_shards_is_zero(order: float) -> None:
    def main(rank: int) -> float:
        case, mesh = Case((Param((8, 4), 0, (S0,)), Param((8, 4), 0, (S0,)))), init_device_mesh("cpu", (4,))
        params = on_mesh(case, [mesh])
        if rank in (0, 2):
            params[0].grad = None
        if rank == 3:
            params[0].grad = params[1].grad = None
        return float(clip_grad_norm_(params, 0.5, order))

    found = run_threads(4, main)
    case = Case((Param((8, 4)), Param((8, 4))))
    first, second = gradient(case, 0, 0), gradient(case, 0, 1)
    assert first is not None
    assert second is not None
    wanted = torch.linalg.vector_norm(torch.cat([first[2:4], second[:6]]).double(), order)
    assert found == [pytest.approx(float(wanted), rel=near(case, order))] * 4


# Pipeline stages.

STAGES = ((Param((6, 4), 0, (S0, S1)), Param((5, 3), 1, (S0,)), Param((4,), None)), (Param((7, 2), 0, (S0, S1)),))


def stage(rank: int) -> tuple[list[nn.Parameter], DeviceMesh, Case]:
    """Two stages of 2×2 ranks with other parameters, on slices of one mesh of 2×2×2."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    case = Case(STAGES[rank // 4])
    return on_mesh(case, [mesh["dp", "tp"], mesh["tp"]]), mesh, case


@pytest.mark.parametrize("order", ORDERS)
def test_stages_without_a_pipeline_group_know_only_themselves(order: float) -> None:
    def main(rank: int) -> float | None:
        params, _, _ = stage(rank)
        return None if rank >= 4 else float(total_grad_norm(params, order))  # the second stage never calls

    wanted = float(expected(Case(STAGES[0]), math.inf, order)[0])
    assert run_threads(8, main) == [pytest.approx(wanted, rel=near(Case(STAGES[0]), order))] * 4 + [None] * 4


@pytest.mark.parametrize("as_mesh", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_stages_add_up_over_a_pipeline_group(order: float, as_mesh: bool) -> None:
    totals = [expected(Case(params), math.inf, order)[0] for params in STAGES]
    total = float(torch.linalg.vector_norm(torch.stack(totals), order))
    bound = near(Case((*STAGES[0], *STAGES[1])), order)

    def main(rank: int) -> float:
        params, mesh, _ = stage(rank)
        before = [local(param.grad) for param in params]  # type: ignore[arg-type]
        total_grad_norm(params, order)  # makes the group of the stage
        calls[dist.get_rank()].clear()
        found = clip_grad_norm_(params, total / 2, order, pp_group=mesh["pp"] if as_mesh else mesh["pp"].get_group())
        for param, was in zip(params, before, strict=True):
            assert param.grad is not None
            close(local(param.grad), was / 2, torch.float32, bound + 1e-6 / total)
        return float(found)

    with counted_collectives() as calls:
        found = run_threads(8, main)
    assert found == [found[0]] * 8
    assert found[0] == pytest.approx(total, rel=bound)
    assert calls == {rank: [("all_reduce", 5)] * 2 for rank in range(8)}


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_stages_of_one_rank_each(order: float) -> None:
    """There is no group within a stage, and parameters differ between stages."""

    def main(rank: int) -> float:
        param = nn.Parameter(torch.zeros(rank + 2))
        param.grad = torch.full((rank + 2,), 2.0)
        return float(total_grad_norm(param, order, pp_group=dist.group.WORLD))

    wanted = 2.0 if math.isinf(order) else 2.0 * math.sqrt(9)
    assert run_threads(3, main) == [wanted] * 3, "all sums and the root are whole numbers"


# torch's own wrappers.


def clip_wrapped(net: nn.Module, whole: nn.Module, order: float) -> float:
    for k, (param, other) in enumerate(zip(net.parameters(), whole.parameters(), strict=True)):
        other.grad = seeded(other.shape, k)
        param.grad = like(param, other.grad)
    wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.7, order)
    bound = 2 * norm_error(sum(param.numel() for param in whole.parameters()), torch.float32, order) + 2 * unit(
        torch.float32
    )
    found = clip_grad_norm_(net.parameters(), 0.7, order)
    assert float(found) == pytest.approx(float(wanted), rel=bound)
    for param, other in zip(net.parameters(), whole.parameters(), strict=True):
        assert param.grad is not None
        assert other.grad is not None
        mine, cut = local(param.grad), local(like(param, other.grad))
        if mine.numel() + cut.numel():
            close(mine, cut, torch.float32, bound)
    return float(found)


def gloo_main(rank: int, folder: Path) -> None:
    """In a separate process: wrapped by FSDP2, beside one device; then NaN and a failure on one rank only."""
    mesh = init_device_mesh("cpu", (2,))
    for order in ORDERS:
        net, whole = nets.build_net((5, 7, 3)), nets.build_net((5, 7, 3))
        fully_shard(net, mesh=mesh)
        clip_wrapped(net, whole, order)
    params = list(net.parameters())
    grad = params[0].grad
    assert isinstance(grad, DTensor)
    if rank == 1:
        grad.to_local()[0] = math.nan
    for order in ORDERS:
        assert math.isnan(total_grad_norm(params, order)), order
        with pytest.raises(GradientError, match="is nan; nothing was changed"):
            clip_grad_norm_(params, 1.0, order, error_if_nonfinite=True)
    with pytest.raises(ConfigError, match=r"rank 1: max_norm=-1\.0 must"):
        clip_grad_norm_(params, -1.0 if rank else 1.0)


def test_gloo_processes(tmp_path: Path) -> None:
    results_of(run_ranks(2, gloo_main, tmp_path))
