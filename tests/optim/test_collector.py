"""What a step remembers of the last one: after any change it does what an optimizer that remembers nothing does."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils import swap_tensors

from meshmuon import Muon
from meshmuon.errors import MeshmuonError
from meshmuon.optim.collect import Collector
from meshmuon.optim.step_params import StepParams
from tests.support.small_model import initial, on_mesh, world_mesh
from tests.support.tensors import like, local, seeded
from tests.support.threads import run_threads

SHAPES = ((6, 4), (4, 6), (8, 4))


def build() -> Muon:
    *params, bias = initial(None, (*SHAPES, (5,)))
    groups = [
        {
            "params": params[:2],
            "names": ["a", "b"],
            "use_muon": True,
            "split": lambda name, shape: 2 if name == "cut" else None,
        },
        {"params": params[2:], "names": ["c"], "use_muon": True, "lr": 2e-3},
        {"params": [bias], "names": ["d"], "use_muon": False},
    ]
    return Muon(groups, lr=1e-3, none_grad=False)


def parameters(optimizer: Muon) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


Late = Callable[[nn.Parameter], None]  # what happens to the gradient of the first parameter before a step


def step(optimizer: Muon, number: int, late: Late | None = None, *, forgets: bool) -> str | None:
    """A step; one that ``forgets`` begins as if it were the first. What it raised, as text."""
    for k, param in enumerate(parameters(optimizer)):
        param.grad = like(param, seeded(param.shape, 100 * number + k).to(param.dtype))
    if late is not None:
        late(first(optimizer))
    if forgets:
        optimizer._collector, optimizer._step_params = Collector(optimizer._comm_dtype), StepParams()
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


def under_another_key(optimizer: Muon) -> None:
    entry = optimizer.state[first(optimizer)]
    entry["velocity"] = entry.pop("momentum_buffer")


def moved_to_another(optimizer: Muon) -> None:
    one, other = optimizer.param_groups[0]["params"]
    optimizer.state[other]["momentum_buffer"] = optimizer.state[one].pop("momentum_buffer").mT.contiguous()


def another_shape_without_state(optimizer: Muon) -> None:
    other_data((3, 4))(optimizer)
    optimizer.state.pop(first(optimizer))


CHANGES: dict[str, Callable[[Muon], Any]] = {
    "nothing": lambda optimizer: None,
    "other data": other_data(SHAPES[0]),
    "data of another shape": other_data((3, 4)),
    "data of another shape, and no state": another_shape_without_state,
    "data of another dtype": other_data(SHAPES[0], torch.float64),
    "other momentum": other_momentum(SHAPES[0]),
    "momentum of another shape": other_momentum((3, 4)),
    "momentum under another key": under_another_key,
    "momentum moved to another parameter": moved_to_another,
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
    if change in ("data of another shape", "momentum of another shape", "bad lr"):
        assert said[0] is not None
    for mine, theirs in zip((*values, *momentum), (*whole, *kept), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


def sharded() -> Muon:
    """Two matrices cut over the ranks, in one group with a plain one."""
    params = [*initial(world_mesh(), SHAPES[:2]), *initial(None, SHAPES[2:])]
    return Muon([{"params": params, "names": ["a", "b", "c"], "use_muon": True}], none_grad=False)


def other_local_tensor(optimizer: Muon) -> None:
    """As FSDP2 does when it lays its parameters out anew."""
    param: Any = first(optimizer)
    param._local_tensor = torch.full_like(param._local_tensor, 0.5)


def other_local_momentum(optimizer: Muon) -> None:
    """Under the same DTensor."""
    momentum: Any = optimizer.state[first(optimizer)]["momentum_buffer"]
    momentum._local_tensor = torch.full_like(momentum._local_tensor, 0.3)


def other_cut(optimizer: Muon) -> None:
    param = first(optimizer)
    swap_tensors(param, nn.Parameter(on_mesh(torch.full(param.shape, 0.5), world_mesh(), Shard(1))))


def gradient_cut_as(placement: Any) -> Late:
    def change(param: Any) -> None:
        param.grad = param.grad.redistribute(param.device_mesh, [placement])

    return change


# of parameters, of a gradient; whether it fits
SHARDED_CHANGES: dict[str, tuple[Callable[[Muon], None], Late | None, bool]] = {
    "nothing": (lambda optimizer: None, None, True),
    "another local tensor": (other_local_tensor, None, True),
    "another local momentum": (other_local_momentum, None, True),
    "another cut": (other_cut, None, False),
    "a gradient cut differently": (lambda optimizer: None, gradient_cut_as(Shard(1)), False),
    "a replicated gradient": (lambda optimizer: None, gradient_cut_as(Replicate()), False),
}


@pytest.mark.parametrize("name", SHARDED_CHANGES)
def test_a_change_of_shards_after_some_steps(name: str) -> None:
    change, late, fits = SHARDED_CHANGES[name]

    def run(forgets: bool) -> list[tuple[list[str | None], list[Tensor]]]:
        def main(rank: int) -> tuple[list[str | None], list[Tensor]]:
            optimizer = sharded()
            said = [step(optimizer, number, forgets=forgets) for number in range(4)]
            change(optimizer)
            said += [step(optimizer, number, late, forgets=forgets) for number in range(4, 7)]
            return said, [local(param) for param in parameters(optimizer)]

        return run_threads(2, main)

    for (said, values), (wanted, whole) in zip(run(False), run(True), strict=True):
        assert said[:4] == [None] * 4
        assert said == wanted
        assert (said[4] is None) == fits
        assert all(map(torch.equal, values, whole))


@pytest.mark.parametrize("rule", ["plain", "normuon"])
def test_state_that_is_taken_away_is_free_to_go(rule: str) -> None:
    """As home-made offloading does it: between steps nothing here keeps the old tensors alive."""
    optimizer = build()
    for group in optimizer.param_groups:
        group["rule"] = rule
    for number in range(4):
        assert step(optimizer, number, forgets=False) is None
    known = []
    for entry in optimizer.state.values():
        for key, value in entry.items():
            known.append(weakref.ref(value))
            entry[key] = value.clone()
        del value
    assert len(known) > 5
    gc.collect()
    assert [one() for one in known] == [None] * len(known)
    assert step(optimizer, 4, forgets=False) is None


def test_shards_that_are_replaced_are_free_to_go() -> None:
    def main(rank: int) -> bool:
        optimizer = sharded()
        for number in range(4):
            step(optimizer, number, forgets=False)
        param: Any = first(optimizer)
        known = weakref.ref(param._local_tensor)
        param._local_tensor = param._local_tensor.clone()
        gc.collect()
        return known() is None

    assert run_threads(2, main) == [True, True]
