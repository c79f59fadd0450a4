"""Gradients that come and go: the plan stays, what has no gradient stays as it is, and every bit is that of a new
plan.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshmuon import Muon
from meshmuon.agree import local_planner
from tests.support.reference import polar_factor
from tests.support.tensors import bits, seeded

SHAPES = [(6, 4), (6, 4), (4, 6), (9, 4), (6, 4), (3, 6, 4), (2, 6, 4), (18, 4), (6, 4), (6, 4), (7,), (2,), (5, 3)]
NAMES = [f"layers.{k}.weight" for k in range(5)] + ["layers.5.experts", "layers.6.experts", "layers.7.qkv"]
NAMES += ["late.8.weight", "late.9.weight", "norm.10", "norm.11", "embedding.12"]
ALL = [True] * len(SHAPES)
GROUPS = (range(8), range(8, 10), range(10, 13))  # Muon, Muon with options of its own, AdamW
Event = Callable[[Muon], None]


def build(**options: Any) -> Muon:
    params = [nn.Parameter(seeded(shape, 7 + k)) for k, shape in enumerate(SHAPES)]
    groups = [
        {"params": [params[k] for k in indices], "names": [NAMES[k] for k in indices], "use_muon": use_muon}
        for indices, use_muon in zip(GROUPS, (True, True, False), strict=True)
    ]
    groups[1].update(lr=0.003, weight_decay=0.2)
    split = {"split": lambda name, shape: (12, 3, 3) if name.endswith("qkv") else None, "expert_keys": ["experts"]}
    return Muon(groups, **{"lr": 0.005, **split, **options})


def params_of(optimizer: Muon) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def give(optimizer: Muon, step: int, active: Sequence[bool]) -> Muon:
    """The optimizer, with gradients for ``active`` parameters."""
    for k, (param, flag) in enumerate(zip(params_of(optimizer), active, strict=False)):
        param.grad = seeded(param.shape, 1000 * (step + 1) + k).to(param.dtype) if flag else None
    return optimizer


def held(optimizer: Muon) -> list[dict[str, Tensor]]:
    """Bits of each parameter and of all of its state, by name of the state."""
    return [
        {"param": bits(param).clone()}
        | {key: bits(value).clone() for key, value in optimizer.state.get(param, {}).items()}
        for param in params_of(optimizer)
    ]


def assert_held(actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert [list(tensors) for tensors in actual] == [list(tensors) for tensors in expected]
    for k, (tensors, others) in enumerate(zip(actual, expected, strict=True)):
        assert all(torch.equal(tensors[key], others[key]) for key in tensors), NAMES[k]


def patterns(steps: int, seed: int, share: float = 0.4) -> list[list[bool]]:
    chooser = random.Random(seed)
    return [ALL, *([chooser.random() > share for _ in SHAPES] for _ in range(steps - 1))]


def run(
    active: list[list[bool]], *, anew: bool, events: dict[int, Event] | None = None, **options: Any
) -> list[list[dict[str, Tensor]]]:
    """All parameters and state after each step; with ``anew`` the optimizer forgets its plan before each."""
    optimizer, seen = build(**options), []
    for step, flags in enumerate(active):
        if events and step in events:
            events[step](optimizer)
        give(optimizer, step, flags)
        if anew:
            optimizer._reset()
        before = held(optimizer)
        optimizer.step()
        seen.append(held(optimizer))
        for k, flag in enumerate(flags):
            if not flag:  # nothing changes, nothing is created
                assert_held(seen[-1][k : k + 1], before[k : k + 1])
                assert params_of(optimizer)[k].grad is None
    return seen


def assert_as_anew(active: list[list[bool]], **options: Any) -> list[list[dict[str, Tensor]]]:
    """Every bit after every step is that of an optimizer that plans anew."""
    kept = run(active, anew=False, **options)
    for mine, expected in zip(kept, run(active, anew=True, **options), strict=True):
        assert_held(mine, expected)
    return kept


OPTIONS: list[dict[str, Any]] = [
    {},
    {"chunk_size": 1},
    {"memory_budget": 1, "none_grad": False},
    {"memory_budget": 2000},
    {"nesterov": False, "momentum_dtype": torch.bfloat16},
    {"rule": "normuon"},
    {"rule": "muoneq", "deterministic": True},
    {"cautious_weight_decay": True, "maximize": True},
    {"scheme": polar_factor},
    {"scheme": "zolotarev"},
    {"use_distributed_muon": True},
    {"use_distributed_muon": True, "rule": "normuon"},
    {"nonfinite": "skip", "lr": torch.tensor(0.005)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options) or "plain")
def test_every_bit_is_that_of_a_new_plan(options: dict[str, Any]) -> None:
    active = patterns(8, seed=len(str(options)))
    assert_as_anew(active, **options)


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.booleans(), min_size=len(SHAPES), max_size=len(SHAPES)), min_size=2, max_size=5), st.booleans()
)
def test_any_pattern(active: list[list[bool]], remembers: bool) -> None:
    """Also parameters whose first gradient comes late, and steps without any."""
    options = {"allow_inactive": True, "rule": "normuon" if remembers else "plain"}
    assert_as_anew(active, **options)


@pytest.mark.parametrize("options", [{}, {"rule": "normuon"}, {"chunk_size": 1}], ids=str)
def test_nothing_is_planned_or_prepared_again(options: dict[str, Any]) -> None:
    optimizer = build(**options)
    plans, sizes, made = [], [], []
    with (
        patch.object(local_planner, "make_plan", wraps=local_planner.make_plan) as planned,
        patch.object(optimizer._executor, "prepare", wraps=optimizer._executor.prepare) as prepared,
    ):
        for step, flags in enumerate([*patterns(8, seed=1), [False] * len(SHAPES)]):
            give(optimizer, step, flags).step()
            plans.append(optimizer.plan())
            sizes.append(optimizer.workspace_bytes())
            made.append(optimizer._step_params._cached)
    assert planned.call_count == prepared.call_count == 1
    assert all(plan is plans[0] for plan in plans)
    assert set(sizes) == {sizes[0]}
    assert made[0]
    assert all(step_params is made[1] for step_params in made[1:])  # the first step has created state


def test_a_batch_without_gradients_is_not_computed() -> None:
    """And idle places of other batches show a user's scheme nothing that it would not see anyway."""
    seen: list[Tensor] = []

    def scheme(batch: Tensor) -> Tensor:
        seen.append(batch.clone())
        return polar_factor(batch)

    optimizer = build(scheme=scheme, memory_budget=2000)
    give(optimizer, 0, ALL).step()
    batches = len(seen)
    seen.clear()
    give(optimizer, 1, [k in (0, 5) for k in range(len(SHAPES))]).step()
    assert 0 < len(seen) < batches
    with torch.no_grad():
        own = [*seeded(SHAPES[0], 2000)[None], *seeded(SHAPES[5], 2005)]
    momenta = [optimizer.state[params_of(optimizer)[k]]["momentum_buffer"] for k in (0, 5)]
    expected = [grad + 0.95 * momentum for grad, momentum in zip(own, [momenta[0], *momenta[1]], strict=True)]
    matrices = [matrix if matrix.shape == (6, 4) else matrix.mT for batch in seen for matrix in batch]
    assert len(matrices) >= len(expected)
    assert all(any(torch.allclose(matrix, shown) for shown in expected) for matrix in matrices)


