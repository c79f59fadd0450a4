"""Gradients that come and go on ranks of their own: when ranks compare notes, and one plan for all.

That every layout then has the bits of one device is a matter of ``test_cases.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshmuon import DistMuon, GradientError, Muon
from meshmuon.agree import planned_set
from meshmuon.agree.planned_set import PlannedSet
from tests.support.cases import Case, Param, build, gradient, initial, place, single
from tests.support.tensors import assert_bits, everything, local, same
from tests.support.threads import run_threads

from .test_dist_muon import SHAPES, seeded
from .test_dist_muon import build as build_dist

S0, R = Shard(0), Replicate()


class Trace:
    """The steps in which an optimizer compared notes with the other ranks, and those in which it prepared a plan."""

    def __init__(self, optimizer: Muon) -> None:
        self.step, self.compared, self.prepared = 0, list[int](), list[int]()
        planner, executor = optimizer._planner, optimizer._executor
        compare, prepare = planner._compare_notes, executor.prepare

        def comparing(*arguments: Any) -> Any:
            self.compared.append(self.step)
            return compare(*arguments)

        def preparing(*arguments: Any) -> None:
            self.prepared.append(self.step)
            prepare(*arguments)

        planner._compare_notes = comparing  # type: ignore[method-assign]
        executor.prepare = preparing  # type: ignore[method-assign]


Has = Callable[[int, int, int], bool]  # (rank, step, parameter): whether the rank has a gradient then
FOUR = tuple(Param((6, 5), 0, (S0,)) for _ in range(4))


def traced(
    case: Case, has: Has, world: int = 3, before: Callable[[Muon, int, int], None] | None = None
) -> list[tuple[list[int], list[int]]]:
    """Steps of comparisons and of preparations on each rank; every step is that of one device, with zeros for
    missing shards.
    """

    def whole(step: int, k: int) -> Tensor | None:
        value, holders = gradient(case, step, k), [rank for rank in range(world) if has(rank, step, k)]
        assert value is not None
        if case.params[k].mesh is not None:
            rows = value.chunk(world)  # as torch's Shard(0) does
            value = torch.cat([part * (rank in holders) for rank, part in enumerate(rows)])
        return value if holders else None

    alone = [nn.Parameter(value) for value in initial(case)]
    expected = []
    optimizer = build(case, alone)
    for step in range(case.steps):
        for k, param in enumerate(alone):
            param.grad = whole(step, k)
        optimizer.step()
        expected.append([param.detach().clone() for param in alone])

    def main(rank: int) -> tuple[list[int], list[int]]:
        mesh = init_device_mesh("cpu", (world,))
        params = [nn.Parameter(place(case, [mesh], k, value)) for k, value in enumerate(initial(case))]
        optimizer = build(case, params)
        trace = Trace(optimizer)
        for step in range(case.steps):
            trace.step = step
            if before is not None:
                before(optimizer, rank, step)
            for k, param in enumerate(params):
                value = gradient(case, step, k)
                assert value is not None
                param.grad = place(case, [mesh], k, value) if has(rank, step, k) else None
            optimizer.step()
            for k, param in enumerate(params):
                if case.params[k].mesh is not None:
                    same(local(param), local(place(case, [mesh], k, expected[step][k])), f"step {step}, parameter {k}")
        own = [tuple(step for step in range(case.steps) if not has(rank, step, k)) for k in range(len(case.params))]
        private = replace(
            case, params=tuple(replace(p, unused=steps) for p, steps in zip(case.params, own, strict=True))
        )
        for k, value in enumerate(single(private)[0]):
            if case.params[k].mesh is None:
                same(local(params[k]), value, f"parameter {k}, which only rank {rank} knows")
        return trace.compared, trace.prepared

    return run_threads(world, main)


# Steps, who has a gradient when, the steps in which all ranks compare notes, and those in which they prepare a plan.
TRACES: dict[str, tuple[int, Has, list[int], list[int]]] = {
    "all lack the same": (8, lambda rank, step, k: step == 0 or (step + k) % 3 != 0, [], [0]),
    # They compare when it begins to differ and when it stops; the plan stays.
    "one differs for a step": (8, lambda rank, step, k: not (rank == 1 and step == 3 and k < 2), [3, 4], [0]),
    "one differs for good": (8, lambda rank, step, k: not (rank == 1 and step >= 3 and k == 0), [3], [0]),
    # Once they differ, every change on any rank makes them compare: replicas might have come apart.
    "one differs while others come and go": (
        7,
        lambda rank, step, k: not (rank == 1 and k == 0) and (step < 4 or k != 2),
        [0, 4],
        [0],
    ),
    "a first gradient on one rank alone": (7, lambda rank, step, k: k > 0 or (step >= 2 and rank == 2), [2], [0, 2]),
}


@pytest.mark.parametrize("name", TRACES)
def test_when_ranks_compare_notes_and_plan(name: str) -> None:
    steps, has, compared, prepared = TRACES[name]
    assert traced(Case(FOUR, steps=steps), has) == [(compared, prepared)] * 3


def test_parameters_that_only_one_rank_knows() -> None:
    """They come and go without a word to the others, also while nothing else is stepped."""
    case = Case((*FOUR[:2], Param((5, 4), None), Param((5, 4), None)), {"chunk_size": 1}, steps=9)

    def has(rank: int, step: int, k: int) -> bool:
        return step == 0 or ((step + rank) % (k + 1) != 0 if k > 1 else step % 3 != k)

    assert traced(case, has) == [([], [0])] * 3


def test_a_rank_with_another_history() -> None:
    """A rank that has forgotten what it planned: all settle on what any of them has planned, and keep it."""

    def forget(optimizer: Muon, rank: int, step: int) -> None:
        local = optimizer._planner._local
        if rank == 1 and step == 3:
            assert local is not None
            local._planned = PlannedSet(local._planned.flops)

    ranks = traced(Case(FOUR, steps=7), lambda rank, step, k: step == 0 or k != 3, before=forget)
    assert {tuple(compared) for compared, _ in ranks} == {(3,)}
    assert [prepared for _, prepared in ranks] == [[0], [0, 3], [0]]  # it has planned anew; the others keep theirs


@pytest.mark.parametrize("differs", [False, True])
def test_all_ranks_leave_out_what_was_idle_for_long(differs: bool) -> None:
    """Also if the others lack gradients that one rank has at times, and if one has a gradient again just then."""

    def has(rank: int, step: int, k: int) -> bool:
        return step == 0 or k > 1 or (differs and k == 1 and rank == 2 and step in (3, 8)) or step == 10

    with patch.object(planned_set, "LONG_IDLE_STEPS", 5):
        ranks = traced(Case(FOUR, steps=12), has)
    if differs:  # number 0 leaves at step 6, number 1 stays until it is back for all
        assert ranks == [([3, 4, 8, 9], [0, 6, 10])] * 3
    else:
        assert ranks == [([], [0, 6, 10])] * 3


def test_replicas_still_need_equal_gradients() -> None:
    """Two replicas of each shard: one without a gradient would diverge. Nothing is written, and the next step is
    exact.
    """
    case = Case((Param((6, 5), 0, (R, S0)), Param((5, 5), 0, (R, S0))))

    def main(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2, 2))
        params = [nn.Parameter(place(case, [mesh], k, value)) for k, value in enumerate(initial(case))]
        optimizer = build(case, params, none_grad=False)
        for step, lacking in enumerate([(), (0,), ()]):
            for k, param in enumerate(params):
                value = gradient(case, step, k)
                assert value is not None
                param.grad = None if k in lacking else place(case, [mesh], k, value)
            optimizer.step()
        before = everything(optimizer)
        if rank == 3:
            params[0].grad = None
        for _ in range(2):
            with pytest.raises(GradientError, match="which hold the same elements") as caught:
                optimizer.step()
            assert_bits(everything(optimizer), before)
        return str(caught.value)

    texts = run_threads(4, main)
    assert len(set(texts)) == 1
    assert "has a gradient on rank 1 and none on rank 3" in texts[0]


def test_data_parallel_after_a_step_that_was_skipped() -> None:
    """A parameter that had its only gradient then has no state anywhere: that is no lost state."""

    def main(rank: int) -> None:
        params, optimizer = build_dist(DistMuon, SHAPES, nonfinite="skip")
        for step, active in enumerate([(0, 1), (0, 1, 2, 3), (0, 1), (0, 1, 2), (0, 1, 2, 3)]):
            for k, param in enumerate(params):
                param.grad = seeded(SHAPES[k], step, k, rank) if k in active else None
            if step == 1 and rank == 0:
                params[0].grad = torch.full(SHAPES[0], torch.nan)
            optimizer.step()
        assert optimizer.skipped_steps == 1
        assert len(optimizer.plan().params) == 4

    run_threads(2, main)


@pytest.mark.parametrize("loss", ["state", "rule memory", "loaded", "rounding"])
def test_state_that_is_missing_when_the_gradient_comes_back_on_another_rank(loss: str) -> None:
    """The rank without a gradient steps with zeros, and creates what its state lacks."""

    def main(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.ones(8, 6, dtype=torch.bfloat16)
        x, y = (nn.Parameter(distribute_tensor(whole, mesh, [S0], src_data_rank=None)) for _ in range(2))
        rule = "normuon" if loss == "rule memory" else "plain"
        optimizer = Muon([{"params": [("x", x), ("y", y)], "use_muon": True, "rule": rule}], lr=0.005)

        def step(*with_gradient: Tensor) -> None:
            for param in (x, y):
                param.grad = torch.ones_like(param) if any(param is other for other in with_gradient) else None
            optimizer.step()

        step(x, y)
        if loss == "state":
            optimizer.state.pop(x)
        elif loss == "rule memory":
            optimizer.state[x].pop("rule_memory")
        elif loss == "rounding":
            optimizer.param_groups[0]["rounding"] = "stochastic"
        else:
            saved = optimizer.state_dict()
            saved["state"][0] = {}
            optimizer.load_state_dict(saved)
        for _ in range(3):
            step(y)
        step(y, *([x] if rank == 0 else []))
        return sorted(optimizer.state[x])

    extra = {"rule memory": ["rule_memory"], "rounding": ["rounding_counter"]}.get(loss, [])
    assert run_threads(2, main) == [["momentum_buffer", *extra]] * 2


@pytest.mark.parametrize("on_all", [True, False], ids=["on all ranks", "on one rank"])
def test_dist_muon_starts_an_idle_parameter_from_zero_on_purpose(on_all: bool) -> None:
    """Its state was left out of what was loaded, and it is idle in the first step after that: nothing is lost."""

    def main(rank: int) -> str:
        params = [nn.Parameter(seeded((6, 4), k)) for k in range(4)]
        optimizer = DistMuon([{"params": params, "names": list("abcd"), "use_muon": True}], lr=0.01)

        def step(*with_gradient: int) -> None:
            for k, param in enumerate(params):
                param.grad = torch.ones_like(param) if k in with_gradient else None
            optimizer.step()

        step(0, 1, 2, 3)
        optimizer.consolidate()
        saved = optimizer.state_dict()
        saved["state"][0] = {}
        optimizer.load_state_dict(saved)
        step(1, 2)
        step(1, *([2] if rank == 0 else []))  # idle still, while ranks compare notes
        step(1, *([0] if on_all or rank == 0 else []))
        step(0, 1, 2, 3)
        return "stepped"

    run_threads(2, main)
