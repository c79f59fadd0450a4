"""Each update rule against its formula, written out in full precision for one matrix at a time."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon import (
    ConfigError,
    Muon,
    NorMuon,
    StateError,
    polar_express,
)
from tests.support.bounds import moved_error, orthogonalize_error, unit
from tests.support.reference import group, make_params, run
from tests.support.rules import Drag

SHAPES = [(6, 4), (4, 6), (5, 5), (1, 7), (7, 1)]
LR, DECAY, MU = 0.01, 0.5, 0.9
NANOCHAT = ["muoneq", "muon_plus", "normuon"]
LISTS = [NANOCHAT, NANOCHAT[:2], NANOCHAT[::2], ["muoneq", "normuon", "muon_plus"]]
EXACT = polar_express(steps=12)  # the polar factor itself


class Reference:
    """One matrix, stepped by hand in float64; ``rule`` names what is done beside orthogonalising."""

    def __init__(
        self,
        weight: Tensor,
        rule: Any,
        *,
        cautious: bool = False,
        maximize: bool = False,
        axis: str = "rows",
        beta2: float = 0.95,
    ) -> None:
        self.weight, self.momentum = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
        self.per_column = axis == "columns" or (axis == "longer" and weight.size(1) > weight.size(0))
        self.v = torch.zeros((1, weight.size(1)) if self.per_column else (weight.size(0), 1), dtype=torch.float64)
        self.rules, self.beta2, self.cautious, self.sign = [rule] if isinstance(rule, str) else rule, beta2, cautious, 1
        self.sign = -1 if maximize else 1

    def step(self, grad: Tensor) -> None:
        self.momentum = MU * self.momentum + grad.double()
        update = grad.double() + MU * self.momentum
        if "muoneq" in self.rules:
            norm = update.norm(dim=1, keepdim=True)
            update = update / torch.where(norm > 0, norm, torch.ones_like(norm))
        left, values, right = torch.linalg.svd(update, full_matrices=False)
        found = (
            left[:, values > 1e-9 * values.max()] @ right[values > 1e-9 * values.max()]
            if values.max() > 0
            else 0 * update
        )
        for rule in self.rules:
            if rule == "normuon":
                self.v = self.beta2 * self.v + (1 - self.beta2) * (found**2).mean(
                    dim=0 if self.per_column else 1, keepdim=True
                )
                even = torch.where(self.v > 0, found / self.v.sqrt(), 0 * found)
                found = even * found.norm() / even.norm() if even.norm() > 0 else even
            elif rule == "muon_plus" and found.norm() > 0:
                found = found * min(found.shape) ** 0.5 / found.norm()
        scaled = 0.2 * max(found.shape) ** 0.5 * found
        applied = self.sign * LR * scaled
        decay = torch.full_like(self.weight, DECAY)
        if self.cautious:
            decay = torch.where(applied * self.weight >= 0, decay, 0 * decay)
        self.weight = self.weight * (1 - LR * decay) - applied


def moved_bound(start: Tensor, end: Tensor, updates: int) -> float:
    """Rounding of so many updates. Rules divide by norms of rows, which differ by less than a factor of ten."""
    return 10 * moved_error(start, end, updates=updates, scheme=EXACT) * float((end - start).norm())


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def optimizer_for(params: list[nn.Parameter], **options: Any) -> Muon:
    groups = [{"params": params, "names": [f"{k}.experts" for k in range(len(params))], "use_muon": True}]
    more = {
        "scheme": EXACT,
        "ns_steps": 12,
        "expert_keys": ["experts"],
        "weight_decay": DECAY,
        "momentum": MU,
        "lr": LR,
    }
    return Muon(groups, **{**more, **options})


ALL = ["plain", "normuon", "muon_plus", "muoneq", *LISTS]


@pytest.mark.parametrize("rule", ALL, ids=str)
@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_against_the_formula(rule: Any, cautious: bool, maximize: bool) -> None:
    params = [nn.Parameter(draw(shape, k)) for k, shape in enumerate(SHAPES)]
    start = [param.detach().clone() for param in params]
    wanted = [Reference(param.detach(), rule, cautious=cautious, maximize=maximize) for param in params]
    optimizer = optimizer_for(params, rule=rule, cautious_weight_decay=cautious, maximize=maximize)
    for step in range(5):
        for k, param in enumerate(params):
            param.grad = draw(SHAPES[k], 100 * step + k)
            wanted[k].step(param.grad)
        optimizer.step()
    for param, one in zip(params, wanted, strict=True):
        bound = moved_bound(start.pop(0), one.weight, 5)
        torch.testing.assert_close(param.detach(), one.weight, rtol=0, atol=bound)
        if "normuon" in rule:  # means of squares of a row of the update, each below 1
            bound = 10 * orthogonalize_error(
                param.grad if param.grad is not None else draw(tuple(param.shape), 1), EXACT
            )
            torch.testing.assert_close(optimizer.state[param]["rule_memory"], one.v, rtol=0, atol=bound)
        else:
            assert "rule_memory" not in optimizer.state[param]


@pytest.mark.parametrize("axis", ["rows", "columns", "longer"])
def test_the_axis_of_normuon(axis: str) -> None:
    """Against the formula; the memory is as long as there are rows, or columns."""
    params = [nn.Parameter(draw(shape, k)) for k, shape in enumerate(SHAPES)]
    start = [param.detach().clone() for param in params]
    wanted = [Reference(param.detach(), "normuon", axis=axis) for param in params]
    optimizer = optimizer_for(params, rule=NorMuon(axis=axis))  # type: ignore[arg-type]
    for step in range(3):
        for k, param in enumerate(params):
            param.grad = draw(SHAPES[k], 100 * step + k)
            wanted[k].step(param.grad)
        optimizer.step()
    for param, begin, one in zip(params, start, wanted, strict=True):
        torch.testing.assert_close(param.detach(), one.weight, rtol=0, atol=moved_bound(begin, one.weight, 3))
        assert optimizer.state[param]["rule_memory"].shape == one.v.shape


@pytest.mark.parametrize("rule", ["normuon", "muon_plus", "muoneq", NANOCHAT], ids=str)
def test_experts_filters_and_parts_are_matrices_of_their_own(rule: Any) -> None:
    """Flipped experts are the transposed ones; filters and parts of fused weights are separate matrices."""
    experts = draw((3, 4, 6), 1)
    flipped, upright = nn.Parameter(experts.mT.contiguous()), nn.Parameter(experts.clone())
    filters, flat = nn.Parameter(draw((5, 3, 2, 2), 2)), nn.Parameter(draw((5, 3, 2, 2), 2).flatten(1))
    fused = nn.Parameter(draw((10, 4), 3))
    parts = [nn.Parameter(one.clone()) for one in fused.detach().split([3, 7])]
    number = itertools.count()

    def one(param: nn.Parameter, **options: Any) -> dict[str, Any]:
        return {"params": [param], "names": [f"experts.{next(number)}"], "use_muon": True, **options}

    optimizer = Muon(
        [
            one(flipped, matrices={"experts.0": {"dims": "in_out"}}),
            one(upright),
            one(filters, expert_keys=[], conv="flatten"),
            one(flat),
            one(fused, split=(3, 7)),
            *map(one, parts),
        ],
        rule=rule,
        expert_keys=["experts"],
    )
    for step in range(3):
        upright.grad = draw((3, 4, 6), 10 + step)
        flipped.grad = upright.grad.mT.contiguous()
        filters.grad = draw((5, 3, 2, 2), 20 + step)
        flat.grad = filters.grad.flatten(1)
        fused.grad = draw((10, 4), 30 + step)
        parts[0].grad, parts[1].grad = (grad.clone() for grad in fused.grad.split([3, 7]))
        optimizer.step()
    torch.testing.assert_close(
        flipped.detach().mT, upright.detach(), rtol=0, atol=moved_bound(experts, upright.detach(), 3)
    )
    assert torch.equal(filters.detach().flatten(1), flat.detach())
    assert torch.equal(fused.detach(), torch.cat([part.detach() for part in parts]))
    if "normuon" in str(rule):
        shapes = [tuple(optimizer.state[p]["rule_memory"].shape) for p in (flipped, upright, filters, fused)]
        assert shapes == [(3, 1, 4), (3, 4, 1), (5, 1, 1, 1), (10, 1)]


@pytest.mark.parametrize("rule", ["normuon", "muon_plus", "muoneq", NANOCHAT], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_zero_tiny_and_huge_gradients(rule: Any, scale: float) -> None:
    """Also a matrix with one row of zeros."""
    param, usual = nn.Parameter(draw((4, 6), 0).float()), nn.Parameter(draw((4, 6), 0).float())
    optimizer, other = (
        optimizer_for([param], rule=rule, weight_decay=0.0),
        optimizer_for([usual], rule=rule, weight_decay=0.0),
    )
    for step in range(3):
        grad = draw((4, 6), step + 1).float()
        grad[2] = 0
        param.grad, usual.grad = grad * scale, grad
        optimizer.step()
        other.step()
    assert torch.isfinite(param).all()
    if scale:
        torch.testing.assert_close(param, usual, rtol=0, atol=moved_bound(draw((4, 6), 0).float(), usual.detach(), 3))
    else:
        assert torch.equal(param, draw((4, 6), 0).float())


def test_a_rule_of_ones_own() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    @dataclass(frozen=True)
    class Own:
        factor: float

        def remembers(self) -> bool:
            return True

        def before(self, momentum: Tensor) -> None:
            seen.append(("before", tuple(momentum.shape)))

        def after(self, update: Tensor, memory: Tensor | None) -> None:
            assert memory is not None
            seen.append(("after", tuple(memory.shape)))
            memory.add_(1.0)
            update.mul_(self.factor * memory)

    param, plain = nn.Parameter(draw((6, 4), 0)), nn.Parameter(draw((6, 4), 0))
    optimizer, other = optimizer_for([param], rule=Own(0.5)), optimizer_for([plain])
    before = param.detach().clone()
    param.grad, plain.grad = draw((6, 4), 1), draw((6, 4), 1)
    optimizer.step()
    other.step()
    assert seen == [("before", (1, 6, 4)), ("after", (1, 6, 1))]
    moved, usual = param.detach() - before * (1 - LR * DECAY), plain.detach() - before * (1 - LR * DECAY)
    torch.testing.assert_close(moved, 0.5 * usual, rtol=0, atol=6 * unit(torch.float64) * float(before.abs().max()))
    assert torch.equal(optimizer.state[param]["rule_memory_Own"], torch.ones(6, 1, dtype=torch.float64))


def test_state_survives_and_other_rules_states_are_refused() -> None:
    param = nn.Parameter(draw((6, 4), 0).bfloat16())
    optimizer = optimizer_for([param], rule="normuon", scheme="keller", ns_steps=5)
    for step in range(2):
        param.grad = draw((6, 4), step).bfloat16()
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["rule_memory"].dtype == torch.float32
    twin = nn.Parameter(param.detach().clone())
    loaded = optimizer_for([twin], rule="normuon", scheme="keller", ns_steps=5)
    loaded.load_state_dict(saved)
    assert loaded.state[twin]["rule_memory"].dtype == torch.float32
    for one, opt in ((param, optimizer), (twin, loaded)):
        one.grad = draw((6, 4), 9).bfloat16()
        opt.step()
    assert torch.equal(param, twin)
    broken = copy.deepcopy(saved)
    del broken["state"][0]["rule_memory"]
    with pytest.raises(StateError, match=r"0\.experts .*rule_memory"):
        loaded.load_state_dict(broken)
    broken = copy.deepcopy(saved)
    broken["state"][0]["rule_memory"] = torch.zeros(5, 1)
    with pytest.raises(StateError, match=r"0\.experts .*rule_memory has \(5, 1\) instead of \(6, 1\)"):
        loaded.load_state_dict(broken)


def test_a_rule_that_asks_for_numbers_of_the_weight_is_refused() -> None:
    """Its method would never be called."""

    @dataclass(frozen=True)
    class Scaling(Drag):
        def scale(self, numbers: Any) -> Any: ...

    with pytest.raises(ConfigError, match=r"scale\(\) is gone: rules that see the weight come back"):
        optimizer_for([nn.Parameter(torch.zeros(3, 3))], rule=["muoneq", Scaling()])


def test_a_rule_that_cannot_be_hashed_is_refused() -> None:
    @dataclass
    class Loose:
        def remembers(self) -> bool:
            return False

        def before(self, momentum: Tensor) -> None: ...

        def after(self, update: Tensor, memory: Tensor | None) -> None: ...

    with pytest.raises(ConfigError, match="frozen dataclass"):
        optimizer_for([nn.Parameter(torch.zeros(3, 3))], rule=Loose())


def test_wrong_numbers_of_rules_are_refused() -> None:
    with pytest.raises(ConfigError, match="beta2=1"):
        NorMuon(beta2=1.0)
    with pytest.raises(ConfigError, match="NorMuon: axis='outputs' must be one of 'rows', 'columns', 'longer'"):
        NorMuon(axis="outputs")  # type: ignore[arg-type]
    rule = Drag()
    object.__setattr__(rule, "memory_name", "momentum_buffer")
    with pytest.raises(ConfigError, match='its memory_name must begin with "rule_memory"'):
        optimizer_for([nn.Parameter(torch.zeros(3, 3))], rule=rule)


@dataclass(frozen=True)
class Sizes:
    """Notes how many matrices it is given at once."""

    seen: tuple[list[int], ...] = field(default_factory=lambda: ([],), compare=False)

    def remembers(self) -> bool:
        return True

    def before(self, momentum: Tensor) -> None:
        self.seen[0].append(len(momentum))

    def after(self, update: Tensor, memory: Tensor | None) -> None:
        assert memory is not None
        assert len(memory) == len(update)
        self.seen[0].append(len(update))


@pytest.mark.parametrize(("deterministic", "sizes"), [(True, [1] * 6), (False, [3, 3])])
def test_deterministic_gives_a_rule_one_matrix_at_a_time(deterministic: bool, sizes: list[int]) -> None:
    rule = Sizes()
    params = make_params((8, 12), (8, 12), (8, 12))
    run(Muon([group(params)], lr=LR, rule=rule, deterministic=deterministic), params, range(1))
    assert rule.seen[0] == sizes


@dataclass(frozen=True)
class Linear:
    """x ← factor·x + offset, before and after, by which the order of two shows."""

    factor: float
    offset: float
    keeps: bool = False

    def remembers(self) -> bool:
        return self.keeps

    def before(self, momentum: Tensor) -> None:
        momentum.mul_(self.factor).add_(self.offset)

    def after(self, update: Tensor, memory: Tensor | None) -> None:
        assert (memory is not None) == self.keeps
        if memory is not None:
            memory.add_(1.0)
        update.mul_(self.factor).add_(self.offset)
        if self.factor < 0:
            raise RuntimeError("a negative factor")


def stepped(rule: Any, steps: int = 1) -> tuple[nn.Parameter, Muon]:
    param = nn.Parameter(draw((6, 4), 0))
    optimizer = optimizer_for([param], rule=rule, weight_decay=0.0)
    for step in range(steps):
        param.grad = draw((6, 4), 1 + step)
        optimizer.step()
    return param, optimizer


def test_a_list_of_rules_is_applied_in_its_order() -> None:
    """Both before and after: first doubled and then moved is not first moved and then doubled. Each sees its own
    memory only.
    """
    double, move = Linear(2.0, 0.0), Linear(1.0, 1.0, keeps=True)
    together, optimizer = stepped([double, move])
    assert torch.equal(together, stepped(Linear(2.0, 1.0))[0])
    assert torch.equal(stepped([move, double])[0], stepped(Linear(2.0, 2.0))[0])
    assert not torch.equal(together, stepped([move, double])[0])
    assert torch.equal(optimizer.state[together]["rule_memory_Linear"], torch.ones(6, 1, dtype=torch.float64))
    assert torch.equal(stepped(["normuon"], 3)[0], stepped("normuon", 3)[0])
    assert optimizer.routing_table().notes == ("group 0 has the rules Linear, Linear, in this order.",)
    assert "MuonEq(), MuonPlus(), NorMuon(beta2=0.95, axis='rows')" in stepped(NANOCHAT)[1].plan().params[0].how


def test_each_rule_of_a_list_has_a_memory_of_its_own() -> None:
    """They survive saving and loading."""
    rules = ["normuon", Drag(), Linear(2.0, 0.0, keeps=True)]
    param, optimizer = stepped(rules, 2)
    assert list(optimizer.state[param]) == ["momentum_buffer", "rule_memory", "rule_memory_Drag", "rule_memory_Linear"]
    twin = nn.Parameter(param.detach().clone())
    loaded = optimizer_for([twin], rule=rules, weight_decay=0.0)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, opt in ((param, optimizer), (twin, loaded)):
        one.grad = draw((6, 4), 9)
        opt.step()
    assert torch.equal(param, twin)
    param, optimizer = stepped(Drag("columns"), 2)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["rule_memory_Drag"]
    loaded = optimizer_for([twin], rule=Drag("columns"), weight_decay=0.0)
    with pytest.raises(StateError, match=r"0\.experts .*rule_memory_Drag"):
        loaded.load_state_dict(saved)


def test_a_number_per_column_has_no_place_for_parts_that_share_columns() -> None:
    with pytest.raises(ConfigError, match=r'NorMuon keeps one number per column, for which the 2 parts .*axis="rows"'):
        optimizer_for([nn.Parameter(torch.ones(6, 4))], expert_keys=[], split=(3, 3), rule=NorMuon(axis="columns"))


def test_states_of_lists_and_older_ones_load() -> None:
    """What was saved with NorMuon alone goes on under a list with it, which reads the same memory."""
    param, optimizer = stepped(NANOCHAT, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["rule"] == tuple(NANOCHAT)  # plain data, which every way of saving keeps
    twin = nn.Parameter(param.detach().clone())
    loaded = optimizer_for([twin], rule=NANOCHAT, weight_decay=0.0)
    loaded.load_state_dict(saved)
    saved["param_groups"][0]["rule"] = list(NANOCHAT)  # as JSON would have it
    loaded.load_state_dict(saved)
    for one, opt in ((param, optimizer), (twin, loaded)):
        one.grad = draw((6, 4), 9)
        opt.step()
    assert torch.equal(param, twin)
    alone, older = stepped("normuon", 2)
    assert "rule_memory" in older.state[alone]
    with pytest.warns(UserWarning, match="saved with rule='normuon'.*built with"):
        loaded.load_state_dict(older.state_dict())
    assert loaded.param_groups[0]["rule"] == "normuon"
    assert torch.equal(loaded.state[twin]["rule_memory"], older.state[alone]["rule_memory"])
    loaded.param_groups[0]["rule"] = NANOCHAT
    twin.grad = draw((6, 4), 9)
    loaded.step()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ([], 'names no rule: write rule="plain"'),
        (["plain", "normuon"], 'a list holds rules other than "plain", and no lists'),
        ([["muoneq"], "normuon"], "and no lists"),
        (["muoneq", "muon"], "rule='muon' is unknown"),
        (["muoneq", 3], "rule=3 must be one of"),
        (["muoneq", NorMuon], "must be one of"),
        (
            [NorMuon(0.9), "muoneq", "normuon"],
            "two rules would keep their numbers under the key 'rule_memory' of the state",
        ),
        ({"muoneq"}, "must be one of"),
    ],
)
def test_wrong_lists_are_refused(rule: Any, message: str) -> None:
    """In the constructor, in a group, and when a group is changed by hand."""
    param = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ConfigError, match=message):
        optimizer_for([param], rule=rule)
    with pytest.raises(ConfigError, match=message):
        Muon([group([param], rule=rule)])
    optimizer = optimizer_for([param])
    optimizer.param_groups[0]["rule"], param.grad = rule, torch.ones(3, 3)
    with pytest.raises(ConfigError, match=message):
        optimizer.step()
