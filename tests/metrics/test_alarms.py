"""Every alarm: a run that provokes it, and the same run when it is healthy, which raises none."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshmuon import Muon, RoutingWarning
from meshmuon.metrics import Health, Limits

STEPS = 12


class Net(nn.Module):
    """Two matrices for Muon, an embedding-like table and a norm for AdamW."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter((torch.randn(48, 24, generator=generator) / 24**0.5).to(dtype))
        self.down = nn.Parameter((torch.randn(24, 48, generator=generator) / 48**0.5).to(dtype))
        self.head = nn.Parameter((torch.randn(10, 24, generator=generator) / 24**0.5).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x + F.linear(F.gelu(F.linear(x, self.up)), self.down), self.head)


def batches(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(64, 24, generator=generator).to(dtype)
    return x, x[:, :10].argmax(1)


def run(
    *,
    dtype: torch.dtype = torch.float32,
    same_input: bool = False,
    cut: bool = False,
    logits: Any = None,
    **options: Any,
) -> list[str]:
    """Trains and returns the kinds of alarms that were raised."""
    net, health = Net(dtype), Health()
    names = ["layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"] if logits else ["up", "down"]
    if logits:
        options["clip_config"] = {"head_dim": 24, "threshold": 1e4}
        net.down = nn.Parameter(net.down.detach().t().contiguous())
    groups = [
        {"params": [net.up, net.down], "names": names, "use_muon": True},
        {"params": [net.head], "names": ["head"], "use_muon": False, "lr": 1e-3},
    ]
    optimizer = Muon(groups, **{"lr": 1e-3, **options}, metrics=1)
    for step in range(STEPS):
        x, y = batches(0 if same_input else step, dtype)
        if same_input:
            x = torch.ones_like(x)
        hidden = F.linear(x, net.up) @ net.down if logits else net(x)
        loss = F.cross_entropy((hidden if not logits else F.linear(hidden, net.head)).float(), y)
        loss.backward()
        if cut and step >= 4:
            assert net.up.grad is not None
            net.up.grad.zero_()
        optimizer.step(qk_logits=None if logits is None else {0: torch.tensor([logits(step)] * 2)})
        optimizer.zero_grad()
        health.check(optimizer.metrics())
    return sorted({alarm.kind for alarm in health.alarms})


TINY: dict[str, Any] = {"lr": 2e-6, "weight_decay": 0.0}
BF16: dict[str, Any] = {"dtype": torch.bfloat16}
ORIGINAL: dict[str, Any] = {"adjust_lr_fn": "original"}


@pytest.mark.filterwarnings(f"ignore::{RoutingWarning.__module__}.{RoutingWarning.__name__}")
@pytest.mark.parametrize(
    ("options", "alarms"),
    [
        ({}, []),
        ({"lr": 3e-3, "momentum": 0.9}, []),
        ({"lr": 0.2}, ["lr convention", "update too large"]),
        # Keller Jordan's 0.02 with the rule that takes AdamW's, and AdamW's lr with the other rule.
        ({"lr": 0.02}, ["lr convention"]),
        ({"lr": 1e-4, **ORIGINAL}, ["lr convention"]),
        ({"lr": 0.005, **ORIGINAL}, []),
        # Updates that rounding loses; stochastic rounding, or float32, moves the weights.
        ({**BF16, **TINY}, ["lr convention", "stopped moving"]),
        ({**BF16, **TINY, "rounding": "stochastic"}, ["lr convention"]),
        (TINY, ["lr convention"]),
        ({"cut": True}, ["stopped moving"]),
        ({"same_input": True}, ["lr convention", "rank one"]),
        ({"logits": lambda step: 20.0 + step}, []),
        ({"logits": lambda step: 10.0 * 1.5**step}, ["logits grow"]),
        ({"logits": lambda step: 80.0 + 5 * math.sin(step)}, []),
    ],
)
def test_a_run_raises_these_alarms(options: dict[str, Any], alarms: list[str]) -> None:
    assert run(**options) == alarms


def test_the_first_steps_tell_an_lr_that_learns_from_one_that_diverges() -> None:
    """The quickstart's task with two blocks, as docs/faq.md describes its first steps."""
    losses: dict[float, list[float]] = {}
    for lr, alarms in ((1e-2, []), (1e-1, ["lr convention"])):
        torch.manual_seed(0)
        blocks = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
        model = nn.Sequential(nn.Embedding(10, 64), *blocks, nn.Linear(64, 6, bias=False))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RoutingWarning)  # of the large lr
            optimizer = Muon(model, lr=lr, metrics=10)
        health, losses[lr] = Health(), []
        for _ in range(21):
            tokens = torch.randint(10, (64, 16))
            counts = (tokens[:, :, None] == tokens[:, None, :]).sum(-1).clamp(max=6) - 1
            loss = F.cross_entropy(model(tokens).flatten(0, 1), counts.flatten())
            loss.backward()
            optimizer.step()
            assert all(param.grad is None for param in optimizer.param_groups[0]["params"])
            optimizer.zero_grad()
            losses[lr].append(loss.item())
            health.check(optimizer.metrics())
        assert [alarm.kind for alarm in health.alarms] == alarms
    assert abs(losses[1e-2][0] - math.log(6)) < 0.3
    assert losses[1e-2][20] < 0.8 * losses[1e-2][0] < 1.2 * losses[1e-1][0] < losses[1e-1][20]


