"""Any layout, any options: every rank ends with the bits of one device, and sends the bytes that the plan says."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import CostModel
from tests.support.cases import Case, Param, check, gradient, initial, place, run, single
from tests.support.counting import Wire, counted
from tests.support.hostile import HostileArithmetic, fresh_trials
from tests.support.random_layouts import Layouts, cases
from tests.support.tensors import local, same
from tests.support.threads import run_threads


def run_case(case: Case, layouts: Layouts, *, replica_group: bool = False) -> Wire:
    """Runs a case on all ranks as threads."""
    torch.set_num_threads(case.threads)
    expected = single(case)

    def main(rank: int) -> None:
        options = {"replica_group": dist.group.WORLD} if replica_group else {}
        check(case, layouts.build(), expected, watch=wire.watch, **options)

    with counted() as wire:
        run_threads(layouts.world, main)
    for rank in range(layouts.world):
        wire.check(rank)
    return wire


@settings(max_examples=50, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(cases(many=True))
def test_random_layouts_equal_one_device(drawn: tuple[Case, Layouts, bool]) -> None:
    case, layouts, replica_group = drawn
    run_case(case, layouts, replica_group=replica_group)


@settings(max_examples=10, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(cases(), st.data())
def test_random_nodes_change_no_bit(drawn: tuple[Case, Layouts, bool], data: st.DataObject) -> None:
    """Pretended nodes of any sizes, with links between them that are slower, faster or equal."""
    case, layouts, replica_group = drawn
    edges = sorted(data.draw(st.sets(st.integers(1, layouts.world - 1), min_size=1, max_size=3))) if layouts.world > 1 else []
    sizes = [stop - start for start, stop in pairwise([0, *edges, layouts.world])]
    cost = data.draw(st.sampled_from([CostModel(0.0, 1.0, 1e6, 1e3), CostModel(1e6, 1e3, 0.0, 1.0), None]))
    with patch.dict(os.environ, {"MESHMUON_RANKS_PER_NODE": ",".join(map(str, sizes))}):
        run_case(replace(case, options={**case.options, "cost_model": cost}), layouts, replica_group=replica_group)


@settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(cases(many=True), st.sampled_from(["nearest", "stochastic"]), st.booleans())
def test_random_layouts_of_bfloat16_weights(drawn: tuple[Case, Layouts, bool], rounding: str, cautious: bool) -> None:
    case, layouts, replica_group = drawn
    params = tuple(replace(param, dtype=torch.bfloat16) for param in case.params)
    options = {**case.options, "rounding": rounding, "cautious_weight_decay": cautious}
    run_case(replace(case, params=params, options=options), layouts, replica_group=replica_group)


def run_hostile(case: Case, layouts: Layouts, *, company: bool = False, **options: Any) -> int:
    """Runs a case on one device and on all ranks on a machine that rounds by address; how often it did."""
    torch.set_num_threads(case.threads)
    nudged = []

    def main(rank: int) -> None:
        with HostileArithmetic(company=company) as arithmetic:
            check(case, layouts.build(), expected, **options)
        nudged.append(arithmetic.nudged)

    with fresh_trials():
        with HostileArithmetic(company=company) as alone:
            expected = single(case)
        run_threads(layouts.world, main)
    return alone.nudged + sum(nudged)


@settings(max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(cases(many=True))
def test_random_layouts_where_products_round_by_address(drawn: tuple[Case, Layouts, bool]) -> None:
    case, layouts, replica_group = drawn
    options = {"replica_group": dist.group.WORLD} if replica_group else {}
    run_hostile(replace(case, misplaced=True, steps=2), layouts, **options)


@settings(max_examples=10, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(cases())
def test_random_layouts_where_products_round_by_company(drawn: tuple[Case, Layouts, bool]) -> None:
    case, layouts, _ = drawn
    deterministic = replace(case, options={**case.options, "deterministic": True}, steps=2)
    run_hostile(deterministic, layouts, company=True)


def test_the_hostile_machine_tells_batches_apart() -> None:
    """Without ``deterministic`` three equal matrices on three ranks differ there from the same in one batch."""
    case = Case(tuple(Param((8, 16), 0, (Shard(0),)) for _ in range(3)), steps=1)
    with pytest.raises(AssertionError, match="parameter"):
        run_hostile(case, Layouts((3,)), company=True)


ODD = ((6, 17), (7, 17), (31, 33), (100, 130), (3, 9, 9))


def many_odd(dtype: torch.dtype, placements: tuple[Any, ...]) -> tuple[Param, ...]:
    """Four of each, so that batches are large and no matrix fills multiples of 64 bytes."""
    return tuple(Param(shape, 0, placements, dtype) for shape in ODD for _ in range(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mesh_and_placements", [((3,), (Shard(0),)), ((3,), (Shard(1),)), ((3,), (Replicate(),))], ids=str)
@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"chunk_size": 3}, {"deterministic": True}], ids=str)
def test_many_odd_matrices(dtype: torch.dtype, mesh_and_placements: Any, options: dict[str, Any]) -> None:
    shape, placements = mesh_and_placements
    run_case(Case(many_odd(dtype, placements), options, 2), Layouts(shape))


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_several_threads_when_deterministic(dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    params = (*many_odd(dtype, (Shard(0),)), Param((37,), 0, (Shard(0),), dtype, muon=False))
    run_case(Case(params, {"deterministic": True}, 2), Layouts((2,)))


R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
STRIDED = _StridedShard(0, split_factor=2)


def fixed(name: str, layouts: Layouts, params: tuple[Param, ...], *, replica_group: bool = False, **options: Any) -> Any:
    return pytest.param(Case(params, options), layouts, replica_group, id=name)


MIXED = tuple(Param((9, 6), 0, (S0,), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64))
HSDP = (Param((7, 5), 0, (R, S0)), Param((4, 12), 0, (R, S0)), Param((6, 6), 0, (R, S0)), Param((5,), 0, (R, S0), muon=False))
FIXED = [
    fixed("fewer rows than ranks", Layouts((16,)), (Param((3, 8), 0, (S0,)), Param((1, 20), 0, (S0,)), Param((20, 1), 0, (S0,)))),
    fixed("columns", Layouts((5,)), (Param((6, 13), 0, (S1,)), Param((8, 4), 0, (S1,)))),
    fixed("experts over ranks", Layouts((4,)), (Param((6, 5, 4), 0, (S0,)), Param((3, 5, 4), 0, (S0,)))),
    fixed("experts cut inside", Layouts((4,)), (Param((3, 7, 6), 0, (S1,)), Param((2, 4, 9), 0, (S2,)))),
    fixed("experts over ranks and cut", Layouts((2, 3)), (Param((5, 7, 6), 0, (S0, S1)), Param((4, 6, 8), 0, (S0, S2)))),
    fixed("HSDP, shared", Layouts((2, 4)), HSDP, replicas="share"),
    fixed("HSDP, repeated", Layouts((2, 4)), HSDP, replicas="repeat"),
    fixed("FSDP over TP", Layouts((2, 2)), (Param((8, 6), 0, (STRIDED, S0)), Param((6, 8), 0, (S0, S1)))),
    fixed(
        "three axes",
        Layouts((2, 2, 2)),
        (Param((9, 6), 0, (R, S0, S1)), Param((5, 7), 0, (S0, R, S0)), Param((8, 8), 0, (S1, S0, R))),
    ),
    fixed(
        "replicated", Layouts((2, 2)), (Param((6, 4), 0, (R, R)), Param((4, 6), 0, (R, R)), Param((6,), 0, (R, R), muon=False))
    ),
    fixed("replicated, each for itself", Layouts((4,)), (Param((6, 4), 0, (R,)),), replicas="repeat"),
    fixed(
        "two meshes", Layouts((2, 3), ("flat",)), (Param((7, 5), 0, (S0, S1)), Param((11, 4), 1, (S0,)), Param((4, 6), 1, (R,)))
    ),
    fixed("slices", Layouts((2, 3), ("a", "b")), (Param((7, 5), 0, (R, S0)), Param((5, 4), 1, (S0,)), Param((8, 3), 2, (S1,)))),
    fixed("slices alone", Layouts((2, 2), ("a",)), (Param((5, 4), 1, (S0,)), Param((4, 4), 1, (R,)))),
    fixed("mixed dtypes", Layouts((3,)), MIXED),
    fixed("mixed dtypes, bfloat16 momentum", Layouts((3,)), MIXED, momentum_dtype=torch.bfloat16, chunk_size=1),
    fixed(
        "plain tensors divided",
        Layouts((3,)),
        tuple(Param(s, None) for s in ((5, 4), (4, 4), (3, 9), (5, 4))),
        replica_group=True,
    ),
    fixed(
        "plain tensors beside shards",
        Layouts((3,)),
        (Param((5, 4), None), Param((7, 4), 0, (S0,)), Param((4,), None, muon=False)),
    ),
    fixed("little memory", Layouts((4,)), tuple(Param((6, 5), 0, (S0,)) for _ in range(7)), memory_budget=1, warmup_step=0),
    fixed("one at a time", Layouts((4,)), tuple(Param((6, 5), 0, (S0,)) for _ in range(7)), chunk_size=1, warmup_step=1),
    fixed(
        "frozen and unused",
        Layouts((2, 2)),
        (
            Param((6, 5), 0, (S0, S1), unused=(0, 3)),
            Param((5, 5), 0, (S0, R), frozen=True),
            Param((4, 5), 0, (R, S0), unused=(1, 2, 3, 4)),
        ),
    ),
]


@pytest.mark.parametrize(("case", "layouts", "replica_group"), FIXED)
def test_fixed_layouts_equal_one_device(case: Case, layouts: Layouts, replica_group: bool) -> None:
    run_case(case, layouts, replica_group=replica_group)


@pytest.mark.parametrize("name", ["HSDP, shared", "slices", "mixed dtypes", "experts over ranks and cut", "FSDP over TP"])
def test_reference_path_equals_one_device(name: str) -> None:
    case, layouts, _ = next(one.values for one in FIXED if one.id == name)
    wire = run_case_reference(replace(case, steps=3), layouts)
    assert not wire.calls, "the reference path must not use the exchanges that it verifies"


@pytest.mark.parametrize("name", ["HSDP, shared", "experts over ranks and cut", "FSDP over TP", "columns"])
def test_reference_path_rounds_stochastically_as_one_device(name: str) -> None:
    """Its random bits follow torch's own sharding, those of the normal path meshmuon's layouts."""
    case, layouts, _ = next(one.values for one in FIXED if one.id == name)
    params = tuple(replace(param, dtype=torch.bfloat16) for param in case.params)
    stochastic = replace(case, params=params, steps=3, options={**case.options, "rounding": "stochastic"})
    run_case_reference(stochastic, layouts)
    run_case(stochastic, layouts)


def run_case_reference(case: Case, layouts: Layouts) -> Wire:
    expected = single(case)
    with counted() as wire:
        run_threads(layouts.world, lambda rank: check(case, layouts.build(), expected, use_distributed_muon=True))
    return wire


@pytest.mark.parametrize("world", [2, 4, 8])
def test_fsdp_sends_each_element_to_its_owner_and_back(world: int) -> None:
    """2(W − 1)/W² of the parameters' elements per rank: a rank gathers and scatters all but its own part of P/W elements."""
    case = Case((*(Param((2 * world, 8), 0, (S0,)) for _ in range(world)), Param((world, world), 0, (S0,))), {}, 1)
    wire = run_case(case, Layouts((world,)))
    total = sum(math.prod(one.shape) for one in case.params)
    assert sum(wire.elements.values()) * world == 2 * (world - 1) * total
    assert sum(wire.elements.values()) / world == pytest.approx(2 * (world - 1) / world**2 * total)
    assert sum(wire.nbytes.values()) == 4 * sum(wire.elements.values())


