"""Each update rule against its formula, written out in full precision for one matrix at a time."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshmuon import (
    ConfigError,
    Hyperball,
    Muon,
    MuonEq,
    NorMuon,
    OrthogonalizeError,
    StateError,
    UpdateFloor,
    WeightNumbers,
    polar_express,
)
from tests.support.bounds import moved_error, orthogonalize_error, unit
from tests.support.reference import group, make_params, run
from tests.support.rules import Drag
from tests.support.threads import run_threads

SHAPES = [(6, 4), (4, 6), (5, 5), (1, 7), (7, 1)]
LR, DECAY, MU = 0.01, 0.5, 0.9
NANOCHAT = ["muoneq", "muon_plus", "normuon"]
LISTS = [NANOCHAT, NANOCHAT[:2], NANOCHAT[::2], ["muoneq", "normuon", "muon_plus"]]
# the first two are never cautious
SCALING = ["hyperball", ["normuon", "hyperball"], "update_floor", ["update_floor", "muoneq"]]
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
        if "update_floor" in self.rules and 0 < scaled.norm() < 0.35 * self.weight.norm():
            scaled = scaled * 0.35 * self.weight.norm() / scaled.norm()
        if "hyperball" in self.rules:
            radius = self.weight.norm()
            moved = self.weight - self.sign * LR * radius * found / found.norm()
            self.weight = radius * moved / moved.norm()
            return
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


ALL = [*SCALING, "plain", "normuon", "muon_plus", "muoneq", *LISTS]


@pytest.mark.parametrize(
    ("rule", "cautious"), [*((rule, False) for rule in ALL), *((rule, True) for rule in ALL[2:])], ids=str
)
@pytest.mark.parametrize("maximize", [False, True])
def test_against_the_formula(rule: Any, cautious: bool, maximize: bool) -> None:
    scales = 1.0, 0.3, 3.0, 0.5, 0.4  # 0.2·√(mn) over the norm of the weight is below 0.35 for some of them
    params = [nn.Parameter(draw(shape, k) * scale) for k, (shape, scale) in enumerate(zip(SHAPES, scales, strict=True))]
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


@pytest.mark.parametrize("rule", ["normuon", "muon_plus", "muoneq", "hyperball", UpdateFloor(3.0), NANOCHAT], ids=str)
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
    with pytest.raises(ConfigError, match=r"Hyperball: rms=0\.0 must be a positive number"):
        Hyperball(rms=0.0)
    with pytest.raises(ConfigError, match="UpdateFloor: ratio=inf must be a positive number"):
        UpdateFloor(math.inf)
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
    assert str(optimizer.routing_table()).endswith("note: group 0 has the rules Linear, Linear, in this order.")
    assert "MuonEq(), MuonPlus(), NorMuon(beta2=0.95, axis='rows')" in stepped(NANOCHAT)[1].plan().params[0].how


def test_a_failing_rule_of_a_list_leaves_weights_and_memory() -> None:
    param, optimizer = stepped(["muoneq", NorMuon()])
    before = [param.detach().clone(), *(value.clone() for value in optimizer.state[param].values())]
    optimizer.param_groups[0]["rule"] = [MuonEq(), "normuon", Linear(-1.0, 0.0)]
    param.grad = draw((6, 4), 5)
    with pytest.raises(OrthogonalizeError, match="a negative factor"):
        optimizer.step()
    assert all(map(torch.equal, [param.detach(), *optimizer.state[param].values()], before))


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


@dataclass(frozen=True)
class Seen:
    """Keeps the numbers of weights that it sees, and doubles both factors."""

    seen: list[WeightNumbers] = field(default_factory=list, compare=False)

    def remembers(self) -> bool:
        return False

    def before(self, momentum: Tensor) -> None: ...

    def after(self, update: Tensor, memory: Tensor | None) -> None: ...

    def scale(self, numbers: WeightNumbers) -> tuple[Tensor, Tensor]:
        self.seen.append(numbers)
        return 2 * numbers.decay, 2 * numbers.rate


@dataclass(frozen=True)
class Returns(Seen):
    """Returns what it is told to."""

    what: Any = None

    def scale(self, numbers: WeightNumbers) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], self.what)


@pytest.mark.parametrize(
    "what", [None, torch.ones(1), (1.0, 0.5), (torch.ones(1), torch.ones(7)), (torch.ones(1),) * 3], ids=str
)
def test_refuses_factors_that_are_not_two_numbers_per_matrix(what: Any) -> None:
    param = nn.Parameter(draw((6, 4), 0))
    param.grad = draw((6, 4), 1)
    optimizer = optimizer_for([param], rule=["normuon", Returns(what=what)])
    with pytest.raises(ConfigError, match=r"its scale\(\) must return two tensors \(decay, rate\)"):
        optimizer.step()
    assert torch.equal(param.detach(), draw((6, 4), 0))
    assert not optimizer.state[param].get("momentum_buffer", torch.zeros(1)).any()


def test_a_rule_of_ones_own_sees_numbers_of_the_weight() -> None:
    """Those of the update after all rules. The factors of one rule are what the next begins with."""
    weight, plain = draw((6, 4), 0), nn.Parameter(draw((6, 4), 0))
    first, last = Seen(), Seen()
    param = nn.Parameter(weight.clone())
    optimizer, other = optimizer_for([param], rule=[first, last, "muon_plus"]), optimizer_for([plain], rule="muon_plus")
    param.grad = plain.grad = draw((6, 4), 1)
    optimizer.step()
    other.step()
    tried, numbers = first.seen
    assert tried.weight_norm.tolist() == [1.0]
    update = (weight * (1 - LR * DECAY) - plain.detach()) / (LR * 0.2 * 6**0.5)
    found = [float(value) for value in (numbers.weight_norm, numbers.update_norm, numbers.inner)]
    assert found == pytest.approx([float(weight.norm()), 2.0, float((weight * update).sum())], rel=1e-8)
    assert (float(numbers.lr), float(numbers.decay), numbers.shape) == (LR, 1 - LR * DECAY, (6, 4))
    assert float(numbers.rate) == pytest.approx(LR * 0.2 * 6**0.5)
    assert torch.equal(last.seen[1].rate, 2 * numbers.rate)
    torch.testing.assert_close(param.detach(), 4 * plain.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hyperball_keeps_the_norm(dtype: torch.dtype) -> None:
    """To rounding, over many steps, also with bfloat16 weights, whose norm grows by rounding if it is not given."""
    start = draw((24, 32), 0) * 0.1
    param, rms = nn.Parameter(start.to(dtype)), float(start.square().mean().sqrt())
    rounding = "stochastic" if dtype == torch.bfloat16 else "nearest"
    optimizer = optimizer_for(
        [param], rule=Hyperball(rms=rms), lr=0.003, rounding=rounding, scheme="keller", ns_steps=5
    )
    for step in range(100):
        before, param.grad = param.detach().double(), draw((24, 32), step).to(dtype)
        optimizer.step()
        after = param.detach().double()
        assert float(after.norm()) == pytest.approx(float(start.norm()), rel=8 * unit(dtype) / 24)
    turned = torch.rad2deg(torch.acos((before * after).sum() / before.norm() / after.norm()))
    assert float(turned) == pytest.approx(math.degrees(0.003), rel=0.5 if dtype == torch.bfloat16 else 0.02)


@pytest.mark.parametrize(
    "rules",
    [[UpdateFloor(9.0), Hyperball(rms=3.0)], [Returns([], (torch.ones(1), torch.ones(1)))]],
    ids=["built in", "own"],
)
def test_an_lr_of_zero_changes_nothing(rules: list[Any]) -> None:
    param = nn.Parameter(draw((6, 4), 0))
    optimizer = optimizer_for([param], rule=rules, lr=0.0)
    param.grad = draw((6, 4), 1)
    optimizer.step()
    assert torch.equal(param.detach(), draw((6, 4), 0))


def test_hyperball_refuses_zeros_unless_it_is_told_a_norm() -> None:
    experts = draw((3, 4, 6), 0)
    experts[1] = 0
    param = nn.Parameter(experts)
    param.grad = draw((3, 4, 6), 1)
    optimizer = optimizer_for([param], rule="hyperball")
    with pytest.raises(
        ConfigError, match=r"0\.experts: Hyperball keeps the norm of a weight, and here is a matrix of zeros"
    ):
        optimizer.step()
    assert not optimizer.state[param]
    optimizer.param_groups[0]["rule"] = Hyperball(rms=0.5)
    optimizer.step()
    torch.testing.assert_close(
        param.detach().flatten(1).norm(dim=1), torch.full((3,), 0.5 * 24**0.5, dtype=torch.float64)
    )
    assert "group 0: Hyperball moves each matrix by 0.01 of its norm a step" in str(optimizer.routing_table())
    with pytest.raises(ConfigError, match="Hyperball keeps the norm of a weight and takes no weight decay"):
        optimizer_for([param], rule=["normuon", "hyperball"], cautious_weight_decay=True)


def test_hyperball_refuses_a_fused_weight_with_zeros_in_one_part() -> None:
    weight = draw((6, 4), 0)
    weight[4:] = 0
    param = nn.Parameter(weight)
    param.grad = draw((6, 4), 1)
    with pytest.raises(ConfigError, match="here is a matrix of zeros, which would stay zero"):
        optimizer_for([param], rule="hyperball", split=(4, 2), expert_keys=None).step()
    optimizer_for([param], rule="hyperball", split=(2, 4), expert_keys=None).step()
    assert param.detach()[4:].any()


@pytest.mark.parametrize("scale", [1e-36, 1e30, 1e36])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hyperball_on_weights_near_the_ends_of_the_range(dtype: torch.dtype, scale: float) -> None:
    """Weights that are larger or smaller by a power of two take the same steps, up to that power."""
    factor = 2.0 ** round(math.log2(scale))
    params = [nn.Parameter((draw((5, 7), 0) * size).to(dtype)) for size in (1.0, factor)]
    optimizer = optimizer_for(params, rule="hyperball", expert_keys=None)
    for step in range(3):
        for param in params:
            param.grad = draw((5, 7), step).to(dtype)
        optimizer.step()
    usual, scaled = (param.detach().double() for param in params)
    assert usual.ne(draw((5, 7), 0).to(dtype)).any()
    torch.testing.assert_close(scaled / factor, usual, rtol=0, atol=float(torch.finfo(dtype).eps * usual.abs().max()))


FUSED = {"split": (4, 2), "expert_keys": None}
ZEROS: dict[str, tuple[tuple[int, ...], tuple[slice, ...], dict[str, Any], bool]] = {  # shape, zeros, options; refused
    "half of the rows": ((4, 6), (slice(2, 4),), {"expert_keys": None}, False),
    "half of the columns": ((4, 6), (slice(None), slice(3)), {"expert_keys": None}, False),
    "a matrix": ((4, 6), (slice(None),), {"expert_keys": None}, True),
    "one part, which two ranks share": ((6, 4), (slice(4),), FUSED, True),
    "a part but for a row": ((6, 4), (slice(3),), FUSED, False),
    "an expert": ((3, 4, 6), (slice(1, 2),), {}, True),
    "half of each expert": ((3, 4, 6), (slice(None), slice(2)), {}, False),
    "one part of an expert": ((3, 6, 4), (slice(2, 3), slice(4, 6)), {"split": (4, 2)}, True),
}


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("case", ZEROS)
def test_hyperball_refuses_zeros_by_matrix_on_every_layout(case: str, dim: int | None) -> None:
    """On all ranks in the same words before anything is written; it steps once the matrix has other values."""
    shape, zeros, options, refused = ZEROS[case]
    weight = draw(shape, 0)
    weight[zeros] = 0

    def texts(rank: int) -> str:
        mesh, placements = init_device_mesh("cpu", (2,)), [Replicate() if dim is None else Shard(dim)]
        param = nn.Parameter(distribute_tensor(weight, mesh, placements))
        param.grad = distribute_tensor(draw(shape, 1), mesh, placements)
        optimizer, text = optimizer_for([param], rule="hyperball", **options), ""
        if refused:
            with pytest.raises(ConfigError) as error:
                optimizer.step()
            text = str(error.value)
            assert not optimizer.state[param]
            param.detach().to_local().fill_(1.0)
        optimizer.step()
        return text

    (text,) = set(run_threads(2, texts))
    assert ("here is a matrix of zeros, which would stay zero" in text) is refused


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
