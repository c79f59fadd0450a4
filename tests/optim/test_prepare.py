"""``prepare()`` on one device: the first step finds everything there and has the bits that it would have had
without it.
"""

from __future__ import annotations

import copy
import logging
import operator
import pickle
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from meshmuon import ConfigError, InactiveWarning, MeshmuonError, Muon
from meshmuon.execute import Executor
from meshmuon.optim import preparation
from tests.support.small_model import after, assert_equal, give_gradients, initial, muon_of, run_steps
from tests.support.tensors import assert_bits, everything, through_disk

STEPS = 3


def with_late_gradients(*, prepares: bool, offloads: bool = False, **options: Any) -> tuple[list[torch.Tensor], Muon]:
    """Everything after steps in which b and the vector of AdamW have no gradient at first."""
    params = initial(None)
    optimizer = muon_of(params, **options)
    if offloads:
        optimizer.turn_on_cpu_offload()
    if prepares:
        optimizer.prepare()
    for step in range(STEPS):
        give_gradients(params, step)
        if step == 0:
            params[1].grad = params[5].grad = None
        optimizer.step()
    return everything(optimizer), optimizer


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rule": "normuon", "nonfinite": "skip"},
        {"use_distributed_muon": True},
        {"metrics": 2},
    ],
    ids=str,
)
def test_bits_do_not_change(options: dict[str, Any], offloads: bool) -> None:
    expected, unprepared = with_late_gradients(prepares=False, **options)
    actual, optimizer = with_late_gradients(prepares=True, offloads=offloads, **options)
    assert_bits(actual, expected)
    if "metrics" in options:
        assert optimizer.metrics()["step"] == unprepared.metrics()["step"] == 2


def tensors_of(optimizer: Muon) -> list[torch.Tensor]:
    return [value for entry in optimizer.state.values() for value in entry.values()]


def test_the_first_step_finds_everything_and_so_does_a_second_call() -> None:
    params = [*initial(None), nn.Parameter(torch.ones(3, 3), requires_grad=False)]
    optimizer = muon_of(params)
    before = [param.detach().clone() for param in params]
    optimizer.prepare()
    plan, states, workspace = optimizer.plan(), everything(optimizer), optimizer.workspace_bytes()
    assert_bits([param.detach() for param in params], before)
    assert list(optimizer.state) == params[:6], "in the order of parameters, without the frozen one"
    assert workspace
    tensors = tensors_of(optimizer)
    with patch.object(Executor, "prepare", side_effect=AssertionError("prepared again")):
        optimizer.prepare()
        assert_bits(everything(optimizer), states)
        run_steps(params[:6], optimizer, range(2))
        optimizer.prepare()
    assert optimizer.plan() is plan
    assert optimizer.workspace_bytes() == workspace
    assert all(map(operator.is_, tensors, tensors_of(optimizer)))
    assert_equal(params[:6], after(2))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_state_that_is_loaded(when: str) -> None:
    params = initial(None)
    first = muon_of(params)
    run_steps(params, first, range(2))
    saved = through_disk(first.state_dict())
    optimizer = muon_of(params)
    if when == "after":
        optimizer.prepare()
    optimizer.load_state_dict(saved)
    if when == "before":
        optimizer.prepare()
    run_steps(params, optimizer, range(2, 4))
    assert_equal(params, after(4))


def test_a_prepared_optimizer_can_be_saved() -> None:
    """Its state is zeros; loading it is starting."""
    params = initial(None)
    optimizer = muon_of(params)
    optimizer.prepare()
    saved = through_disk(optimizer.state_dict())
    assert not any(value.any() for entry in saved["state"].values() for value in entry.values())
    other = muon_of(params)
    other.load_state_dict(saved)
    run_steps(params, other, range(2))
    assert_equal(params, after(2))


@pytest.mark.parametrize("copied", [lambda one: one, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_step_that_only_creates_state_still_does_only_that(copied: Callable[[Muon], Muon]) -> None:
    """torch.distributed.checkpoint steps with lr 0 and gradients of zero: no step may be counted, also after
    copying.
    """
    optimizer = muon_of(initial(None))
    optimizer.prepare()
    optimizer = copied(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert optimizer.state[params[5]]["step"] == 0
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    run_steps(params, optimizer, range(2))
    assert_equal(params, after(2))


def test_a_step_without_gradients_is_still_warned_of() -> None:
    optimizer = muon_of(initial(None))
    optimizer.prepare()
    with pytest.warns(InactiveWarning):
        optimizer.step()


def test_what_fails_names_the_phase_and_can_be_mended() -> None:
    params = initial(None)
    optimizer = muon_of(params)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ConfigError, match=r"^prepare\(\) failed in its planning: group 0: lr"):
        optimizer.prepare()
    assert not optimizer.state
    optimizer.param_groups[0]["lr"] = 0.01
    run_steps(params, optimizer, range(2))
    assert_equal(params, after(2))


def test_what_fails_on_one_process_names_the_phase_too() -> None:
    params = initial(None)
    optimizer = muon_of(params)
    text = r"^prepare\(\) failed in its making of state, buffers and kernels: MemoryError: none left"
    with (
        patch.object(Executor, "prepare", side_effect=MemoryError("none left")),
        pytest.raises(MeshmuonError, match=text),
    ):
        optimizer.prepare()
    run_steps(params, optimizer, range(2))
    assert_equal(params, after(2))


@pytest.mark.parametrize("late", [0, 5], ids=["muon", "adamw"])
def test_a_second_call_makes_the_state_that_is_missing(late: int) -> None:
    params = initial(None)
    params[late].requires_grad_(False)
    optimizer = muon_of(params)
    optimizer.prepare()
    params[late].requires_grad_(True)
    optimizer.prepare()
    assert list(optimizer.state) == params


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("offloads", [True, False])
def test_parameters_that_a_wrapper_replaces_afterwards(saves: bool, offloads: bool) -> None:
    """As Accelerate does when it shards: nothing is left of the first ones, and a state_dict can be made and loaded."""
    optimizer = muon_of(initial(None))
    if offloads:
        optimizer.turn_on_cpu_offload()
    optimizer.prepare()
    optimizer.load_state_dict(optimizer.state_dict())
    params = initial(None)
    optimizer.param_groups[0]["params"], optimizer.param_groups[1]["params"] = params[:5], params[5:]
    if saves:
        optimizer.state_dict()
    run_steps(params, optimizer, range(2))
    assert list(optimizer.state) == params
    assert len(optimizer.state_dict()["state"]) == len(params)
    assert_equal(params, after(2))


def test_a_slow_phase_is_shown_as_long_as_it_takes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, phase = Executor.prepare, "prepare() has been in its making of state, buffers and kernels for"

    def shown() -> list[str]:
        return [text for record in caplog.records if (text := record.getMessage()).startswith(phase)]

    def slow(*args: Any) -> None:
        end = time.monotonic() + 60
        while len(shown()) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        prepare(*args)

    monkeypatch.setattr(preparation, "_SLOW_SECONDS", 0.3)
    monkeypatch.setattr(Executor, "prepare", slow)
    with caplog.at_level(logging.INFO, "meshmuon"):
        muon_of(initial(None)).prepare()
    assert [text.partition(". ")[0] for text in shown()[:2]] == [f"{phase} 0 s", f"{phase} 1 s"]  # 0.3 and 0.6, rounded
    assert caplog.records[-1].getMessage().startswith("prepare() took")
