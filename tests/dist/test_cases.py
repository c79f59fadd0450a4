"""Layout × experts × split × rule × idle × offload × non-finite × dtype × prepare(): every rank ends with the bits of
one device.

One device, in turn, ends with the bits of each matrix as a parameter of its own. Cases are drawn; a list of layouts
with a model that has everything in it pins those that must never be left to chance.
"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import CostModel, Interleaved, Muon
from meshmuon.agree import planned_set
from meshmuon.agree.node_view import RANKS_PER_NODE
from meshmuon.optim import collect, nonfinite
from meshmuon.params.rules import resolve_rules
from meshmuon.plan import NO_WAVE, Plan
from meshmuon.tools.predict.calibration import Calibration, Rate
from tests.support.cases import (
    Case,
    Gradients,
    Held,
    Param,
    check,
    gradient,
    held_by,
    initial,
    place,
    run,
    sharded,
    single,
)
from tests.support.counting import Wire, counted
from tests.support.hostile import HostileArithmetic, fresh_trials
from tests.support.random_layouts import Layouts, cases
from tests.support.tensors import local, same
from tests.support.threads import run_threads
from tests.tools.predict.test_calibration import MEASURED

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
STRIDED = _StridedShard(0, split_factor=2)
GENERATE = (Phase.explicit, Phase.reuse, Phase.generate)
Drawn = tuple[Case, Layouts, bool]


def run_case(
    case: Case,
    layouts: Layouts,
    *,
    replica_group: bool = False,
    masked: bool = False,
    long_idle: int | None = None,
    **options: Any,
) -> Wire:
    """Runs a case on all ranks as threads. They send what the plan says, and plan anew when a matrix has its first
    gradient.

    Unless ``prepare()`` has planned it.
    With ``masked`` they decide on the device whether gradients are finite, as on GPUs. They leave out of the plan what
    has had no gradient for ``long_idle`` steps.
    """
    torch.set_num_threads(case.threads)
    case = replace(case, divided=replica_group)
    held = run_threads(layouts.world, lambda rank: held_by(case, layouts.build()))

    def main(rank: int) -> list[Any]:
        steps: list[Any] = []

        def watch(optimizer: Muon) -> None:
            if not case.spoilt and not options.get("use_distributed_muon"):
                steps.append((optimizer.plan(), wire.watch(optimizer)))

        check(case, layouts.build(), expected, held, watch=watch, **options)
        return steps

    with counted() as wire, ExitStack() as patches:
        for module in (nonfinite, collect) if masked else ():
            patches.enter_context(patch.object(module, "known_to_host", lambda tensor: False))
        expected = single(case, held)
        if long_idle is not None:
            patches.enter_context(patch.object(planned_set, "LONG_IDLE_STEPS", long_idle))
        ranks = run_threads(layouts.world, main)
    if ranks[0]:
        check_traffic(case, wire, ranks, held)
    # DistMuon that loads plans anew
    if ranks[0] and long_idle is None and not (case.averages and case.offload is not None):
        new = [False] * case.steps if case.prepares else first_gradients(case, held)
        for rank, steps in enumerate(ranks):
            assert [plan is not before for (before, _), (plan, _) in pairwise(steps)] == new[1:], f"rank {rank}"
    return wire


def first_gradients(case: Case, held: Held) -> list[bool]:
    """For each step, whether some matrix has its first gradient then."""
    seen: set[int] = set()
    new = []
    for step in range(case.steps):
        active = Gradients(case, held).active(step)
        new.append(not active <= seen)
        seen |= active
    return new


def check_traffic(case: Case, wire: Wire, ranks: list[list[Any]], held: Held) -> None:
    """Ranks send what their plans say, in two calls per wave: what an owner lacks, and what others hold of its
    matrices.
    """
    # not in the plan
    if case.averages or any(rule.remembers() for rule in resolve_rules(case.options.get("rule", "plain"))):
        return
    for rank in range(len(ranks)):
        wire.check(rank)
    moved = 0
    for step in range(case.steps):
        plans = {steps[step][0].ranks: steps[step] for steps in ranks}  # one of those that ranks share
        for plan, waves in plans.values():
            moved += sum(elements_that_must_move(case, plan, task, held) for task in plan.tasks if task.wave in waves)
    assert sum(wire.elements.values()) == moved
    for rank, steps in enumerate(ranks):
        assert wire.calls.get(rank, 0) == sum(2 * len(waves - {NO_WAVE}) for _, waves in steps), f"rank {rank}"


def elements_that_must_move(case: Case, plan: Plan, task: Any, held: Held) -> int:
    """From torch's own shards and the owner alone."""
    names = [param.name for param in plan.params]  # once for each part of a fused weight
    name = names[task.param]
    k, number = int(name.split(".")[1]), task.matrix * names.count(name) + names[: task.param].count(name)
    shape = case.params[k].shape
    matrix = parts(case, k, torch.arange(math.prod(shape)).reshape(shape))[number].flatten()
    count = {rank: int(torch.isin(held[rank][k], matrix).sum()) for rank in task.sharded.holdings}
    assert all(count.values()), "a rank that holds nothing of a matrix takes part in it"
    if task.wave == NO_WAVE:
        assert set(count.values()) == {len(matrix)}
        return 0
    return len(matrix) - count.get(task.owner, 0) + sum(held for rank, held in count.items() if rank != task.owner)


