"""``Muon(metrics=…)`` and ``optimizer.metrics()`` on one device, against torch's own norms and decompositions."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon import ConfigError, Muon, NorMuon, orthogonalize, polar_express
from meshmuon.device import Transfers
from meshmuon.metrics import Metrics, flat
from meshmuon.metrics.report import Measurement
from meshmuon.metrics.spectra import probes
from meshmuon.metrics.weights import FIRST_HALVES
from meshmuon.params.lr import lr_factor

SHAPES = ((12, 8), (6, 20), (9, 9))


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in (*SHAPES, (7,))]


def built(params: list[nn.Parameter], metrics: Any = 1, **options: Any) -> Muon:
    groups = [
        {"params": params[:-1], "names": [f"layers.{k}.up.weight" for k in range(len(params) - 1)], "use_muon": True},
        {"params": params[-1:], "names": ["norm.weight"], "use_muon": False},
    ]
    return Muon(groups, **{"lr": 0.01, **options}, metrics=metrics)


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def train(optimizer: Muon, params: list[nn.Parameter], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        give_gradients(params, step)
        optimizer.step()


def close(found: float, expected: Tensor | float, rel: float = 1e-5) -> bool:
    return math.isclose(found, float(expected), rel_tol=rel, abs_tol=1e-7)


def test_numbers_are_those_of_torch() -> None:
    params = parameters()
    optimizer = built(params, Metrics(every=1, iterations=20), scheme="polar_express", momentum=0.9, weight_decay=0.0)
    train(optimizer, params, 3)
    before = [param.detach().clone() for param in params]
    buffers = [optimizer.state[param]["momentum_buffer"].clone() for param in params[:-1]]
    give_gradients(params, 3)
    grads = [param.grad.clone() for param in params if param.grad is not None]
    optimizer.step()
    metrics = optimizer.metrics()
    assert metrics["step"] == 4
    for k, values in enumerate(metrics["matrices"].values()):
        ahead = grads[k] + 0.9 * (grads[k] + 0.9 * buffers[k])
        singular = torch.linalg.svdvals(ahead)
        assert close(values["gradient_norm"], grads[k].norm())
        assert close(values["momentum_norm"], ahead.norm())
        assert close(values["momentum_sigma"], singular[0], 1e-4)
        assert close(values["momentum_stable_rank"], ahead.norm() ** 2 / singular[0] ** 2, 1e-4)
        assert close(values["weight_norm"], before[k].norm())
        change = params[k].detach() - before[k]
        assert close(values["update_norm"], change.norm(), 1e-4)
        assert close(values["update_to_weight"], change.norm() / before[k].norm(), 1e-4)
        assert close(values["update_rms"], change.square().mean().sqrt(), 1e-4)
        assert close(values["lr"], 0.01 * lr_factor("match_rms_adamw", *SHAPES[k]))
        update = orthogonalize(ahead.unsqueeze(0), polar_express())[0]
        spread = (1 - torch.linalg.svdvals(update) ** 2).abs()
        assert spread.min() - 1e-4 <= values["orthogonality"] <= spread.max() + 1e-4
        assert 0 <= values["below_bound"] <= spread.max() ** 4 + 1e-4
        assert values["bound"] == pytest.approx(1e-3, rel=0.02)
    norm = metrics["adamw"]["norm.weight"]
    change = params[-1].detach() - before[-1]
    assert close(norm["update_rms"], change.square().mean().sqrt(), 1e-4)
    assert close(norm["update_to_weight"], change.norm() / before[-1].norm(), 1e-4)
    assert close(norm["gradient_norm"], grads[-1].norm())


def adversarial_weights(rows: int, cols: int, seed: int) -> list[nn.Parameter]:
    """Weights with spectra that are hard for a power iteration: crowded at the top, one value just above the
    others, flat.
    """
    generator, n = torch.Generator().manual_seed(seed), min(rows, cols)
    left, right = (torch.linalg.qr(torch.randn(size, n, generator=generator))[0] for size in (rows, cols))
    k = torch.arange(n)
    crowded = [
        torch.cat([torch.ones(1), (1 - gap) * (0.5 + 0.5 * torch.cos(math.pi * k[1:] / n)).sqrt()])
        for gap in (0.1, 0.02)
    ]
    outliers = [torch.where(k == 0, 1.0, 1 - gap) for gap in (0.3, 0.1, 0.03, 0.01)]
    spectra = [*crowded, *outliers, 1 - k / n, 1 / (1.0 + k), 0.9**k, (k == 0).float(), torch.ones(n), torch.zeros(n)]
    found = [(left * spectrum) @ right.t() for spectrum in spectra]
    found.append(torch.randn(rows, cols, generator=generator))
    return [nn.Parameter(weight * 10.0**power) for weight, power in zip(found, range(-6, 7), strict=True)]


@pytest.mark.parametrize(("rows", "cols"), [(96, 160), (160, 96), (128, 128)])
def test_the_singular_value_of_a_weight_is_approached_from_below(rows: int, cols: int) -> None:
    weights = adversarial_weights(rows, cols, seed=rows)
    params = [*weights, nn.Parameter(torch.randn(7))]
    optimizer = built(params, lr=0.0, scheme="keller", ns_steps=1)  # the weights stand still
    true = [torch.linalg.svdvals(weight.detach().double())[0].item() for weight in weights]
    shares = [[0.0] * len(weights)]
    for step in range(31):
        train(optimizer, params, 1, first=step)
        sigmas = [values["weight_sigma"] for values in optimizer.metrics()["matrices"].values()]
        shares.append([found / sigma if sigma else 1.0 for found, sigma in zip(sigmas, true, strict=True)])
        assert all(before * (1 - 1e-5) <= now <= 1 + 1e-5 for before, now in zip(*shares[-2:], strict=True)), (
            "it only grows"
        )
    assert min(shares[1]) >= 0.88
    assert shares[1][-1] >= 0.95, "of the random weight"
    assert min(shares[-1]) >= 0.96
    values = next(iter(optimizer.metrics()["matrices"].values()))
    assert values["weight_stable_rank"] == pytest.approx(values["weight_norm"] ** 2 / values["weight_sigma"] ** 2)


def test_the_singular_value_of_a_weight_follows_it() -> None:
    """A weight to which another direction is added, step by step, until that is the longest."""
    weight, other = nn.Parameter(torch.diag(torch.linspace(1, 0.1, 24))), torch.zeros(24, 24)
    other[5, 7] = 1.0
    params = [weight, nn.Parameter(torch.randn(7))]
    optimizer = built(params, lr=0.0)
    for step in range(40):
        train(optimizer, params, 1, first=step)
        with torch.no_grad():
            weight.add_(other, alpha=0.1 if step < 20 else 0.0)
    found = optimizer.metrics()["matrices"]["layers.0.up.weight"]["weight_sigma"]
    assert found == pytest.approx(torch.linalg.svdvals(weight.detach())[0].item(), rel=1e-3)


def test_a_weight_that_begins_at_zero_has_no_impossible_rank() -> None:
    """Its vector was looked for in vain, and is found by and by; here it has the least of what is largest in the
    weight.
    """
    weight, start = nn.Parameter(torch.zeros(24, 24)), probes(24)[0]
    params = [weight, nn.Parameter(torch.ones(7))]
    optimizer = built(params, lr=0.0)
    train(optimizer, params, 1)
    with torch.no_grad():
        weight.diagonal()[start.abs().argsort()] = torch.cat([torch.ones(1), torch.linspace(0.7, 0.1, 23)])
    assert (weight.detach().double() @ start).norm() < start.norm() * weight.detach().norm() / math.sqrt(24)
    for step in range(1, 60):
        train(optimizer, params, 1, first=step)
        values = optimizer.metrics()["matrices"]["layers.0.up.weight"]
        assert values["weight_stable_rank"] <= 24 * (1 + 1e-5)
        assert values["weight_sigma"] <= 1 + 1e-5
    assert values["weight_sigma"] == pytest.approx(1.0, rel=1e-3)


def test_measures_every_kth_step_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    optimizer = built(params, 3)
    steps = []
    for step in range(8):
        train(optimizer, params, 1, first=step)
        steps.append(optimizer.metrics().get("step"))
    assert steps == [None, None, 3, 3, 3, 6, 6, 6]


@pytest.mark.parametrize(
    "options", [{}, {"rule": NorMuon()}, {"nesterov": False}, {"chunk_size": 1}, {"deterministic": True}], ids=str
)
def test_the_update_keeps_its_bits(options: dict[str, Any]) -> None:
    results = []
    for metrics in (None, 1, Metrics(every=2, weight_spectra=False)):
        params = parameters()
        train(built(params, metrics, **options), params, 4)
        results.append(params)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_gradients_that_are_missing_and_parameters_that_are_idle() -> None:
    params = parameters()
    optimizer = built(params)
    train(optimizer, params, 2)
    give_gradients(params, 2)
    params[1].grad = None
    optimizer.step()
    assert list(optimizer.metrics()["matrices"]) == ["layers.0.up.weight", "layers.2.up.weight"]
    give_gradients(params, 3)
    params[-1].grad = None
    optimizer.step()
    metrics = optimizer.metrics()
    assert len(metrics["matrices"]) == 3
    assert metrics["adamw"] == {}
    assert list(metrics["groups"]) == ["0"]


def test_experts_and_fused_weights_are_measured_one_by_one() -> None:
    experts, fused = nn.Parameter(torch.randn(3, 6, 5)), nn.Parameter(torch.randn(9, 4))
    groups = [
        {"params": [experts], "names": ["experts.w"], "use_muon": True, "expert_keys": ["experts"]},
        {"params": [fused], "names": ["layers.4.qkv.weight"], "use_muon": True, "split": (4, 5)},
    ]
    optimizer = Muon(groups, metrics=1)
    experts.grad, fused.grad = torch.randn_like(experts), torch.randn_like(fused)
    grads = experts.grad.clone(), fused.grad.clone()
    optimizer.step()
    metrics = optimizer.metrics()
    names = [f"experts.w[{k}]" for k in range(3)] + [f"layers.4.qkv.weight[part {k}]" for k in range(2)]
    assert list(metrics["matrices"]) == names
    assert list(metrics["kinds"]) == ["experts.w", "layers.*.qkv.weight[part 0]", "layers.*.qkv.weight[part 1]"]
    parts = [*grads[0], grads[1][:4], grads[1][4:]]
    for name, grad in zip(names, parts, strict=True):
        assert close(metrics["matrices"][name]["gradient_norm"], grad.norm()), name
    assert close(metrics["groups"]["0"]["gradient_norm"], grads[0].norm())
    assert metrics["groups"]["0"]["count"] == 3


def test_a_skipped_step_is_not_measured_and_is_counted() -> None:
    params = parameters()
    optimizer = built(params, nonfinite="skip")
    train(optimizer, params, 1)
    give_gradients(params, 1)
    assert params[0].grad is not None
    params[0].grad[0, 0] = math.inf
    optimizer.step()
    assert optimizer.metrics()["step"] == 1
    train(optimizer, params, 1, first=2)
    metrics = optimizer.metrics()
    assert (metrics["step"], metrics["skipped_steps"], metrics["skipped"]) == (3, 1, False)


def test_qk_clip_shows_logits_and_factors() -> None:
    params = [nn.Parameter(torch.randn(8, 6)) for _ in range(2)]
    names = [f"layers.0.self_attn.{name}_proj.weight" for name in "qk"]
    groups = [{"params": params, "names": names, "use_muon": True}]
    optimizer = Muon(groups, metrics=1, clip_config={"head_dim": 4, "threshold": 50.0})
    give_gradients(params, 0)
    optimizer.step(qk_logits={0: torch.tensor([200.0, 50.0])})  # at the threshold nothing is clipped
    assert optimizer.metrics()["qk_clip"] == {"0": {"max_logit": 200.0, "min_factor": 0.5, "clipped_heads": 1.0}}
    give_gradients(params, 1)
    optimizer.step(qk_logits={0: torch.tensor([20.0, 50.0])})
    assert optimizer.metrics()["qk_clip"] == {"0": {"max_logit": 50.0, "min_factor": 1.0, "clipped_heads": 0.0}}
    give_gradients(params, 2)
    optimizer.step()
    assert optimizer.metrics()["qk_clip"] == {}


def test_copies_checkpoints_and_offload() -> None:
    """A copy measures as its original does; what is remembered of weights starts over."""
    params = parameters()
    optimizer = built(params, 2)
    optimizer.turn_on_cpu_offload()
    train(optimizer, params, 4)
    expected = optimizer.metrics()["matrices"]
    assert "metrics" not in json.dumps([list(group) for group in optimizer.state_dict()["param_groups"]])
    for clone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert clone.metrics() == {}
        copied = [param for group in clone.param_groups for param in group["params"]]
        train(clone, copied, 2, first=4)
        assert clone.metrics()["step"] == 2
        assert set(clone.metrics()["matrices"]) == set(expected)
    loaded = io.BytesIO()
    torch.save(optimizer.state_dict(), loaded)
    loaded.seek(0)
    other = built(parameters(), 1)
    other.load_state_dict(torch.load(loaded, weights_only=True))


def test_a_measurement_that_fails_is_raised_when_the_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    params, alone = parameters(), parameters()
    optimizer = built(params)
    train(optimizer, params, 1)

    def no_room(*arguments: Any) -> Tensor:
        raise MemoryError("no room")

    monkeypatch.setattr(Transfers, "host_buffer", no_room)
    with pytest.raises(MemoryError, match="no room"):
        train(optimizer, params, 1, first=1)
    train(built(alone, None), alone, 2)
    assert all(torch.equal(a, b) for a, b in zip(params, alone, strict=True))
    assert optimizer.metrics()["step"] == 1


def test_a_new_param_group_is_measured() -> None:
    params = parameters()
    optimizer = built(params)
    train(optimizer, params, 2)
    added = nn.Parameter(torch.randn(5, 4))
    optimizer.add_param_group({"params": [added], "names": ["added"], "use_muon": True})
    train(optimizer, [*params, added], 1)
    metrics = optimizer.metrics()
    assert "added" in metrics["matrices"]
    assert metrics["weight_half_iterations"] == FIRST_HALVES, "the vectors start over with a plan"


def test_the_dict_is_plain_and_flat_names_are_too() -> None:
    params = parameters()
    optimizer = built(params)
    assert optimizer.metrics() == {}
    assert flat({}) == {}
    train(optimizer, params, 1)
    metrics = optimizer.metrics()
    assert json.loads(json.dumps(metrics)) == metrics
    assert metrics["bytes"] == {"sent": 0, "reduced": 0}, "one device tells nobody"
    numbers = flat(metrics)
    assert all(type(value) is float for value in numbers.values())
    assert numbers["muon/group/0/update_to_weight"] == metrics["groups"]["0"]["update_to_weight"]
    assert not any("layers.0" in name for name in numbers)
    every = flat(metrics, prefix="", matrices=True)
    assert every["matrix/layers.0.up.weight/lr"] == metrics["matrices"]["layers.0.up.weight"]["lr"]


def test_seconds_are_divided_among_the_phases() -> None:
    params = parameters()
    optimizer = built(params)
    train(optimizer, params, 1)
    seconds = optimizer.metrics()["seconds"]
    assert set(seconds) == {"momentum", "gather", "orthogonalise", "scatter", "update", "wait", "adamw", "metrics"}
    assert all(value >= -1e-9 for value in seconds.values())
    assert seconds["orthogonalise"] > 0
    assert seconds["adamw"] > 0


@pytest.mark.parametrize("metrics", [0, -1, True, 1.5, "every", Metrics])
def test_refuses_what_is_no_number_of_steps(metrics: Any) -> None:
    with pytest.raises(ConfigError, match="metrics"):
        built(parameters(), metrics)


@pytest.mark.parametrize(
    "options", [{"every": 0}, {"iterations": 0}, {"iterations": True}, {"weight_spectra": 1}], ids=str
)
def test_refuses_wrong_settings(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Metrics(**options)


def test_refuses_reading_what_was_not_measured() -> None:
    with pytest.raises(ConfigError, match="metrics=10"):
        built(parameters(), None).metrics()


def test_a_weight_of_zeros_and_a_lost_gradient_stay_numbers() -> None:
    params = [nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.ones(3))]
    optimizer = built(params)
    for param in params:
        param.grad = torch.zeros_like(param)
    params[1].grad = torch.ones(3)
    optimizer.step()
    values = optimizer.metrics()["matrices"]["layers.0.up.weight"]
    assert values["gradient_norm"] == values["momentum_sigma"] == values["update_to_weight"] == 0.0
    assert values["below_bound"] == pytest.approx(1.0)


def test_an_empty_matrix_is_left_out() -> None:
    """It has no norm to divide by, and its zeros would be the least of its group."""
    params = [nn.Parameter(torch.ones(0, 6)), nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(0))]
    optimizer = built(params)
    train(optimizer, params, 1)
    metrics = optimizer.metrics()
    assert list(metrics["matrices"]) == ["layers.1.up.weight"]
    assert metrics["adamw"] == {}
    assert metrics["groups"]["0"]["update_to_weight_min"] > 0


def test_measurements_that_nobody_reads_are_not_kept() -> None:
    params = [nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(3))]
    optimizer = Muon([{"params": params[:1], "names": ["unread"], "use_muon": True}], metrics=1)
    train(optimizer, params, 5)
    gc.collect()
    measurements = [kept for kept in gc.get_objects() if type(kept) is Measurement]
    assert sorted(kept.step for kept in measurements if kept.numbers.measured[0].name == "unread") == [4, 5]