@pytest.mark.parametrize("muon", [True, False])
def test_local_tensors_in_column_major_order(muon: bool) -> None:
    """Some wrappers keep transposed weights; the update has the same bits as that of a whole that is transposed too."""
    case = Case(tuple(Param(shape, 0, (S0,), muon=muon) for shape in ((6, 5), (9, 7), (37, 3), (1, 19))))

    def turned(value: torch.Tensor) -> torch.Tensor:
        return value.t().contiguous().t()

    def main(rank: int) -> None:
        mesh = Layouts((3,)).build()[0]
        params = []
        for k, value in enumerate(initial(case)):
            mine = place(case, [mesh], k, value)
            whole = {"shape": mine.shape, "stride": (1, mine.size(0))}
            params.append(nn.Parameter(DTensor.from_local(turned(mine.to_local()), mesh, [S0], run_check=False, **whole)))
        with HostileArithmetic():
            found, momentum, _ = run(case, params, lambda step, k: place(case, [mesh], k, gradient(case, step, k)))
        for k in range(len(case.params)):
            same(found[k], local(place(case, [mesh], k, expected[0][k])), f"parameter {k}")
            same(momentum[k], local(place(case, [mesh], k, expected[1][k])), f"momentum {k}")

    with fresh_trials():
        with HostileArithmetic():
            expected = run(
                case, [nn.Parameter(turned(value)) for value in initial(case)], lambda step, k: gradient(case, step, k)
            )
        run_threads(3, main)


