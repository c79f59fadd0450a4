"""An update that is not finite although its gradient was: with ``nonfinite="skip"`` and ``"raise"`` its matrix stays as
it was.

With ``masked`` the host knows nothing of any tensor, as of those on a GPU.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon import GradientError, Muon
from tests.support.brittle import RULES, TOO_LARGE, Brittle
from tests.support.reference import Run, group, make_params
from tests.support.tensors import assert_bits

SHAPES = ((6, 4), (4, 9), (6, 4), (3, 5, 4))


def guarded(dtype: torch.dtype = torch.float32, rule: type[Brittle] = Brittle, **options: Any) -> Run:
    groups = [
        group(make_params(*SHAPES, dtype=dtype)),
        group(make_params((5,), dtype=dtype), use_muon=False, prefix="norms"),
    ]
    groups[0] |= {"expert_keys": ["weight"]}
    return Run(groups, **{"nonfinite": "skip", "rule": rule(), "weight_decay": 0.1, **options})


def snapshot(run: Run) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in run.everything()]


def last_matrix(run: Run, k: int) -> list[tuple[slice, ...]]:
    """Of each of ``run.everything()``, which part belongs to the last matrix of parameter ``k``."""
    parts = {id(tensor): (slice(-1, None),) if tensor.dim() == 3 else () for tensor in state_of(run, k)}
    return [parts.get(id(tensor), (slice(0, 0),)) if tensor.dim() else () for tensor in run.everything()]


def state_of(run: Run, k: int) -> list[Tensor]:
    """Weight, momentum and rule state; the counter of stochastic rounding counts every step."""
    entry = run.optimizer.state[run.params[k]]
    kept = ("momentum", "rule_memory")
    return [run.params[k], *(entry[key] for key in entry if key.startswith(kept))]


@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"maximize": True},
        {"momentum_dtype": torch.bfloat16},
        {"cautious_weight_decay": True},
        {"deterministic": True},
        {"lr": torch.tensor(0.02)},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "rounding": "stochastic", "cautious_weight_decay": True},
        {"use_distributed_muon": True},
        {"use_distributed_muon": True, "dtype": torch.bfloat16, "momentum_dtype": torch.float32},
    ],
    ids=str,
)
def test_only_that_matrix_stays(options: dict[str, Any], rule: type[Brittle], k: int, path: str) -> None:
    """All else has the bits of a run in which its gradient was small; a stack is one of three experts here."""
    run, usual = guarded(rule=rule, **options), guarded(rule=rule, **options)
    for one in (run, usual):
        one.step(0)
    before, parts = snapshot(run), last_matrix(run, k)
    run.step(1, bad=(k, 2 * TOO_LARGE))
    usual.step(1)
    expected = snapshot(usual)
    for tensor, old, part in zip(expected, before, parts, strict=True):
        if tensor.dim():
            tensor[part] = old[part]
    assert_bits(run.everything(), expected)
    assert (run.optimizer.skipped_matrices, usual.optimizer.skipped_matrices) == (1, 0)
    assert run.optimizer.skipped_steps == 0
    run.step(2)
    assert not torch.equal(run.params[k][parts[k]], before[k][parts[k]])
    assert run.optimizer.skipped_matrices == 1


def test_finite_steps_keep_their_bits() -> None:
    """With any policy, on a host that decides before the step."""
    runs = [guarded(nonfinite=policy) for policy in ("propagate", "skip", "raise")]
    for step in range(3):
        for run in runs:
            run.step(step)
    for run in runs[1:]:
        assert_bits(run.everything(), runs[0].everything())


def test_propagate_guards_nothing() -> None:
    run = guarded(nonfinite="propagate")
    run.step(0, bad=(1, 2 * TOO_LARGE))
    assert not bool(run.params[1].isfinite().all())
    assert run.optimizer.skipped_matrices == 0


def test_raise_names_the_parameter_in_the_next_step_and_only_there(path: str) -> None:
    run = guarded(nonfinite="raise")
    run.step(0)
    before = snapshot(run)
    run.step(1, bad=(1, 2 * TOO_LARGE))
    assert_bits([run.params[1]], [before[1]])
    stepped = snapshot(run)
    with pytest.raises(GradientError, match=r"^layers\.1\.weight had an update that is not finite in the last step"):
        run.step(2)
    assert_bits(run.everything(), stepped)
    run.step(2)
    assert not torch.equal(run.params[1], before[1])
    assert run.optimizer.skipped_matrices == 1


def test_a_gradient_that_is_not_finite_after_such_an_update(path: str) -> None:
    """The older fault is reported first, and the newer one by the next step."""
    run = guarded(nonfinite="raise")
    run.step(0, bad=(0, 2 * TOO_LARGE))
    with pytest.raises(GradientError, match="had an update"):
        run.step(1, bad=(2, float("nan")))
    with pytest.raises(GradientError, match=r"^layers\.2\.weight has a gradient"):
        run.step(1, bad=(2, float("nan")))


def test_a_scheme_of_the_user(path: str) -> None:
    """It is called for a batch, of which one matrix becomes NaN."""

    def divide(batch: Tensor) -> Tensor:
        return batch / torch.where(batch.abs().amax((-2, -1), keepdim=True) > TOO_LARGE, torch.nan, 2.0)

    run = Run([group(make_params((6, 4), (6, 4)))], nonfinite="skip", scheme=divide)
    run.step(0)
    before = snapshot(run)
    run.step(1, bad=(1, 2 * TOO_LARGE))
    assert_bits([run.params[1]], [before[1]])
    assert not torch.equal(run.params[0], before[0])
    assert run.optimizer.skipped_matrices == 1


def test_parts_of_a_fused_weight() -> None:
    """Rows 4 to 9 of a (9, 6) weight are a matrix: they stay, and the rows before are stepped."""
    run = Run([{**group(make_params((9, 6))), "split": (4, 5)}], nonfinite="skip", rule=Brittle())
    run.step(0)
    before = snapshot(run)
    run.step(1, bad=(0, 2 * TOO_LARGE))
    for now, old in zip(run.everything()[:2], before, strict=False):
        assert_bits([now[4:]], [old[4:]])
        assert not bool((now[:4] == old[:4]).any())


def test_with_offloaded_state_and_idle_parameters() -> None:
    run = guarded()
    run.optimizer.turn_on_cpu_offload()
    run.step(0)
    before = snapshot(run)
    run.step(1, bad=(0, 2 * TOO_LARGE), without=[2])
    assert_bits([run.params[0], run.params[2]], [before[0], before[2]])
    assert run.optimizer.skipped_matrices == 1, "an idle matrix that shares the batch does not count"


def test_a_copy_still_guards_and_counts_from_zero() -> None:
    run = guarded()
    run.step(0, bad=(0, 2 * TOO_LARGE))
    optimizer: Muon = pickle.loads(pickle.dumps(run.optimizer))
    assert optimizer.skipped_matrices == 0
    param = optimizer.param_groups[0]["params"][0]
    weight = param.detach().clone()
    assert isinstance(param, nn.Parameter)
    param.grad = torch.full_like(param, 2 * TOO_LARGE)
    optimizer.step()
    assert torch.equal(param, weight)
    assert optimizer.skipped_matrices == 1