def test_a_bad_matrix_does_not_reach_its_neighbours() -> None:
    """What lies in an idle place is not applied, even if it is NaN."""
    optimizer = build()
    give(optimizer, 0, ALL).step()
    before = held(optimizer)
    give(optimizer, 1, [k == 0 for k in range(len(SHAPES))])
    first = params_of(optimizer)[0]
    assert first.grad is not None
    first.grad.fill_(torch.nan)
    optimizer.step()
    assert_held(held(optimizer)[1:], before[1:])
    assert not first.isfinite().any()


def test_state_that_was_deleted_while_idle_is_not_created_before_it_is_needed() -> None:
    gone = [k not in (0, 8) for k in range(len(SHAPES))]

    def delete(optimizer: Muon) -> None:
        for k in (0, 8):
            del optimizer.state[params_of(optimizer)[k]]

    active = [ALL, gone, gone, [k != 3 for k in range(len(SHAPES))], ALL]
    kept = assert_as_anew(active, events={2: delete}, rule="normuon")
    assert set(kept[2][0]) == {"param"}
    assert "momentum_buffer" in kept[3][0]


def test_bad_state_of_an_idle_parameter_is_refused_once_it_is_used() -> None:
    optimizer = build()
    give(optimizer, 0, ALL).step()
    optimizer.state[params_of(optimizer)[0]]["momentum_buffer"] = torch.zeros(3, 3)
    give(optimizer, 1, [k != 0 for k in range(len(SHAPES))]).step()
    before = held(optimizer)
    give(optimizer, 2, ALL)
    for _ in range(2):
        with pytest.raises(Exception, match=r"layers\.0\.weight"):
            optimizer.step()
        assert_held(held(optimizer), before)


