"""All ranks of random plans, built and run in this one process: the exact numbers of one device, without a process group.

Numbers are small binary fractions and the "orthogonalisation" is a prefix sum over rows and columns, so that every result is
exact and depends on where each element was: one element out of place, and another number comes out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshmuon.execute import ExecutorSettings, RunningStep, StepParam, StepSettings
from meshmuon.execute.build import RankProgram, RankProgramBuilder
from meshmuon.execute.executor import run_pipeline
from meshmuon.layout import Layout, Mesh
from meshmuon.matrices import MatrixSet
from meshmuon.ortho import Workspace
from meshmuon.plan import NO_WAVE, Plan, PlannedParam, PlanOptions, cost_model_for, make_plan
from tests.support.layouts import ours, random_mesh, random_placement, random_shape, select

STEPS = 2
KINDS = [(0, 2), (0, 2), (0, 3), (0, 4), (1, 3), (1, 3)]


def prefix_sums(batch: Tensor) -> Tensor:
    return batch.cumsum(1).cumsum(2)


@dataclass
class Board:
    """All exchanges of all ranks: the n-th of each rank belong together."""

    ranks: tuple[int, ...]
    late: bool  # elements move when the first rank waits, else when the last one starts
    calls: dict[int, list[tuple[Tensor, list[int], Tensor, list[int]]]] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)

    def move(self, n: int) -> None:
        if n in self.moved:
            return
        self.moved.add(n)
        all_calls = [self.calls[rank][n] for rank in self.ranks]  # every rank has started it
        for received, received_splits, sent, sent_splits in all_calls:
            assert (received.numel(), sent.numel()) == (sum(received_splits), sum(sent_splits))
        incoming = [received.split(splits) for received, splits, _, _ in all_calls]
        for a, (_, _, sent, sent_splits) in enumerate(all_calls):
            assert sent_splits[a] == 0  # nothing is sent to oneself
            assert sent_splits == [splits[a] for _, splits, _, _ in all_calls]
            for b, part in enumerate(sent.split(sent_splits)):
                if sent_splits[b]:
                    incoming[b][a].copy_(part)


class Pending:
    def __init__(self, board: Board, n: int) -> None:
        self._board, self._n = board, n

    def wait(self) -> None:
        self._board.move(self._n)


@pytest.fixture(autouse=True, scope="module")
def schemes_of_the_library() -> Iterator[None]:
    """The callables here stand in for schemes of the library, which do not fail."""
    with patch.object(StepParam, "fallible", False):
        yield


class Exchange:
    """The exchange of one rank, as ``transport.Exchange`` has it."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        board.calls[rank] = []

    def splits(self, counts: dict[int, int]) -> list[int]:
        assert set(counts) <= set(self._board.ranks)
        return [counts.get(rank, 0) for rank in self._board.ranks]

    def start(self, received: Tensor, received_splits: list[int], sent: Tensor, sent_splits: list[int], *, phase: str) -> Pending:
        received.fill_(float("nan"))  # what was there is lost from now on
        mine = self._board.calls[self._rank]
        mine.append((received, received_splits, sent, sent_splits))
        n = len(mine) - 1
        if not self._board.late and all(len(calls) > n for calls in self._board.calls.values()):
            self._board.move(n)
        return Pending(self._board, n)


@dataclass(frozen=True)
class Case:
    seed: int
    plan: Plan
    chunk_size: int
    memory_budget: int


def build_case(seed: int) -> Case:
    rng = random.Random(seed)
    mesh = random_mesh(rng)
    entries = []
    for k in range(rng.randint(1, 6)):
        stack_dims, dims = rng.choice(KINDS)
        if rng.random() < 0.15:
            mesh = random_mesh(rng)
        meshes = [mesh]
        if rng.random() < 0.15:  # the same parameter on a sibling mesh
            meshes.append(Mesh(mesh.shape, tuple(100 + rank for rank in mesh.ranks)))
        placements = tuple(ours(random_placement(rng, dims)) for _ in mesh.shape)
        shape = random_shape(rng, dims)
        layouts = tuple(Layout(shape, one, placements) for one in meshes)
        wire = rng.choice([4, 8, 8])
        entries.append(PlannedParam(f"p{k}", layouts, stack_dims, ("cpu", wire), wire, rng.choice([0, 100, 10_000_000])))
        if rng.random() < 0.5:  # another one like it
            entries.append(replace(entries[-1], name=f"q{k}"))
    options = PlanOptions(
        cost_model_for("cpu"),
        rng.choice(["auto", "share", "repeat"]),
        rng.choice([-1, -1, 1, 2, 5]),
        rng.choice([1, 500, 2**20]),
        rng.randint(1, 6),
    )
    return Case(seed, make_plan(entries, options), rng.choice([-1, 1, 3]), rng.choice([1, 1000, 2**20]))


