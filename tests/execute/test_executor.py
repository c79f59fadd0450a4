"""The executor on one rank: learning rates that stay tensors, plans that are kept, gradients freed at the right time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from meshmuon import Muon
from meshmuon.device import DirectStreams
from meshmuon.errors import TransportError
from meshmuon.execute import DataParallelExecutor, Executor, ExecutorSettings, StepParam, StepSettings, program_builder
from meshmuon.execute import executor as executors
from meshmuon.execute import ortho_batch as stages
from meshmuon.execute.build import RankProgram, RankProgramBuilder
from meshmuon.layout import Layout, Mesh, Replicated
from meshmuon.matrices import MatrixSet
from meshmuon.ortho import Orthogonalizer, Scheme, Workspace, keller
from meshmuon.plan import Plan, PlannedParam, PlanOptions, cost_model_for, make_plan
from tests.support.bounds import sum_error, unit
from tests.support.reference import (
    LR,
    Reference,
    assert_moved_within_rounding,
    assert_same_bits,
    copies,
    gradients,
    group,
    make_params,
    run,
    set_gradients,
)

pytestmark = pytest.mark.usefixtures("no_grad")  # as in an optimizer's step


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def nothing() -> None: ...


def settings_for(lr: float | Tensor, *, weight_decay: float = 0.1, **options: Any) -> StepSettings:
    numbers = {"momentum": 0.95, "nesterov": True, "free_grad": False, "adjust": lambda rows, cols: 0.2 * max(rows, cols) ** 0.5}
    numbers["retain"] = options.get("momentum", numbers.get("momentum"))
    return StepSettings(**{**numbers, "decay": 1 - lr * weight_decay, "rate": lr, **options})


def work_on(
    params: list[Any], settings: StepSettings, buffers: list[Tensor], step: int, scheme: Scheme | Orthogonalizer | None = None
) -> list[StepParam]:
    """The work of one step with the fixed gradients of ``step``."""
    set_gradients(params, gradients(params, step))
    step_params = []
    for param, buffer in zip(params, buffers, strict=True):
        matrix_set = MatrixSet(*param.shape, stack_dims=1) if param.dim() == 3 else MatrixSet(1, *param.shape)
        dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
        step_params.append(StepParam(param, buffer, matrix_set, scheme or keller(5), dtype, settings, comm_dtype=dtype))
    return step_params


def plan_for(step_params: list[StepParam]) -> Plan:
    """What a single device plans: everything stays."""
    alone = Mesh((1,), (0,))
    entries = [
        PlannedParam(f"p{k}", (Layout(tuple(param.shape), alone, (Replicated(),)),), param.dim() - 2, "cpu", 4, 1, private=True)
        for k, param in enumerate(step_param.param for step_param in step_params)
    ]
    return make_plan(entries, PlanOptions(cost_model_for("cpu")))


def execute(executor: Executor, step_params: list[StepParam], last: Callable[[], None] = nothing) -> None:
    """A step of work that the executor may not know yet."""
    if executor.plan is None:
        executor.prepare(plan_for(step_params), 0, step_params, None)
    executor.run(step_params, during_last_scatter=last)


def program_of(step_params: list[StepParam], **options: Any) -> RankProgram:
    return RankProgramBuilder(plan_for(step_params), 0, step_params, None, Workspace(), ExecutorSettings(**options)).build()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_learning_rate_that_stays_a_tensor(dtype: torch.dtype, sign: float) -> None:
    """On a GPU the rate is never read by the host; the arithmetic is the same."""
    start = make_params((12, 20), (20, 12), (3, 6, 4), dtype=dtype)
    results = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        params, executor = copies(start), Executor(ExecutorSettings())
        buffers = [torch.zeros_like(param.data) for param in params]
        settings = settings_for(lr, rate=lr * sign)
        for step in range(2):
            execute(executor, work_on(params, settings, buffers, step))
        results.append(params)
    if dtype != torch.bfloat16:
        assert_moved_within_rounding(results[1], results[0], start, 2)
        return
    for found, expected in zip(*results, strict=True):
        # Formed in float32 and rounded once: now and then, one in 2**13 times, to the other side. Twice the unit per step then.
        assert bool(((found - expected).abs() <= 2 * 2 * unit(dtype) * expected.abs()).all())
        assert int((found != expected).sum()) <= 0.05 * found.numel()


def test_equals_the_reference() -> None:
    start = make_params((12, 20), (20, 12), dtype=torch.float64)
    params, reference, executor = copies(start), Reference(start), Executor(ExecutorSettings())
    buffers = [torch.zeros_like(param.data) for param in params]
    for step in range(3):
        execute(executor, work_on(params, settings_for(0.01), buffers, step))
        reference.step(gradients(params, step), lr=0.01)
    assert_moved_within_rounding(params, reference.params, start, 3)
    for buffer, expected in zip(buffers, reference.buffers, strict=True):
        # Three sums of two numbers each, whose parts are at most three gradients of up to 3 times 5.
        torch.testing.assert_close(buffer, expected, rtol=0, atol=sum_error(6, torch.float64) * 45)


def test_no_work() -> None:
    executor, done = Executor(ExecutorSettings()), []
    executor.run([], during_last_scatter=lambda: done.append("before a plan"))
    executor.prepare(plan_for([]), 0, [], None)
    executor.run([], during_last_scatter=lambda: done.append("with an empty plan"))
    assert done == ["before a plan", "with an empty plan"]
    assert executor.plan is not None
    assert executor.plan.tasks == ()
    assert executor.workspace_bytes() == 0


def test_batches_of_a_step() -> None:
    params = make_params((12, 20), (3, 12, 20), (20, 12), (12, 20))
    step_params = work_on(params, settings_for(0.01), [torch.zeros_like(param.data) for param in params], 0)
    batches = [batch.ortho_batch.batch for batch in program_of(step_params, chunk_size=2).local]
    assert [(batch.rows, batch.cols, batch.size) for batch in batches] == [
        (12, 20, 1),
        (12, 20, 2),
        (12, 20, 2),
        (20, 12, 1),
    ]


def test_last_is_done_once_and_after_the_batches() -> None:
    order: list[str] = []

    def watch(batch: Tensor) -> Tensor:
        order.append("batch")
        return batch

    params = make_params((4, 6), (6, 4))
    step_params = work_on(params, settings_for(0.01), [torch.zeros_like(param.data) for param in params], 0, watch)
    execute(Executor(ExecutorSettings()), step_params, lambda: order.append("last"))
    assert order == ["batch", "batch", "last"]


def test_the_step_ends_when_both_streams_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the user does next in the main stream sees all updates, also those that were applied beside it."""
    events: list[str] = []

    class Watched(DirectStreams):
        def side_mark(self) -> str:
            return "all of the side stream"

        def main_waits(self, mark: object) -> None:
            events.append(f"wait for {mark}")

    monkeypatch.setattr(executors, "streams_for", lambda device: Watched())
    params = make_params((4, 6))
    step_params = work_on(params, settings_for(0.01), [torch.zeros_like(param.data) for param in params], 0)
    execute(Executor(ExecutorSettings()), step_params, lambda: events.append("last"))
    assert events == ["last", "wait for all of the side stream"]


