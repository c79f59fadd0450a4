"""Ranks that die, stall or leave a step in the middle: the others raise an error that names the phase, and soon."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshmuon import DistMuon, Muon
from meshmuon.errors import StateError, TransportError
from meshmuon.transport.groups import timeout_of_group
from tests.support.injector import Fault, Kill, await_files, fail_at, stall_at
from tests.support.processes import GROUP_TIMEOUT, RankOutcome, results_of, run_ranks
from tests.support.small_model import after, assert_equal, give_gradients, initial, muon_of, run_steps, world_mesh
from tests.support.tensors import seeded

WORLD, LOST, STEPS = 4, 1, 5
TIMEOUT = 2.0  # seconds, once ranks wait for nothing but a stalled one; until then, and elsewhere, it is GROUP_TIMEOUT


@dataclass(frozen=True)
class Report:
    """How the steps of one rank ended: how many it made, the error, and what two later steps raised."""

    completed: int
    kind: str
    text: str
    later: tuple[tuple[str, str], ...]

    @property
    def phase(self) -> str:
        return self.text.split("ranks lost each other in the ")[1].split(" of a step")[0]

    def timed_out(self, seconds: float) -> bool:
        """Whether gloo gave up after ``seconds``; a rank that hears of a lost one does not wait so long."""
        return any(has_timed_out(text, seconds) for text in (self.text, *(text for _, text in self.later)))


def has_timed_out(text: str, seconds: float) -> bool:
    return f"Timed out waiting {round(1000 * seconds)}ms" in text


def until_lost(optimizer: Muon, params: list[nn.Parameter], fault: Fault) -> Report:
    """Steps until one fails, and then twice more."""
    rank = dist.get_rank()
    for step in range(STEPS):
        give_gradients(params, step)
        try:
            with fault.armed(rank, step):
                optimizer.step()
        except BaseException as error:
            later = (another(optimizer, params), another(optimizer, params))
            return Report(step, type(error).__name__, str(error), later)
    raise AssertionError("no step has failed")


def another(optimizer: Muon, params: list[nn.Parameter]) -> tuple[str, str]:
    give_gradients(params, 0)
    try:
        optimizer.step()
    except (StateError, TransportError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def stay(folder: Path, rank: int, ranks: int) -> None:
    """Survivors live on until all have reported: that one ends must not be how the next one hears of it."""
    (folder / f"reported{rank}").touch()
    await_files(folder, "reported*", ranks)


def muon_rank(rank: int, folder: Path, step: int, phase: str, action: Any, left: int) -> Report:
    params = initial(world_mesh())
    optimizer = muon_of(params)
    if phase == "between steps":
        fault = fail_at(LOST, step, "before the agreement", action, folder)
        if rank == LOST:
            run_steps(params, optimizer, range(step))
            action()
    else:
        fault = fail_at(LOST, step, phase, action, folder)
    report = until_lost(optimizer, params, fault)
    if report.kind == "TransportError" and report.phase == "agreement":
        assert_equal(params, after(report.completed))  # nothing was written
    stay(folder, rank, left)
    return report


class Raise(Kill):
    error: BaseException = RuntimeError("out of luck")

    def __call__(self) -> None:
        raise self.error


class Interrupt(Raise):
    error = KeyboardInterrupt()


KILLS: dict[str, tuple[int, set[str]]] = {  # the step, and in which phases the others may be
    "before the agreement": (2, {"agreement"}),
    "making ready": (0, {"agreement"}),
    "before the gather": (2, {"gather"}),
    "gather": (2, {"gather", "scatter"}),
    "orthogonalise": (2, {"gather", "scatter"}),
    "scatter": (2, {"scatter", "agreement"}),
    "adamw": (2, {"scatter", "agreement"}),
    "update": (2, {"scatter", "agreement"}),
    "between steps": (2, {"agreement"}),
}


@pytest.mark.parametrize("phase", KILLS)
def test_a_killed_rank(phase: str, tmp_path: Path) -> None:
    step, allowed = KILLS[phase]
    ended = run_ranks(WORLD, muon_rank, tmp_path, step, phase, Kill(tmp_path), WORLD - 1)
    check_lost(ended, allowed, {step, step + 1})


def check_survivors(reports: list[Report]) -> None:
    """All ranks but the lost one heard at once, and none steps on."""
    for rank, report in enumerate(reports):
        assert rank == LOST or report.kind == "TransportError", report
        assert all(kind != "nothing" for kind, _ in report.later), report
        assert not report.timed_out(GROUP_TIMEOUT), report


def check_lost(ended: list[RankOutcome], allowed: set[str], completed: set[int]) -> None:
    assert ended[LOST].trouble == "killed", ended[LOST]
    reports: list[Report] = results_of([one for rank, one in enumerate(ended) if rank != LOST])
    for report in reports:
        assert report.kind == "TransportError", report
        assert report.phase in allowed, report
        assert report.completed in completed, report
        assert all(kind != "nothing" for kind, _ in report.later), report
        assert not report.timed_out(GROUP_TIMEOUT), report
        if report.phase != "agreement":
            assert report.later[0][0] == "StateError", "a step that was left half done must not be continued"


def dist_muon_rank(rank: int, folder: Path, phase: str, action: Any) -> Report:
    params = [nn.Parameter(seeded(shape, k)) for k, shape in enumerate(((8, 6), (6, 9), (5, 7), (7, 5), (4, 4)))]
    report = until_lost(DistMuon(params), params, fail_at(LOST, 2, phase, action, folder))
    stay(folder, rank, WORLD - 1)
    return report


@pytest.mark.parametrize("phase", ["before the agreement", "before the gather", "orthogonalise"])
def test_a_killed_rank_of_dist_muon(phase: str, tmp_path: Path) -> None:
    ended = run_ranks(WORLD, dist_muon_rank, tmp_path, phase, Kill(tmp_path))
    check_lost(ended, {"agreement"} if phase == "before the agreement" else {"gather", "scatter"}, {2, 3})


# Stalls.


def stalling_rank(rank: int, folder: Path, phase: str) -> Report:
    params = initial(world_mesh())
    report = until_lost(muon_of(params), params, stall_at(LOST, 2, phase, folder, WORLD, TIMEOUT))
    stay(folder, rank, WORLD)
    return report


@pytest.mark.parametrize(
    ("phase", "allowed"),
    [
        ("before the agreement", {"agreement"}),
        ("before the gather", {"gather"}),
        ("orthogonalise", {"gather", "scatter"}),
    ],
)
def test_a_rank_that_stalls(phase: str, allowed: set[str], tmp_path: Path) -> None:
    """The group's timeout ends the wait of the others, while the rank still stalls; it hears of it when it wakes."""
    reports: list[Report] = results_of(run_ranks(WORLD, stalling_rank, tmp_path, phase))
    for rank, report in enumerate(reports):
        assert report.kind == "TransportError", report
        assert report.completed == 2, report
        assert all(kind != "nothing" for kind, _ in report.later), report
        assert rank == LOST or report.phase in allowed, report
    assert any(report.timed_out(TIMEOUT) for report in reports), (
        "the others hear of it from the first one whose wait ends"
    )


