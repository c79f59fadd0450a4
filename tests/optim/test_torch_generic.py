"""What torch tests of every optimizer, tested of this one through an adapter that takes parameters as torch's do.

The behaviours are those of ``TestOptimRenewed``, written anew; tests/state has those of saving, loading and copying,
and test_refusals.py those of errors. What differs by design is at the end, and in docs/proofs.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshmuon import Muon
from tests.support.reference import LR, assert_same_bits

# rates here are chosen to move, not to train
pytestmark = pytest.mark.filterwarnings("ignore::meshmuon.RoutingWarning")


class Adapted(Muon):
    """Takes tensors, (name, tensor) pairs or groups, as torch's optimizers do. ``ROUTED``: whether matrices go to Muon.

    A group of torch's may become two of ours: its matrices and the rest.
    """

    ROUTED = True

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        given = list(params)
        groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
        routed = [part for group in groups for part in self._parts(group)]
        super().__init__(routed, **{"allow_inactive": not self.ROUTED} | options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        parts = [param_group] if "use_muon" in param_group else self._parts(param_group)
        for part in parts:
            super().add_param_group(part)

    def _parts(self, group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        entries = group["params"]
        entries = [entries] if isinstance(entries, Tensor) else list(entries)
        for use_muon in (True, False):
            mine = [one for one in entries if self._is_matrix(one[1] if isinstance(one, tuple) else one) is use_muon]
            if mine:
                yield {**group, "params": mine, "use_muon": use_muon, "conv": "flatten"}

    def _is_matrix(self, param: Tensor) -> bool:
        return self.ROUTED and param.dim() >= 2


class AllAdamW(Adapted):
    """Everything by the AdamW part."""

    ROUTED = False


INPUTS: dict[str, dict[str, Any]] = {  # ways of building the optimizer, as in torch's database of optimizers
    "default": {},
    "larger lr": {"lr": 0.01},
    "tensor lr": {"lr": torch.tensor(0.001)},
    "decay": {"weight_decay": 0.1},
    "no decay": {"weight_decay": 0.0},
    "ascent": {"weight_decay": 0.0, "maximize": True},
    "ascent with decay": {"weight_decay": 0.1, "maximize": True},
    "plain momentum": {"nesterov": False, "momentum": 0.9, "adamw_betas": (0.8, 0.9)},
    "no momentum": {"momentum": 0.0, "adamw_eps": 1e-6},
    "kept gradients": {"none_grad": False},
}
CLASSES = [Adapted, AllAdamW]
every_input = pytest.mark.parametrize("name", INPUTS)
every_class = pytest.mark.parametrize("kind", CLASSES)


def fresh(name: str) -> dict[str, Any]:
    """Options of one optimizer: schedulers write into learning rates that are tensors."""
    return copy.deepcopy(INPUTS[name])


class Problem:
    """A weight and a bias that are to map one input to zero."""

    def __init__(self, *, contiguous: bool = True, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        weight, bias = torch.randn(10, 5, 2, generator=draw), torch.randn(10, 2, generator=draw)
        first, second = weight[..., 0], bias[..., 0]
        self.weight = nn.Parameter(first.contiguous() if contiguous else first)
        self.bias = nn.Parameter(second.contiguous() if contiguous else second)
        self.input = torch.randn(5, generator=draw)

    @property
    def params(self) -> list[nn.Parameter]:
        return [self.weight, self.bias]

    def named(self, yes: bool = True) -> list[Any]:
        return [("weight", self.weight), ("bias", self.bias)] if yes else self.params

    def loss(self) -> Tensor:
        return (self.weight.mv(self.input) + self.bias).pow(2).sum()

    def closure(self, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return evaluate


def train(optimizer: torch.optim.Optimizer, problem: Problem, steps: int) -> None:
    evaluate = problem.closure(optimizer)
    for _ in range(steps):
        evaluate()
        optimizer.step()


def trained(kind: type[Adapted], name: str, steps: int = 1, *, named: bool = False) -> tuple[Problem, Adapted]:
    problem = Problem()
    optimizer = kind(problem.named(named), **fresh(name))
    train(optimizer, problem, steps)
    return problem, optimizer


# Closures and gradients


@every_class
@every_input
def test_a_closure_is_evaluated_once_with_gradients(kind: type[Adapted], name: str) -> None:
    problem = Problem()
    optimizer = kind(problem.params, **fresh(name))
    calls: list[Tensor] = []
    evaluate = problem.closure(optimizer)

    def counted() -> Tensor:
        assert torch.is_grad_enabled()
        calls.append(evaluate())
        return calls[-1]

    with torch.no_grad():
        assert optimizer.step(counted) is calls[-1]
    assert len(calls) == 1
    assert optimizer.step() is None


@every_class
@every_input
def test_nothing_happens_without_gradients(kind: type[Adapted], name: str) -> None:
    params = [torch.randn(2, 3), torch.randn(3)]
    kept = [param.clone() for param in params]
    optimizer = kind(params, **fresh(name))
    optimizer.step(lambda: torch.tensor([1.0]))
    assert_same_bits(params, kept)
    assert not any(optimizer.state.values())


@every_class
@every_input
@pytest.mark.parametrize("contiguous", [True, False])
def test_gradients_are_never_written(kind: type[Adapted], name: str, contiguous: bool) -> None:
    problem = Problem(contiguous=contiguous)
    optimizer = kind(problem.params, **{**fresh(name), "none_grad": False})
    for _ in range(3):
        problem.closure(optimizer)()
        grads = [param.grad for param in problem.params]
        kept = [(grad.clone(), grad._version) for grad in grads if grad is not None]
        optimizer.step()
        assert [param.grad is grad for param, grad in zip(problem.params, grads, strict=True)] == [True, True]
        for grad, (bits, version) in zip(grads, kept, strict=True):
            assert grad is not None
            assert grad._version == version
            assert torch.equal(grad, bits)


@every_class
def test_dtypes_beside_each_other(kind: type[Adapted]) -> None:
    """Parameters of all dtypes in one group, each as if it were alone."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def made() -> list[nn.Parameter]:
        draw = torch.Generator().manual_seed(3)
        return [
            nn.Parameter(torch.randn(shape, generator=draw).to(d)) for d in dtypes for shape in ((4, 6), (5,), (2, 3))
        ]

    together, apart = made(), made()
    optimizers = [(kind(together), together), *((kind([param], allow_inactive=True), [param]) for param in apart)]
    for optimizer, params in optimizers:
        for step in range(4):
            for param in params:
                param.grad = torch.full_like(param, 0.1 + step).cumsum(-1)
            optimizer.step()
    assert_same_bits(together, apart)