def test_an_lr_of_the_wrong_convention_is_compared_with_adamws() -> None:
    matrices = {"matrices": {"a": {"update_rms": 0.02}}}
    [(_, _, text)] = Health()._of_rates({**matrices, "adamw": {"b": {"update_rms": 2e-4}, "c": {"update_rms": 0.0}}})
    assert "move by 2.0e-02, 1e+02 times as far as those of AdamW's parameters: probably" in text
    [(_, _, text)] = Health()._of_rates({**matrices, "adamw": {}})
    assert "move by 2.0e-02: probably" in text


def measurement(step: int, **values: float) -> dict[str, Any]:
    healthy = {"gradient_norm": 1.0, "momentum_norm": 1.0, "momentum_stable_rank": 5.0, "weight_norm": 1.0}
    healthy |= {"update_to_weight": 0.01, "update_rms": 0.0, "lr": 0.1}
    matrix = {**healthy, "dtype": "float32", "rounding": "nearest", "rows": 8, "cols": 8, **values}
    return {"step": step, "skipped": False, "matrices": {"w": matrix}, "adamw": {}, "qk_clip": {}}


def test_an_alarm_needs_patience_and_is_raised_once_until_it_is_over() -> None:
    health = Health(Limits(patience=2))
    ratios = [0.5, 0.5, 0.5, 0.01, 0.5, 0.5]
    raised = [health.check(measurement(step, update_to_weight=ratio)) for step, ratio in enumerate(ratios)]
    assert [len(alarms) for alarms in raised] == [0, 1, 0, 0, 0, 1]
    assert str(raised[1][0]).startswith("step 1: w changes by 50%")


def test_a_measurement_that_was_seen_or_skipped_counts_for_nothing() -> None:
    health = Health(Limits(patience=2))
    bad = measurement(1, update_to_weight=0.5)
    assert health.check(bad) == health.check(bad) == health.check({}) == []
    assert health.check({**measurement(2, update_to_weight=0.5), "skipped": True}) == []
    assert len(health.check(measurement(3, update_to_weight=0.5))) == 1


def test_a_weight_of_zeros_may_grow() -> None:
    """Projections that begin at zero have no norm to compare with."""
    health = Health(Limits(patience=1))
    assert health.check(measurement(1, update_to_weight=math.inf, weight_norm=0.0)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_an_update_vanishes_below_a_quarter_of_the_last_digit(dtype: torch.dtype) -> None:
    """Between 1 and 2 a weight's neighbours are ``eps`` apart, and it moves if the update is at least half of that."""
    quarter = torch.finfo(dtype).eps / 8  # relative to a weight of almost 2, which has the smallest last digit

    def kinds(ratio: float) -> list[str]:
        values: dict[str, Any] = {"update_to_weight": ratio, "dtype": str(dtype).removeprefix("torch.")}
        return [alarm.kind for alarm in Health(Limits(patience=1)).check(measurement(1, **values))]

    assert kinds(quarter / 1.01) == ["stopped moving"]
    assert kinds(quarter * 1.01) == []


def test_logits_must_have_grown_above_the_limit() -> None:
    """Judged by the last of them: many small steps count, a maximum that was high before does not."""

    def alarms(logits: list[float]) -> list[str]:
        health = Health(Limits(patience=3, logits=30.0, growth=1.3))
        layers = [{**measurement(step), "qk_clip": {"0": {"max_logit": logit}}} for step, logit in enumerate(logits)]
        return [alarm.kind for layer in layers for alarm in health.check(layer)]

    assert alarms([20.0, 24.0, 28.0, 32.0]) == ["logits grow"]
    assert alarms([20.0, 24.0, 28.0, 29.0]) == [], "below the limit"
    assert alarms([40.0, 44.0, 48.0, 51.0]) == [], "grown too little"
    assert alarms([20.0, 40.0, 39.0, 41.0]) == [], "not in every measurement"