# A rank that leaves a step in the middle and lives on.


@pytest.mark.parametrize("phase", ["before the gather", "gather", "update"])
@pytest.mark.parametrize("action", [Raise, Interrupt])
def test_a_rank_that_leaves_a_step(phase: str, action: type[Raise], tmp_path: Path) -> None:
    """An error where none is expected, or Ctrl-C: the others hear at once, and no rank steps on."""
    ended = run_ranks(WORLD, muon_rank, tmp_path, 2, phase, action(tmp_path), WORLD)
    reports: list[Report] = results_of(ended)
    assert reports[LOST].kind == type(action.error).__name__
    assert [kind for kind, _ in reports[LOST].later] == ["StateError", "StateError"]
    check_survivors(reports)


@pytest.mark.parametrize("action", [Raise, Interrupt])
def test_a_rank_that_leaves_while_the_others_are_ready(action: type[Raise], tmp_path: Path) -> None:
    """In the first step, whose plan it has not prepared yet; nothing is half done."""
    reports: list[Report] = results_of(
        run_ranks(WORLD, muon_rank, tmp_path, 0, "making ready", action(tmp_path), WORLD)
    )
    assert reports[LOST].kind == type(action.error).__name__
    check_survivors(reports)
    for rank, report in enumerate(reports):
        assert rank == LOST or report.phase == "agreement", report
        assert [kind for kind, _ in report.later] == ["TransportError"] * 2, report


# A rank that never steps.


def unbuilt_on_one_rank(rank: int, folder: Path) -> str:
    params = initial(world_mesh())
    optimizer = muon_of(params, momentum=2.0 if rank == LOST else 0.95)
    give_gradients(params, 0)
    with pytest.raises(TransportError) as caught:
        optimizer.step()
    stay(folder, rank, WORLD - 1)
    return str(caught.value)


def test_a_constructor_that_raises_on_one_rank(tmp_path: Path) -> None:
    """It does not communicate. The others hear in their first step that the rank has ended."""
    ended = run_ranks(WORLD, unbuilt_on_one_rank, tmp_path)
    assert "ConfigError: Muon: momentum=2.0 must be in [0, 1)" in ended.pop(LOST).trouble
    for text in results_of(ended):
        assert "ranks lost each other in the agreement of a step" in text
        assert not has_timed_out(text, GROUP_TIMEOUT)


def group_of_its_own(rank: int, folder: Path) -> Report | None:
    """Two meshes that share rank 1 and leave out rank 3: meshmuon makes a group for ranks 0, 1 and 2."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    if rank == 3:
        await_files(folder, "reported*", WORLD - 1)
        return None
    params = [initial(meshes[0])[0], initial(meshes[1])[1]]
    optimizer = muon_of(params)
    known = set(dist.distributed_c10d._world.pg_group_ranks)
    give_gradients(params, 0)
    optimizer.step()
    made = set(dist.distributed_c10d._world.pg_group_ranks) - known
    assert {timeout_of_group(group) for group in made} == {timedelta(seconds=GROUP_TIMEOUT)}
    report = until_lost(optimizer, params, stall_at(0, 2, "before the agreement", folder, 3, TIMEOUT))
    stay(folder, rank, WORLD - 1)
    return report


def test_groups_that_meshmuon_makes_have_the_timeout_of_the_default_group(tmp_path: Path) -> None:
    """torch would let them wait for half an hour; rank 0 stalls until the others have given up."""
    reports = results_of(run_ranks(WORLD, group_of_its_own, tmp_path))[:3]
    assert [report.kind for report in reports] == ["TransportError"] * 3, reports
    assert any(report.timed_out(TIMEOUT) for report in reports[1:]), reports