def parts(case: Case, k: int, whole: Tensor) -> list[Tensor]:
    """Every matrix in parameter ``k``, by torch's views alone; experts of shape (in, out) as stacks of one.

    Products of a transposed matrix are rounded differently.
    """
    param = case.params[k]
    stack = list(whole.split(1)) if param.flipped else list(whole) if whole.dim() == 3 else [whole]
    dim = 2 if param.flipped else 0
    outputs = stack[0].size(dim)
    split = (param.split,) * (outputs // param.split) if isinstance(param.split, int) else param.split
    split = split if isinstance(split, Interleaved) else Interleaved(split or (outputs,), 1)
    found = []
    for matrix in stack:
        copies = matrix.unflatten(dim, (split.repeats, sum(split.sizes)))
        found += [copy.flatten(dim, dim + 1) for copy in copies.split(list(split.sizes), dim + 1)]
    return [part if param.flipped else part.flatten(1) for part in found]


def check_parts(case: Case) -> None:
    """On one device each matrix steps as it does in an optimizer of its own."""
    values, states = single(case)
    options = {key: value for key, value in case.options.items() if key != "conv"}
    for k, param in enumerate(case.params):
        if not param.muon:
            continue
        grads = [gradient(case, step, k) for step in range(case.steps)]
        cut = [None if grad is None else parts(case, k, grad) for grad in grads]
        wanted, momentum = parts(case, k, values[k]), states[k].get("momentum_buffer")
        for j, start in enumerate(parts(case, k, initial(case)[k])):
            alone = replace(case, options=options, params=(replace(param, shape=tuple(start.shape), split=None),))
            own_grads = [None if matrices is None else matrices[j].clone() for matrices in cut]
            own_param = nn.Parameter(start.clone(), requires_grad=not param.frozen)
            (value,), (state,), _ = run(alone, [own_param], lambda step, _, own_grads=own_grads: own_grads[step])
            same(value, wanted[j], f"matrix {j} of parameter {k}")
            if momentum is not None:
                same(state["momentum_buffer"], parts(case, k, momentum)[j], f"momentum of matrix {j} of parameter {k}")


LONG_IDLE = st.sampled_from([None, None, 1])


@settings(max_examples=50, phases=GENERATE)
@given(cases(events=True), st.booleans(), LONG_IDLE)
def test_any_case_equals_one_device(drawn: Drawn, masked: bool, long_idle: int | None) -> None:
    case, layouts, replica_group = drawn
    run_case(case, layouts, replica_group=replica_group, masked=masked, long_idle=long_idle)


@settings(max_examples=20, phases=GENERATE)
@given(cases(events=True, averages=True), st.booleans(), LONG_IDLE)
def test_any_case_of_dist_muon_equals_one_device(drawn: Drawn, masked: bool, long_idle: int | None) -> None:
    """Every rank has gradients of its own; one device steps with their average."""
    case, layouts, _ = drawn
    run_case(case, layouts, masked=masked, long_idle=long_idle)


@pytest.mark.parametrize("rule", ["plain", "normuon"])
def test_owners_of_dist_muon_change(rule: str) -> None:
    """Larger matrices come in later steps: who owned a matrix hands its momentum over."""
    late = ((), (0,), (0, 1), (0, 1, 2))
    params = tuple(Param((4 + 3 * k + j, 5 + 2 * k), None, unused=late[k]) for k in range(4) for j in range(3))
    run_case(Case(params, {"rule": rule}, 5, averages=True), Layouts((3,)))


@settings(max_examples=30, phases=GENERATE)
@given(cases())
def test_each_matrix_of_any_case_equals_a_parameter_of_its_own(drawn: Drawn) -> None:
    case, _, _ = drawn
    # whose bits follow the parameter
    options = {key: value for key, value in case.options.items() if key != "rounding"}
    check_parts(replace(case, options=options, spoilt=(), threads=1))


# links between nodes are slower, faster, equal
NODES = [CostModel(0.0, 1.0, 1e6, 1e3), CostModel(1e6, 1e3, 0.0, 1.0), None]


@settings(max_examples=24, phases=GENERATE)
@given(cases(events=True), st.data(), st.sampled_from(NODES))
def test_random_nodes_change_no_bit(drawn: Drawn, data: st.DataObject, cost: CostModel | None) -> None:
    """Pretended nodes of any sizes."""
    case, layouts, replica_group = drawn
    edges = (
        sorted(data.draw(st.sets(st.integers(1, layouts.world - 1), min_size=1, max_size=3)))
        if layouts.world > 1
        else []
    )
    sizes = [stop - start for start, stop in pairwise([0, *edges, layouts.world])]
    options = {**case.options, "cost_model": cost}
    with patch.dict(os.environ, {RANKS_PER_NODE: ",".join(map(str, sizes))}):
        run_case(replace(case, options=options), layouts, replica_group=replica_group)


RATES = [MEASURED, replace(MEASURED, orthogonalisation=(Rate("float32", 16, 1e6),)), replace(MEASURED, between=None)]


@settings(max_examples=24, phases=GENERATE)
@given(cases(events=True), st.sampled_from(RATES))
def test_measured_rates_change_no_bit(drawn: Drawn, rates: Calibration) -> None:
    case, layouts, replica_group = drawn
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}  # which decides alone
    run_case(replace(case, options={**options, "cost_model": rates.cost_model()}), layouts, replica_group=replica_group)