# State


@every_class
@every_input
@pytest.mark.parametrize("names", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_state_dict_is_all_there_is(kind: type[Adapted], name: str, names: tuple[bool, bool]) -> None:
    """A twin that loads it has the same bits from then on, the names of either side and the same state_dict.

    Loading does not change what is loaded.
    """
    (first, one), second = trained(kind, name, 10, named=names[0]), Problem()
    with torch.no_grad():
        for mine, its in zip(second.params, first.params, strict=True):
            mine.copy_(its)
    two = kind(second.named(names[1]), **fresh(name))
    saved = copy.deepcopy(one.state_dict())
    loaded = copy.deepcopy(saved)
    two.load_state_dict(loaded)
    assert_equal_dicts(loaded, saved)
    for _ in range(10):
        train(one, first, 1)
        train(two, second, 1)
        assert_same_bits(first.params, second.params)
    assert_equal_dicts(nameless(one.state_dict()), nameless(two.state_dict()))
    kept = [param_name for group in two.state_dict()["param_groups"] for param_name in group["param_names"]]
    assert kept == ["weight", "bias"] if any(names) else all(param_name.startswith("group") for param_name in kept)
    two.param_groups.extend(two.param_groups)
    assert_equal_dicts(nameless(one.state_dict())["param_groups"][-1], nameless(two.state_dict())["param_groups"][-1])


def nameless(state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [
        {key: value for key, value in group.items() if key != "param_names"} for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def assert_equal_dicts(one: Any, other: Any) -> None:
    """Equal in every key, value, type of container and bit."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    elif isinstance(one, dict):
        assert list(one) == list(other) or set(one) == set(other)
        for key, value in one.items():
            assert_equal_dicts(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other)
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            assert_equal_dicts(mine, its)
    else:
        assert one == other


# Hooks


def leave_a_mark(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state["test"] = 1  # type: ignore[index]


def take_the_mark(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict["marked"] = state_dict["state"].pop("test", None) is not None
    return state_dict


@every_class
@every_input
def test_hooks_of_state_dict(kind: type[Adapted], name: str) -> None:
    optimizer = kind(Problem().params, **fresh(name))
    first = optimizer.register_state_dict_post_hook(take_the_mark)
    assert optimizer.state_dict()["marked"] is False
    first.remove()
    optimizer.register_state_dict_pre_hook(leave_a_mark)
    assert optimizer.state_dict()["state"]["test"] == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["test"] == 1  # type: ignore[index, comparison-overlap]
    optimizer.register_state_dict_post_hook(take_the_mark)
    again = optimizer.state_dict()
    assert again["marked"] is True
    assert "test" not in again["state"]


def lr_of_two(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for group in state_dict["param_groups"]:
        group["lr"] = 0.002


def lr_of_three(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    mine = copy.deepcopy(state_dict)
    for group in mine["param_groups"]:
        group["lr"] = 0.003
    return mine


@every_class
@every_input
def test_hooks_of_load_state_dict(kind: type[Adapted], name: str) -> None:
    problem, optimizer = trained(kind, name)
    seen: list[Any] = []
    after = optimizer.register_load_state_dict_post_hook(lambda one: seen.append(one.param_groups[0]["lr"]))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(lr_of_two)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(lr_of_three, prepend=True)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(lr_of_three)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen[0] == INPUTS[name].get("lr", 1e-3)
    assert seen[1:] == [0.002, 0.002, 0.003]
    assert [group["lr"] for group in optimizer.param_groups] == [0.003] * len(optimizer.param_groups)
    after.remove()
    train(optimizer, problem, 1)


@every_class
def test_hooks_of_step(kind: type[Adapted]) -> None:
    problem, log = Problem(), list[str]()
    optimizer = kind(problem.params)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: log.append("global before")),
        register_optimizer_step_post_hook(lambda *_: log.append("global after")),
        optimizer.register_step_pre_hook(lambda *_: log.append("before")),
        optimizer.register_step_post_hook(lambda *_: log.append("after")),
    ]
    optimizer.step(problem.closure(optimizer))
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert log == ["global before", "before", "after", "global after"]


# What stays different; docs/proofs.md lists it with the reasons.


@every_class
@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable", "differentiable"])
def test_flags_of_torchs_implementations(kind: type[Adapted], flag: str) -> None:
    """There is one implementation: the flags are no options, and in a group, where trainers put them, they change
    nothing.
    """
    first, second = Problem(), Problem()
    with pytest.raises(TypeError, match=flag):
        kind(first.params, **{flag: True})
    train(kind([{"params": first.params, flag: True}], lr=LR), first, 3)
    train(kind(second.params, lr=LR), second, 3)
    assert_same_bits(first.params, second.params)