def test_the_plan_is_kept_until_the_work_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    original = program_builder.plan_batches
    monkeypatch.setattr(
        program_builder, "plan_batches", lambda items, **options: (planned.append(len(items)), original(items, **options))[1]
    )
    params = make_params((12, 20), (20, 12))
    optimizer = Muon([group(params)], lr=LR)
    for step in range(3):  # other numbers, the same work
        optimizer.param_groups[0].update(lr=LR * (step + 1), nesterov=step % 2 == 0, momentum=0.9 + 0.01 * step)
        run(optimizer, params, [step])
    assert planned == [2]
    plan = optimizer.plan()
    set_gradients(params, [gradients(params, 3)[0], None])  # a missing gradient is a matter of the step
    optimizer.step()
    run(optimizer, params, [4])
    assert planned == [2]
    assert optimizer.plan() is plan
    optimizer.param_groups[0]["ns_steps"] = 3
    run(optimizer, params, [5, 6])
    assert planned == [2, 2]
    assert optimizer.plan() is not plan


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_graphs_are_asked_for_by_option_only(cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    original = stages.replay_for
    monkeypatch.setattr(stages, "replay_for", lambda *args, graphs: (asked.append(graphs), original(*args, graphs=graphs))[1])
    params = make_params((12, 20), (20, 12))
    buffers = [torch.zeros_like(param.data) for param in params]
    execute(Executor(ExecutorSettings(cuda_graphs=cuda_graphs)), work_on(params, settings_for(0.01), buffers, 0))
    assert asked == [cuda_graphs] * 2


@pytest.mark.parametrize("free_grad", [True, False])
def test_gradients_are_freed_after_their_last_use(free_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from inside: while a batch is orthogonalised, gradients of matrices still to come must be there, and no others."""
    monkeypatch.setattr(StepParam, "fallible", False)  # the callable stands in for a scheme of the library
    (param,) = make_params((4, 6, 5))
    present: list[bool] = []

    def watch(batch: Tensor) -> Tensor:
        present.append(param.grad is not None)
        return batch

    step_params = work_on([param], settings_for(0.01, free_grad=free_grad), [torch.zeros_like(param.data)], 0, watch)
    execute(Executor(ExecutorSettings(chunk_size=1)), step_params)
    assert present == [True] * 3 + [not free_grad]
    assert (param.grad is None) == free_grad


def test_gradients_of_parameters_without_elements_are_freed() -> None:
    """Nothing of them is planned, but users who ask for freed gradients count on it."""
    params = make_params((0, 4), (6, 5))
    step_params = work_on(params, settings_for(0.01, free_grad=True), [torch.zeros_like(param.data) for param in params], 0)
    execute(Executor(ExecutorSettings()), step_params)
    assert [param.grad for param in params] == [None, None]


@pytest.mark.parametrize("nesterov", [True, False])
def test_what_is_orthogonalised(nesterov: bool) -> None:
    """The scheme sees G + momentum·M, or M, in float32, and the momentum buffer is not touched by it."""
    params = make_params((6, 8), (6, 8), dtype=torch.bfloat16)
    buffers = [torch.full((6, 8), 2.0), torch.full((6, 8), -1.0)]
    seen: list[Tensor] = []

    def watch(batch: Tensor) -> Tensor:
        seen.append(batch.clone())
        return torch.zeros_like(batch)

    step_params = work_on(params, settings_for(0.01, nesterov=nesterov, momentum=0.5, decay=1.0), buffers, 0, watch)
    before = copies(params)
    execute(Executor(ExecutorSettings()), step_params)
    grads = [grad.float() for grad in gradients(params, 0)]
    momenta = [0.5 * 2.0 + grads[0], 0.5 * -1.0 + grads[1]]
    expected = [grad + 0.5 * momentum for grad, momentum in zip(grads, momenta, strict=True)] if nesterov else momenta
    (batch,) = seen
    assert batch.dtype == torch.float32
    assert torch.equal(batch, torch.stack(expected)), "halves are exact, so that each sum is rounded once"
    assert_same_bits(buffers, momenta)
    assert_same_bits(params, before)


def test_what_failed_in_a_step_that_was_left_is_not_told_after_the_next() -> None:
    """A batch fails and is kept for the end, then a lost rank ends the step before its end."""
    params = make_params((4, 6))
    broken = [True]

    def scheme(batch: Tensor) -> Tensor:
        if broken[0]:
            raise ValueError("of the step before")
        return batch

    def lost() -> None:
        raise TransportError("a rank is gone")

    step_params = work_on(params, settings_for(LR), [torch.zeros(4, 6)], 0, scheme)
    executor = Executor(ExecutorSettings())
    executor.prepare(plan_for(step_params), 0, step_params, None)
    with pytest.raises(TransportError):
        executor.run(step_params, during_last_scatter=lost)
    broken[0] = False
    assert executor.run(step_params, during_last_scatter=nothing) is None


def test_data_parallel_steps_forget_what_failed_in_a_step_that_was_left() -> None:
    executor = DataParallelExecutor(ExecutorSettings())
    executor._program.failures.append(ValueError("of the step before"))
    assert executor.run([], during_last_scatter=nothing) is None