def numbers(shape: Sequence[int], *key: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return torch.randint(-3, 4, tuple(shape), generator=generator).double()


def settings_of(k: int) -> StepSettings:
    return StepSettings(
        momentum=0.5 if k % 2 else 0.25,
        retain=0.5 if k % 2 else 0.25,
        nesterov=k % 3 != 0,
        decay=0.5,
        rate=0.5,
        adjust=lambda rows, cols: 1.0 if rows > cols else 2.0,
        free_grad=k % 4 != 0,
    )


def work_of(entry: PlannedParam, k: int, param: Tensor, buffer: Tensor) -> StepParam:
    rows, cols = entry.layouts[0].shape[entry.stack_dims], 1
    for size in entry.layouts[0].shape[entry.stack_dims + 1 :]:
        cols *= size
    matrix_set = MatrixSet(entry.count, rows, cols, entry.stack_dims)
    wire = torch.float32 if entry.itemsize == 4 else torch.float64
    return StepParam(
        nn.Parameter(param), buffer, matrix_set, prefix_sums, torch.float64, settings_of(k), comm_dtype=wire, group_index=k
    )


def expected(case: Case, k: int, sibling: int) -> tuple[Tensor, Tensor]:
    """Parameter and momentum after all steps, written plainly."""
    entry, numbers_of = case.plan.params[k], settings_of(k)
    shape = entry.layouts[sibling].shape
    param, buffer = numbers(shape, case.seed, k, sibling), torch.zeros(shape, dtype=torch.float64)
    for step in range(STEPS):
        grad = numbers(shape, case.seed, k, sibling, step)
        buffer = numbers_of.momentum * buffer + grad
        update = grad + numbers_of.momentum * buffer if numbers_of.nesterov else buffer
        if update.numel():
            stacked = update.reshape(entry.count, shape[entry.stack_dims], -1)
            update = prefix_sums(stacked).reshape(shape)
            factor = numbers_of.adjust(stacked.size(1), stacked.size(2))
            param = 0.5 * param - 0.5 * factor * update
    return param, buffer


def held(case: Case, k: int, rank: int, values: Sequence[Tensor]) -> Tensor:
    """What ``rank`` holds of a parameter whose values on each sibling mesh are ``values``."""
    layouts = case.plan.params[k].layouts
    sibling = next((s for s, layout in enumerate(layouts) if rank in layout.mesh.ranks), 0)
    return select(values[sibling], layouts[sibling].held_ranges(rank))


class Ranks:
    """Every rank's work and program."""

    def __init__(self, case: Case) -> None:
        self.case, plan = case, case.plan
        self.board = Board(plan.ranks, late=case.seed % 2 == 0)
        self.step_params: dict[int, list[StepParam]] = {}
        self.programs: dict[int, RankProgram] = {}
        self.exchanges: dict[int, Exchange] = {}
        self.workspaces: dict[int, Workspace] = {}
        for rank in plan.ranks:
            params = [held(case, k, rank, self.initial(k)) for k in range(len(plan.params))]
            self.step_params[rank] = [
                work_of(entry, k, params[k], torch.zeros_like(params[k])) for k, entry in enumerate(plan.params)
            ]
            self.exchanges[rank], self.workspaces[rank] = Exchange(self.board, rank), Workspace()
            options = ExecutorSettings(case.chunk_size, case.memory_budget)
            builder = RankProgramBuilder(plan, rank, self.step_params[rank], self.exchanges[rank], self.workspaces[rank], options)
            self.programs[rank] = builder.build()

    def initial(self, k: int) -> list[Tensor]:
        entry = self.case.plan.params[k]
        return [numbers(layout.shape, self.case.seed, k, s) for s, layout in enumerate(entry.layouts)]

    def step(self, number: int) -> None:
        plan = self.case.plan
        for k, entry in enumerate(plan.params):
            grads = [numbers(layout.shape, self.case.seed, k, s, number) for s, layout in enumerate(entry.layouts)]
            for rank in plan.ranks:
                self.step_params[rank][k].param.grad = held(self.case, k, rank, grads)
        steps = {rank: RunningStep(self.step_params[rank], exchange=self.exchanges[rank]) for rank in plan.ranks}  # type: ignore[arg-type]
        waves = {rank: [wave.run(steps[rank]) for wave in program.waves] for rank, program in self.programs.items()}

        def together(n: int) -> Iterator[None]:
            """Wave n of all ranks: the pipeline's order depends on the number of waves alone, which is the same on all."""
            for rank in plan.ranks:
                next(waves[rank][n])
                self.check_freed(rank, n)
            yield
            for rank in plan.ranks:
                next(waves[rank][n])
            yield
            for rank in plan.ranks:
                assert list(waves[rank][n]) == []

        def local() -> None:
            for rank, program in self.programs.items():
                for batch in program.local:
                    batch.run(steps[rank])

        run_pipeline(list(map(together, range(len(plan.wave_lanes)))), plan.options.in_flight, local, lambda: None)
        for rank, program in self.programs.items():
            steps[rank].free_gradients(program.freed_at_end)

    def check_freed(self, rank: int, wave: int) -> None:
        """After the gather of a wave, gradients that only this wave and earlier ones read are gone, where that is asked for."""
        readers: dict[int, set[int]] = {}
        for task in self.case.plan.tasks:
            if rank in task.sharded.holdings:
                readers.setdefault(task.param, set()).add(task.wave)
        for param, waves in readers.items():
            if NO_WAVE not in waves:
                step_param = self.step_params[rank][param]
                assert (step_param.param.grad is None) == (step_param.settings.free_grad and max(waves) <= wave)


cases = st.integers(0, 2**32).map(build_case)


@settings(max_examples=80)
@given(cases)
def test_the_numbers_of_one_device(case: Case) -> None:
    with torch.no_grad():
        ranks = Ranks(case)
        for step in range(STEPS):
            ranks.step(step)
        for k, entry in enumerate(case.plan.params):
            wanted = [expected(case, k, sibling) for sibling in range(len(entry.layouts))]
            for rank in case.plan.ranks:
                step_params = ranks.step_params[rank][k]
                assert torch.equal(step_params.momentum, held(case, k, rank, [buffer for _, buffer in wanted])), (k, rank)
                assert torch.equal(step_params.param, held(case, k, rank, [param for param, _ in wanted])), (k, rank)
                assert (step_params.param.grad is None) == step_params.settings.free_grad
    assert len(ranks.board.moved) == 2 * STEPS * len(case.plan.wave_lanes)


@settings(max_examples=80)
@given(cases)
def test_buffers_are_what_the_plan_says(case: Case) -> None:
    with torch.no_grad():
        ranks = Ranks(case)
    for rank in case.plan.ranks:
        flat = ranks.workspaces[rank]._flat
        found = {key: tensor for key, tensor in flat.items() if key[0].split()[0] in ("shards", "gathered", "results")}
        assert sum(tensor.nbytes for tensor in found.values()) == case.plan.buffer_bytes(rank)


def test_the_random_plans_are_of_every_kind() -> None:
    plans = [build_case(seed).plan for seed in range(300)]
    tasks = [(plan, task) for plan in plans for task in plan.tasks]
    assert sum(len(plan.wave_lanes) > plan.options.in_flight for plan in plans) > 20
    assert sum(len(set(plan.wave_lanes)) > 1 for plan in plans) > 40
    assert sum(task.wave != NO_WAVE and task.sharded.replicas > 1 for _, task in tasks) > 40
    assert sum(task.wave == NO_WAVE and task.sharded.replicas > 1 for _, task in tasks) > 10
    assert sum(len(plan.params[task.param].layouts) > 1 for plan, task in tasks) > 40
    assert sum(any(len(piece.rows) > 1 or len(piece.cols) > 1 for piece in task.sharded.pieces) for _, task in tasks) > 40
