"""A rank that fails in ``prepare()``: all ranks raise the same error, which names phase and rank, and no weight is
written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from meshmuon import DistMuon, Muon
from meshmuon.errors import MeshmuonError, PlanMismatchError, StateError, TransportError
from meshmuon.execute import DataParallelExecutor, Executor
from tests.support import nccl_like
from tests.support.injector import Fault, Kill, await_files, fail_at, stall_at
from tests.support.processes import GROUP_TIMEOUT, results_of, run_ranks
from tests.support.small_model import after, assert_equal, give_gradients, initial, muon_of, run_steps, world_mesh
from tests.support.tensors import assert_untouched, everything, one_text
from tests.support.threads import run_threads

WORLD, ODD = 4, 1
TIMEOUT = 2.0


def failing_prepare(optimizer: Muon) -> str:
    with pytest.raises(MeshmuonError) as caught:
        optimizer.prepare()
    return f"{type(caught.value).__name__}: {caught.value}"


# In planning and in the making of buffers: all ranks go on afterwards.


def build(kind: str) -> tuple[list[Any], Muon]:
    if kind == "DistMuon":
        params = initial(None)[:5]
        return params, DistMuon(params, weight_decay=0.1, lr=0.01, adjust_lr_fn="match_rms_adamw")
    params = initial(world_mesh())
    return params, muon_of(params)


@pytest.mark.parametrize("kind", ["Muon", "DistMuon"])
def test_a_rank_that_cannot_plan(kind: str) -> None:
    def main(rank: int) -> str:
        params, optimizer = build(kind)
        before = everything(optimizer)
        if rank == ODD:
            optimizer.param_groups[0]["momentum"] = 2.0
        text = failing_prepare(optimizer)
        assert_untouched(optimizer, before)
        optimizer.param_groups[0]["momentum"] = 0.95
        optimizer.prepare()
        run_steps(params, optimizer, range(2))
        assert_equal(params, after(2)[: len(params)])
        return text

    text = one_text(run_threads(WORLD, main))
    assert text.startswith("ConfigError: prepare() failed in its planning: rank 1: group 0: momentum=2.0")


@pytest.mark.parametrize("kind", ["Muon", "DistMuon"])
@pytest.mark.parametrize("again", [True, False])
def test_a_rank_without_memory_for_its_buffers(kind: str, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Executor.prepare

    def scarce(executor: Executor, plan: Any, rank: int, *rest: Any) -> None:
        if rank == ODD:
            raise MemoryError("none left")
        prepare(executor, plan, rank, *rest)

    def main(rank: int) -> str:
        params, optimizer = build(kind)
        text = failing_prepare(optimizer)
        assert optimizer.workspace_bytes() == 0, "a rank keeps buffers of a plan that another has not"
        dist.barrier()
        if rank == 0:
            monkeypatch.undo()
        dist.barrier()
        if again:
            optimizer.prepare()
        run_steps(params, optimizer, range(2))
        assert_equal(params, after(2)[: len(params)])
        return text

    for executor in (Executor, DataParallelExecutor):
        monkeypatch.setattr(executor, "prepare", scarce)
    text = one_text(run_threads(WORLD, main))
    phase = "making of state, buffers and kernels"
    assert text == f"MeshmuonError: prepare() failed in its {phase}: rank 1: MemoryError: none left"


@pytest.mark.parametrize("steps", [0, 2])
def test_a_rank_that_steps_instead(steps: int) -> None:
    def main(rank: int) -> str:
        params = initial(world_mesh())
        optimizer = muon_of(params)
        run_steps(params, optimizer, range(steps))
        give_gradients(params, steps)
        with pytest.raises(PlanMismatchError) as caught:
            (optimizer.step if rank == ODD else optimizer.prepare)()
        assert_equal(params, after(steps))
        optimizer.prepare()
        run_steps(params, optimizer, range(steps, steps + 2))
        assert_equal(params, after(steps + 2))
        return str(caught.value).removeprefix("prepare() failed in its planning: ")

    text = one_text(run_threads(WORLD, main))
    assert text.startswith(f"rank {ODD} is at call {steps if steps else 1} of this optimizer's step()")
    assert text.endswith("prepare() on all ranks or on none.")


def test_a_rank_whose_param_group_has_lost_its_parameters() -> None:
    def main(rank: int) -> str:
        params = initial(world_mesh())
        optimizer = muon_of(params)
        optimizer.prepare()
        lost = optimizer.param_groups[0].pop("params") if rank == ODD else params[:5]
        text = failing_prepare(optimizer)
        optimizer.param_groups[0]["params"] = lost
        run_steps(params, optimizer, range(2))
        assert_equal(params, after(2))
        return text

    text = one_text(run_threads(WORLD, main))
    assert text.startswith(
        "ConfigError: prepare() failed in its planning: rank 1: group 0 has lost its option 'params'"
    )


def test_zeros_that_it_made_do_not_pass_for_a_state_that_was_loaded() -> None:
    """Of matrices alone, whose state does not count steps."""

    def main(rank: int) -> str:
        params = initial(world_mesh())[:5]
        first, optimizer = muon_of(params), muon_of(params)
        run_steps(params, first, range(2))
        optimizer.prepare()
        if rank != ODD:
            optimizer.load_state_dict(first.state_dict())
        before = everything(optimizer)
        text = failing_prepare(optimizer)
        give_gradients(params, 2)
        with pytest.raises(StateError):
            optimizer.step()
        assert_untouched(optimizer, before)
        return text

    text = one_text(run_threads(WORLD, main))
    assert text.startswith(
        "StateError: prepare() failed in its planning: a has no state on rank 1 and would restart there"
    )


def test_prepare_does_not_count_as_a_step() -> None:
    """Measured steps and those that ranks count are the same, whenever it is called."""

    def main(rank: int) -> list[int]:
        params = initial(world_mesh())
        optimizer, measured = muon_of(params, metrics=2), []
        for step in range(4):
            optimizer.prepare()
            run_steps(params, optimizer, [step])
            optimizer.prepare()
            measured.append(optimizer.metrics().get("step", 0))
        return measured

    assert run_threads(2, main) == [[0, 2, 2, 4]] * 2


# In the warm-up exchange, and once while planning.


class Fail(Kill):
    error: BaseException = RuntimeError("NCCL: out of memory")

    def __call__(self) -> None:
        await_files(self.folder, "arrived*", WORLD - 1)
        raise self.error


class Interrupt(Fail):
    error = KeyboardInterrupt()


def faulty_rank(rank: int, folder: Path, phase: str, action: Any, left: int) -> tuple[str, str]:
    """What ``prepare()`` and a later step raise; no rank ends before all have reported."""
    params = initial(world_mesh())
    optimizer = muon_of(params)
    fault: Fault = (
        stall_at(ODD, 0, phase, folder, WORLD, TIMEOUT) if action is None else fail_at(ODD, 0, phase, action, folder)
    )
    try:
        with fault.armed(rank, 0):
            optimizer.prepare()
        text = "nothing"
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    (folder / f"reported{rank}").touch()
    assert_equal(params, after(0))
    give_gradients(params, 0)
    with pytest.raises(TransportError) as caught:
        optimizer.step()
    assert_equal(params, after(0))
    await_files(folder, "reported*", left)
    return text, str(caught.value)


@pytest.mark.parametrize("backend", ["gloo", nccl_like.NAME])
@pytest.mark.parametrize("action", [Fail, Kill, Interrupt, None])
def test_a_rank_that_fails_in_the_warm_up_exchange(action: type[Kill] | None, backend: str, tmp_path: Path) -> None:
    left = WORLD - (action is Kill)
    ended = run_ranks(
        WORLD, faulty_rank, tmp_path, "warm-up exchange", action and action(tmp_path), left, backend=backend
    )
    if action is Kill:
        assert ended.pop(ODD).trouble == "killed"
    reports = results_of(ended)
    if action is Interrupt:
        assert reports.pop(ODD)[0].startswith("KeyboardInterrupt")
    text = one_text([text for text, _ in reports])
    phase = "warm-up exchange"
    assert text.startswith(
        f"TransportError: prepare() failed in its {phase}: ranks lost each other in the {phase} of a step: rank"
    )
    if action is Fail:
        assert "rank 1 of [0, 1, 2, 3]: RuntimeError: NCCL: out of memory" in text
    assert (f"Timed out waiting {round(1000 * TIMEOUT)}ms" in text) == (action is None), text
    assert f"{round(1000 * GROUP_TIMEOUT)}ms" not in text


def test_a_rank_that_is_interrupted_while_it_plans(tmp_path: Path) -> None:
    """The others do not wait for their timeout."""
    reports = results_of(run_ranks(WORLD, faulty_rank, tmp_path, "planning", Interrupt(tmp_path), WORLD))
    assert reports.pop(ODD)[0].startswith("KeyboardInterrupt")
    for text, _ in reports:
        assert text.startswith(
            "TransportError: prepare() failed in its planning: ranks lost each other in the agreement"
        ), text
        assert "Timed out" not in text


def spoiling_rank(rank: int, folder: Path) -> str:
    """Rank 1 sends other numbers than it should, and receives the right ones."""
    original = dist.all_to_all_single

    def spoilt(received: Tensor, sent: Tensor, *splits: Any, **options: Any) -> Any:
        return original(received, sent + 4 if rank == ODD else sent, *splits, **options)

    with patch.object(dist, "all_to_all_single", spoilt):
        text = failing_prepare(muon_of(initial(world_mesh())))
    (folder / f"reported{rank}").touch()
    await_files(folder, "reported*", 3)
    return text


@pytest.mark.parametrize("backend", ["gloo", nccl_like.NAME])
def test_numbers_that_change_on_their_way(backend: str, tmp_path: Path) -> None:
    text = one_text(results_of(run_ranks(3, spoiling_rank, tmp_path, backend=backend)))
    assert (
        "prepare() failed in its warm-up exchange: ranks lost each other in the warm-up exchange of a step: rank"
        in text
    )
    assert "5.0" in text
    assert "has arrived from ranks [" in text
