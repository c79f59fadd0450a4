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

from meshmuon import ConfigError, Muon, NorMuon
from meshmuon.device import Transfers
from meshmuon.metrics import flat
from meshmuon.metrics.report import Measurement
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
    optimizer = built(params, scheme="polar_express", momentum=0.9, weight_decay=0.0)
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
        assert 0.9 * singular[0] <= values["momentum_sigma"] <= (1 + 1e-5) * singular[0]
        assert close(values["weight_norm"], before[k].norm())
        change = params[k].detach() - before[k]
        assert close(values["update_to_weight"], change.norm() / before[k].norm(), 1e-4)
        assert close(values["update_rms"], change.square().mean().sqrt(), 1e-4)
        assert close(values["lr"], 0.01 * lr_factor("match_rms_adamw", *SHAPES[k]))
    norm = metrics["adamw"]["norm.weight"]
    change = params[-1].detach() - before[-1]
    assert close(norm["update_rms"], change.square().mean().sqrt(), 1e-4)
    assert close(norm["update_to_weight"], change.norm() / before[-1].norm(), 1e-4)
    assert close(norm["gradient_norm"], grads[-1].norm())


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
    for metrics in (None, 1, 2):
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


def test_copies_checkpoints_and_offload() -> None:
    """A copy measures as its original does."""
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
    assert "added" in optimizer.metrics()["matrices"]


def test_the_dict_is_plain_and_flat_names_are_too() -> None:
    params = parameters()
    optimizer = built(params)
    assert optimizer.metrics() == {}
    assert flat({}) == {}
    train(optimizer, params, 1)
    metrics = optimizer.metrics()
    assert json.loads(json.dumps(metrics)) == metrics
    numbers = flat(metrics)
    assert all(type(value) is float for value in numbers.values())
    assert numbers["muon/group/0/update_to_weight"] == metrics["groups"]["0"]["update_to_weight"]
    assert not any("layers.0" in name for name in numbers)
    every = flat(metrics, prefix="", matrices=True)
    assert every["matrix/layers.0.up.weight/lr"] == metrics["matrices"]["layers.0.up.weight"]["lr"]


@pytest.mark.parametrize("metrics", [0, -1, True, 1.5, "every"])
def test_refuses_what_is_no_number_of_steps(metrics: Any) -> None:
    with pytest.raises(ConfigError, match="metrics"):
        built(parameters(), metrics)


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