def test_gradients_that_do_not_fit_are_noticed_when_they_come_back() -> None:
    optimizer = build()
    for step in range(3):
        give(optimizer, step, [k != 1 or step == 0 for k in range(len(SHAPES))]).step()
    before = held(optimizer)
    give(optimizer, 3, ALL)
    params_of(optimizer)[1].grad = torch.zeros(SHAPES[1]).to_sparse()
    with pytest.raises(Exception, match="sparse"):
        optimizer.step()
    assert_held(held(optimizer), before)


def _add_group(optimizer: Muon) -> None:
    param = nn.Parameter(seeded((6, 4), 99))
    optimizer.add_param_group({"params": [param], "names": ["new.weight"], "use_muon": True})


def _freeze(optimizer: Muon) -> None:
    params_of(optimizer)[2].requires_grad_(False)
    params_of(optimizer)[11].requires_grad_(False)


def _reload(optimizer: Muon) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def _other_rate(optimizer: Muon) -> None:
    optimizer.param_groups[0].update(lr=0.001, weight_decay=0.0)
    optimizer.param_groups[2].update(lr=0.002)


EVENTS: dict[str, dict[int, Event]] = {
    "a group is added": {3: _add_group},
    "frozen and thawed": {
        2: _freeze,
        5: lambda optimizer: [p.requires_grad_(True) for p in params_of(optimizer)] and None,
    },
    "a checkpoint is loaded": {3: _reload, 5: _reload},
    "offloaded and back": {2: Muon.turn_on_cpu_offload, 5: Muon.turn_off_cpu_offload},
    "other hyperparameters": {3: _other_rate},
    "another rule": {3: lambda optimizer: optimizer.param_groups[0].update(rule="normuon")},
}


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("rule", ["plain", "normuon"])
def test_between_events(name: str, rule: str) -> None:
    active = patterns(7, seed=len(name))
    assert_as_anew(active, events=EVENTS[name], rule=rule)


def test_a_step_that_is_skipped_counts_for_nothing() -> None:
    """A parameter whose only gradient so far came in a skipped step has no state and is not planned."""
    optimizer = build(nonfinite="skip")
    give(optimizer, 0, [k < 5 for k in range(len(SHAPES))]).step()
    give(optimizer, 1, ALL)
    first = params_of(optimizer)[0]
    assert first.grad is not None
    first.grad.fill_(torch.inf)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    give(optimizer, 2, [k < 4 for k in range(len(SHAPES))]).step()
    assert len(optimizer.plan().params) == 5
    assert params_of(optimizer)[8] not in optimizer.state


def test_clipped_heads_of_idle_weights() -> None:
    """QK-clip scales weights whether or not they had a gradient."""
    clip = {"q_indices": [0, 1], "k_indices": [0, 1], "head_dim": 4, "threshold": 1.0}

    def steps(anew: bool) -> list[Tensor]:
        weights = [nn.Parameter(seeded((8, 8), k)) for k in range(3)]
        names = ["layers.0.wq.weight", "layers.0.wk.weight", "layers.0.up.weight"]
        optimizer = Muon([{"params": weights, "names": names, "use_muon": True}], lr=0.005, clip_config=clip)
        for step, active in enumerate([(0, 1, 2), (1, 2), (2,), (0, 2)]):
            for k, weight in enumerate(weights):
                weight.grad = seeded((8, 8), 10 * step + k) if k in active else None
            if anew:
                optimizer._reset()
            optimizer.step(qk_logits={0: torch.tensor([2.0, 0.5])})
        return [weight.detach().clone() for weight in weights]

    assert all(map(torch.equal, steps(False), steps(True)))