@settings(max_examples=5, phases=GENERATE)
@given(cases())
def test_any_case_on_the_reference_path(drawn: Drawn) -> None:
    """torch gathers the matrices there; what its gather does to strided shards is a matter of
    ``reference_layouts.py``.
    """
    case, layouts, _ = drawn
    if not any("Strided" in repr(placement) for param in case.params for placement in param.placements):
        run_case(case, layouts, use_distributed_muon=True)


@settings(max_examples=20, phases=GENERATE)
@given(cases(steps=3))
def test_any_case_with_bfloat16_on_the_wire(drawn: Drawn) -> None:
    """Momentum and matrices that do not travel have the bits of one device, and replicas stay equal."""
    case, layouts, replica_group = drawn
    options = {**case.options, "comm_dtype": torch.bfloat16, "rounding": "nearest"}
    params = tuple(replace(param, dtype=torch.float32) for param in case.params)
    case = replace(case, params=params, options=options, spoilt=(), threads=1, divided=replica_group)
    expected = single(case)

    def main(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        meshes, travels = layouts.build(), set[int]()

        def watch(optimizer: Muon) -> None:
            names = [param.name for param in optimizer.plan().params]
            travels.update(
                int(names[task.param].split(".")[1]) for task in optimizer.plan().tasks if task.wave != NO_WAVE
            )

        values, states, _ = sharded(case, meshes, watch=watch)
        for k, param in enumerate(case.params):
            if k not in travels:
                same(values[k], local(place(case, meshes, k, expected[0][k])), f"parameter {k}")
            if param.muon and "momentum_buffer" in expected[1][k]:
                same(
                    states[k]["momentum_buffer"],
                    local(place(case, meshes, k, expected[1][k]["momentum_buffer"])),
                    f"momentum {k}",
                )
        return values, held_by(case, meshes)

    ranks = run_threads(layouts.world, main)
    for k, param in enumerate(case.params):
        replicas: dict[tuple[int, ...], Tensor] = {}
        for rank, (values, held) in enumerate(ranks):
            # slices and plain tensors may be of ranks that do not know of each other
            if param.mesh == 0 or replica_group:
                same(
                    values[k], replicas.setdefault(tuple(held[k].tolist()), values[k]), f"parameter {k} on rank {rank}"
                )


def run_hostile(case: Case, layouts: Layouts, *, company: bool = False) -> None:
    """Runs a case on one device and on all ranks on a machine that rounds by address, or by the size of a batch."""

    def main(rank: int) -> None:
        with HostileArithmetic(company=company):
            check(case, layouts.build(), expected, held)

    held = run_threads(layouts.world, lambda rank: held_by(case, layouts.build()))
    with fresh_trials():
        with HostileArithmetic(company=company):
            expected = single(case, held)
        run_threads(layouts.world, main)


@settings(max_examples=12, phases=GENERATE)
@given(cases(steps=2), st.booleans())
def test_any_case_where_products_round_by_address_or_company(drawn: Drawn, company: bool) -> None:
    case, layouts, replica_group = drawn
    deterministic = {**case.options, "deterministic": company or case.options["deterministic"]}
    # Without offload, which takes it that memory of its own begins where its storage does.
    case = replace(case, options=deterministic, misplaced=not company, threads=1, offload=None, divided=replica_group)
    run_hostile(case, layouts, company=company)


def test_the_hostile_machine_tells_batches_apart() -> None:
    """Without ``deterministic`` three equal matrices on three ranks differ there from the same in one batch."""
    case = Case(tuple(Param((8, 16), 0, (S0,)) for _ in range(3)), steps=1)
    with pytest.raises(AssertionError, match="parameter"):
        run_hostile(case, Layouts((3,)), company=True)


# Named layouts, each with a model that has everything in it.

EXPERTS_OUT_IN = Param((5, 10, 7), split=(3, 7))
EXPERTS_IN_OUT = Param((4, 3, 18), split=Interleaved((2, 4), 3), flipped=True)
MATRICES = (
    Param((7, 5)),
    Param((3, 8), unused=(0,)),
    Param((18, 6), split=(8, 4, 6), unused=(1,)),
    Param((12, 5), split=4),
    Param((30, 4), split=Interleaved((6, 2, 2), 3)),
    Param((8, 3, 3, 2), split=(2, 6)),
    Param((4, 5), frozen=True),
    Param((11,), muon=False),
    Param((5, 3), muon=False, unused=(1,)),
)


def model(
    placements: tuple[Any, ...], of_experts: tuple[Any, ...] | None = None, mesh: int | None = 0
) -> tuple[Param, ...]:
    """``placements`` of tensors with two dims or more; those of experts are one dim further unless given."""

    def moved(placement: Any, by: int) -> Any:
        return Shard(placement.dim + by) if placement.is_shard() else placement

    inside = tuple(_StridedShard(1, split_factor=2) if one == STRIDED else moved(one, 1) for one in placements)
    on_vectors = tuple(S0 if one == S1 else one for one in placements)
    matrices = [
        replace(one, mesh=mesh, placements=on_vectors if len(one.shape) == 1 else placements) for one in MATRICES
    ]
    experts = [replace(one, mesh=mesh, placements=of_experts or inside) for one in (EXPERTS_OUT_IN, EXPERTS_IN_OUT)]
    return (*matrices, *experts)


LAYOUTS: dict[str, tuple[Layouts, tuple[Param, ...], dict[str, Any]]] = {
    "plain": (Layouts((2,)), model((), (), None), {}),
    "DDP, divided": (Layouts((3,)), model((), (), None), {"replica_group": True}),
    "replicated, shared": (Layouts((3,)), model((R,)), {"replicas": "share"}),
    "replicated, repeated": (Layouts((2, 2)), model((R, R)), {"replicas": "repeat"}),
    "FSDP2, even": (Layouts((2,)), model((S0,), (S0,)), {}),
    "FSDP2, uneven": (Layouts((5,)), model((S0,)), {"chunk_size": 3}),
    "FSDP2, more ranks than rows": (Layouts((8,)), model((S0,)), {"chunk_size": 4, "warmup_step": 0}),
    "HSDP, shared": (Layouts((2, 3)), model((R, S0)), {"replicas": "share"}),
    "HSDP, repeated": (Layouts((2, 2)), model((R, S0)), {"replicas": "repeat"}),
    "TP by columns": (Layouts((3,)), model((S1,)), {"memory_budget": 1}),
    "TP by rows and FSDP2": (Layouts((2, 2)), model((STRIDED, S0)), {}),
    "TP by columns and FSDP2": (Layouts((2, 3)), model((S0, S1)), {"warmup_step": 0}),
    "2 TP × 2 replicate × 2 shard": (Layouts((2, 2, 2)), model((R, S0, S1)), {}),
    "EP": (Layouts((4,)), model((S0,), (S0,)), {}),
    "EP, fewer experts than ranks": (Layouts((8,)), model((S1,), (S0,)), {}),
    "EP × FSDP": (Layouts((2, 2)), model((STRIDED, S0), (STRIDED, S0)), {}),
    "EP × FSDP on rows": (Layouts((2, 3)), model((S0, S0), (S1, S0)), {}),
    "EP × TP by rows": (Layouts((2, 3)), model((S0, S1), (S0, S1)), {}),
    "EP × TP by columns": (Layouts((2, 2)), model((S0, S1), (S0, S2)), {}),
    "EP × TP × FSDP": (Layouts((2, 2, 2)), model((S1, S0, R), (S1, S0, S2)), {}),
    "HSDP with EP, shared": (Layouts((2, 2, 2)), model((R, S0, S1), (R, S1, S0)), {"replicas": "share"}),
    "two meshes": (Layouts((2, 3), ("flat",)), (*model((S0, S1)), *model((S0,), (S0,), 1)), {}),
    "slices": (Layouts((2, 3), ("a", "b")), (*model((S0,), (S0,), 1), *model((S1,), (S2,), 2)), {}),
    "slices alone": (Layouts((2, 2), ("a",)), model((S0,), (S1,), 1), {}),
    "plain tensors beside shards": (Layouts((3,)), (*model((S0,)), *model((), (), None)), {}),
}
EVERYTHING = {
    "rule": ["muoneq", "muon_plus", "normuon"],
    "maximize": True,
    "cautious_weight_decay": True,
    "nonfinite": "skip",
    "rounding": "stochastic",
}


def named(layout: str, *, everything: bool) -> Drawn:
    """A case of three steps; with ``everything`` a rule that remembers, offload, a NaN in one step, and weights of
    16 bits.
    """
    layouts, params, options = LAYOUTS[layout]
    events: dict[str, Any] = {"offload": 1, "spoilt": ((2, 0),), "prepares": True} if everything else {}
    options = {"conv": "flatten", **options, **(EVERYTHING if everything else {})}
    if everything:
        params = tuple(param if k % 3 else replace(param, dtype=torch.bfloat16) for k, param in enumerate(params))
    return Case(params, options, 3, **events), layouts, options.pop("replica_group", False)


@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_named_layouts_equal_one_device(layout: str, everything: bool) -> None:
    case, layouts, replica_group = named(layout, everything=everything)
    run_case(case, layouts, replica_group=replica_group, masked=list(LAYOUTS).index(layout) % 2 == 1)


@pytest.mark.parametrize("rule", ["plain", "normuon"])
def test_each_matrix_of_the_model_equals_a_parameter_of_its_own(rule: str) -> None:
    case, _, _ = named("plain", everything=False)
    check_parts(replace(case, options={**case.options, "rule": rule}))


@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
@pytest.mark.parametrize("layout", ["HSDP, shared", "FSDP2, uneven", "EP × TP by columns"])
def test_the_reference_path_equals_one_device(layout: str, everything: bool) -> None:
    case, layouts, _ = named(layout, everything=everything)
    assert not run_case(case, layouts, use_distributed_muon=True).calls, (
        "it must not use the exchanges that it verifies"
    )


@pytest.mark.parametrize("ahead", [0, 1, 5])
@pytest.mark.parametrize("idle", [(1,), (0, 2, 4), (1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5, 6)], ids=str)
def test_waves_without_gradients_keep_their_turn(ahead: int, idle: tuple[int, ...]) -> None:
    """One matrix per wave: waves that are in flight together must not use the same buffers when one between them is
    skipped.
    """
    params = tuple(Param((6, 5), 0, (S0,), unused=(1, 2) if k in idle else ()) for k in range(7))
    run_case(Case(params, {"chunk_size": 1, "warmup_step": ahead}, 4), Layouts((3,)))


@pytest.mark.parametrize("rows", [2, 6])  # smaller matrices travel before the fused one's part, larger ones after it
@pytest.mark.parametrize("position", [0, 5])
@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_parts_that_stay_and_parts_that_travel_share_one_momentum(ahead: int, position: int, rows: int) -> None:
    """Momentum is taken once per parameter, by whichever comes first: a wave, or the matrices that need no exchange."""
    params = [Param((rows, 5), 0, (S0,)) for _ in range(5)]
    params.insert(position, Param((12, 5), 0, (S0,), split=(4, 4, 4)))
    run_case(Case(tuple(params), {"chunk_size": 1, "warmup_step": ahead}, 3), Layouts((2,)))


EP_OF_FSDP = (STRIDED, S0)


@pytest.mark.parametrize(
    ("shape", "params"),
    [
        ((4,), (Param((5, 4), None), Param((4,), None, muon=False))),
        ((3,), (Param((8, 5, 4), 0, (S0,)), Param((7, 4, 6), 0, (S0,)), Param((1, 4, 6), 0, (S0,)))),
        ((8,), (Param((3, 5, 4), 0, (S0,)),)),
        ((3, 2), (Param((10, 5, 4), 0, EP_OF_FSDP),)),
        ((2, 3), (Param((7, 5, 4), 0, (S0, S0)),)),
    ],
    ids=str,
)
def test_nothing_is_sent_for_plain_tensors_and_whole_experts(shape: tuple[int, ...], params: tuple[Param, ...]) -> None:
    assert not run_case(Case(params), Layouts(shape)).calls


@pytest.mark.parametrize("muon", [True, False])
def test_local_tensors_in_column_major_order(muon: bool) -> None:
    """Some wrappers keep transposed weights; the update has the same bits as that of a whole that is transposed too."""
    case = Case(tuple(Param(shape, 0, (S0,), muon=muon) for shape in ((6, 5), (9, 7), (37, 3), (1, 19))))

    def turned(value: Tensor) -> Tensor:
        return value.t().contiguous().t()

    def main(rank: int) -> None:
        mesh = Layouts((3,)).build()[0]
        params = []
        for k, value in enumerate(initial(case)):
            shard = place(case, [mesh], k, value)
            whole = {"shape": shard.shape, "stride": (1, shard.size(0))}
            params.append(nn.Parameter(DTensor.from_local(turned(local(shard)), mesh, [S0], run_check=False, **whole)))
        with HostileArithmetic():
            found, _, _ = run(case, params, lambda step, k: place(case, [mesh], k, gradient(case, step, k)))  # type: ignore[arg-type]
        for k in range(len(case.params)):
            same(found[k], local(place(case, [mesh], k, expected[k])), f"parameter {k}")

    with fresh_trials():
        with HostileArithmetic():
            whole = [nn.Parameter(turned(value)) for value in initial(case)]
            expected, _, _ = run(case, whole, lambda step, k: gradient(case, step, k))
        run_threads(3, main)


@pytest.mark.parametrize("what", [0, 1])
def test_the_comparison_sees_one_wrong_bit(what: int) -> None:
    case = Case((Param((7, 5), 0, (S0,)),))
    expected = single(case)
    wrong = expected[1][0]["momentum_buffer"] if what else expected[0][0]
    wrong[6, 4] = torch.nextafter(wrong[6, 4], torch.tensor(torch.inf))
    with pytest.raises(AssertionError, match="momentum_buffer of parameter 0" if what else "parameter 0"):
        run_threads(2, lambda rank: check(case, Layouts((2,)).build(), expected))


def test_groups_that_cannot_move_host_memory() -> None:
    """As NCCL's: meshmuon agrees over groups of its own."""
    case = Case((Param((7, 5), 0, (S0,)),))
    expected = single(case)
    run_threads(2, lambda rank: check(case, Layouts((2,)).build(), expected), host_memory=False)
