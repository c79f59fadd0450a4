"""What a step remembers of the last one: after any change it does what an optimizer that remembers nothing does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon import Muon
from meshmuon.errors import MeshmuonError
from meshmuon.optim.collect import Collector

SHAPES = ((6, 4), (4, 6), (8, 4))


def build() -> Muon:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    bias = nn.Parameter(torch.randn(5, generator=generator))
    groups = [
        {"params": params[:2], "names": ["a", "b"], "use_muon": True, "split": lambda name, shape: 2 if name == "cut" else None},
        {"params": params[2:], "names": ["c"], "use_muon": True, "lr": 2e-3},
        {"params": [bias], "names": ["d"], "use_muon": False},
    ]
    return Muon(groups, lr=1e-3, none_grad=False)


def parameters(optimizer: Muon) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def step(optimizer: Muon, number: int, *, forgets: bool) -> str | None:
    """A step; one that ``forgets`` begins as if it were the first. What it raised, as text."""
    for k, param in enumerate(parameters(optimizer)):
        generator = torch.Generator().manual_seed(100 * number + k)
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
    if forgets:
        optimizer._collector = Collector(optimizer._wire_dtype)
    try:
        optimizer.step()
    except MeshmuonError as error:
        return f"{type(error).__name__}: {error}"
    return None


def first(optimizer: Muon) -> nn.Parameter:
    found: nn.Parameter = optimizer.param_groups[0]["params"][0]
    return found


def other_data(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[Muon], None]:
    def change(optimizer: Muon) -> None:
        first(optimizer).grad = None
        first(optimizer).data = torch.full(shape, 0.5, dtype=dtype)

    return change


def other_momentum(shape: tuple[int, ...]) -> Callable[[Muon], None]:
    def change(optimizer: Muon) -> None:
        optimizer.state[first(optimizer)]["momentum_buffer"] = torch.ones(shape)

    return change


def option(**options: Any) -> Callable[[Muon], None]:
    return lambda optimizer: optimizer.param_groups[0].update(options)


def loaded(optimizer: Muon) -> None:
    """torch puts new groups and new tensors in place of the old ones."""
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["momentum_buffer"].mul_(-3)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 5e-3


def renamed(optimizer: Muon) -> None:
    optimizer.param_groups[0]["param_names"][0] = "cut"


def another_parameter(optimizer: Muon) -> None:
    new = nn.Parameter(torch.full(SHAPES[0], 0.25))
    optimizer.param_groups[0]["params"][0] = new


def exchanged(optimizer: Muon) -> None:
    one, other = optimizer.param_groups[0], optimizer.param_groups[1]
    one["params"], other["params"] = other["params"], one["params"]
    one["param_names"], other["param_names"] = other["param_names"], one["param_names"]


CHANGES: dict[str, Callable[[Muon], Any]] = {
    "nothing": lambda optimizer: None,
    "other data": other_data(SHAPES[0]),
    "data of another shape": other_data((3, 4)),
    "data of another dtype": other_data(SHAPES[0], torch.float64),
    "other momentum": other_momentum(SHAPES[0]),
    "momentum of another shape": other_momentum((3, 4)),
    "no state of one": lambda optimizer: optimizer.state.pop(first(optimizer)),
    "no state": lambda optimizer: optimizer.state.clear(),
    "loaded, then another lr": loaded,
    "lr": option(lr=5e-3),
    "momentum": option(momentum=0.5),
    "scheme": option(scheme="keller"),
    "steps": option(ns_steps=3),
    "rule": option(rule="normuon"),
    "split": option(split=2),
    "another name": renamed,
    "compute dtype": option(compute_dtype=torch.float64),
    "cautious": option(cautious_weight_decay=True, weight_decay=0.9),
    "bad lr": option(lr=-1.0),
    "another parameter": another_parameter,
    "groups exchange parameters": exchanged,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_some_steps(change: str) -> None:
    found = []
    for forgets in (False, True):
        optimizer = build()
        assert [step(optimizer, number, forgets=forgets) for number in range(4)] == [None] * 4
        CHANGES[change](optimizer)
        said = [step(optimizer, number, forgets=forgets) for number in range(4, 7)]
        values = [param.detach().clone() for param in parameters(optimizer)]
        found.append((said, values, [optimizer.state[param].get("momentum_buffer") for param in parameters(optimizer)]))
    (said, values, momentum), (wanted, whole, kept) = found
    assert said == wanted
    for mine, theirs in zip((*values, *momentum), (*whole, *kept), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


def test_changes_that_cannot_be_stepped_are_refused() -> None:
    """The cases above that must be errors are, on both sides."""
    for change in ("data of another shape", "momentum of another shape", "bad lr"):
        optimizer = build()
        for number in range(4):
            step(optimizer, number, forgets=False)
        CHANGES[change](optimizer)
        assert step(optimizer, 4, forgets=False) is not None, change


def test_what_has_not_changed_is_not_made_anew() -> None:
    optimizer = build()
    step(optimizer, 0, forgets=False)
    step(optimizer, 1, forgets=False)
    demands, work = optimizer._collector._demands, optimizer._collector._work[1]
    step(optimizer, 2, forgets=False)
    assert optimizer._collector._demands is demands
    assert optimizer._collector._work[1] is work
    assert len(work) == 3
