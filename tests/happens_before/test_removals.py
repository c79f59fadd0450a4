"""The checker bites: without any one synchronisation of the package it reports something."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType

import pytest

from tests.support.happens_before.removals import ROOT, SCENARIOS, Removal, all_removals, reported, without
from tests.support.happens_before.runs import Outcome, run_program

REMOVALS = all_removals()


@cache
def usual(name: str) -> tuple[Outcome, frozenset[tuple[str, str]]]:
    """What a scenario does with all synchronisations, and the functions of the package that it calls: their files
    and names.
    """
    called: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(ROOT)):
            called.add((Path(file).relative_to(ROOT).as_posix(), frame.f_code.co_name))

    threading.setprofile(note)
    try:
        outcome = run_program(SCENARIOS[name])
    finally:
        threading.setprofile(None)
    assert not outcome.errors
    return outcome, frozenset(called)


def first_report(removal: Removal, names: Iterable[str]) -> str:
    """What the first of these scenarios reports that reports anything. One that does not come there cannot."""
    for name in names:
        before, called = usual(name)
        if (removal.file, removal.function.split(".")[-1]) in called:
            with without(removal):
                kind = reported(SCENARIOS[name], before)
            if kind:
                return kind
    return ""


@pytest.mark.parametrize("removal", REMOVALS, ids=str)
def test_a_missing_synchronisation_is_reported(removal: Removal) -> None:
    kind = first_report(removal, SCENARIOS)
    assert kind, f"nothing is reported without {removal}: it is redundant and should go, or a scenario is missing"


HOST_MEMORY = [name for name in SCENARIOS if name.startswith("weights in host memory")]
# What the steps of these programs run that weights in host memory alone do not need: the host waits for each of their
# waves.
ON_THEIR_WAY = ("CudaStreams", "CudaTransfers", "Executor.run", "Wave.run", "RuleStateExchange", "Stage", "Pending")
# Device memory of a stage is freed after the host has waited for its copy. Offloaded state, which needs the line, does
# not wait. The host asks only for metrics whether they have arrived.
NOT_NEEDED = {
    ("device.py CudaTransfers.store", "device.record_stream(self._side)"),
    ("device.py CudaTransfers.stored", "self._side.record_event()"),
}


@pytest.mark.parametrize("removal", [r for r in REMOVALS if r.function.startswith(ON_THEIR_WAY)], ids=str)
def test_a_missing_synchronisation_is_reported_for_weights_in_host_memory(removal: Removal) -> None:
    """By these programs alone, so that no other kind of program has to need the line for them."""
    assert bool(first_report(removal, HOST_MEMORY)) is ((removal.site, removal.what) not in NOT_NEEDED)


def test_a_removal_is_undone() -> None:
    removal = next(removal for removal in REMOVALS if removal.file == "execute/executor.py")
    with without(removal):
        assert run_program(SCENARIOS["waves"]).errors
    assert not run_program(SCENARIOS["waves"]).errors