@pytest.mark.parametrize("what", [0, 1])
def test_the_comparison_sees_one_wrong_bit(what: int) -> None:
    case = Case((Param((7, 5), 0, (S0,)),))
    expected = single(case)
    one = expected[what][0]
    one[6, 4] = torch.nextafter(one[6, 4], torch.tensor(torch.inf))
    with pytest.raises(AssertionError, match="parameter 0" if what == 0 else "momentum 0"):
        run_threads(3, lambda rank: check(case, Layouts((3,)).build(), expected))


def test_groups_that_do_not_move_host_memory() -> None:
    """As with NCCL: ranks agree over a gloo group beside the one that moves the matrices."""
    case = Case((Param((7, 5), 0, (S0,)), Param((6, 4), 0, (S1,))))
    expected = single(case)
    run_threads(2, lambda rank: check(case, Layouts((2,)).build(), expected), host_memory=False)


def test_nothing_is_sent_for_plain_tensors_without_a_replica_group() -> None:
    case = Case((Param((5, 4), None), Param((4, 4), None), Param((4,), None, muon=False)))
    assert not run_case(case, Layouts((3,))).calls


def test_nothing_is_sent_for_whole_experts() -> None:
    case = Case((Param((8, 5, 4), 0, (S0,)), Param((4, 3, 3), 0, (S0,))))
    assert not run_case(case, Layouts((4,))).calls
