"""TorchMuon: torch.optim.Muon's arguments, update and state, on one device against torch and on meshes against one
device.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshmuon import ConfigError, Muon, StateError, TorchMuon
from meshmuon.checkpoint import convert_torch_state
from tests.support.reference import (
    KELLER,
    assert_moved_alike,
    assert_same_bits,
    copies,
    gradients,
    make_params,
    set_gradients,
)
from tests.support.tensors import local, seeded
from tests.support.threads import run_threads

SHAPES = ((24, 24), (48, 16), (16, 48), (1, 9), (33, 50))
pytestmark = pytest.mark.usefixtures("precise_torch")

EXACT = 1e-9  # of float64: five quintics with coefficients below 20 amplify rounding by less than 1e6


def both(start: Sequence[Tensor], **options: Any) -> list[tuple[Any, list[nn.Parameter]]]:
    """Torch's optimizer and ours, each with copies of its own."""
    return [(kind(own, **options), own) for kind in (torch.optim.Muon, TorchMuon) for own in [copies(start)]]


def run(runs: Sequence[tuple[Any, list[nn.Parameter]]], steps: Sequence[int], scale: float = 1.0) -> None:
    for step in steps:
        for optimizer, params in runs:
            set_gradients(params, [scale * grad for grad in gradients(params, step)])
            optimizer.step()


def test_the_signature_is_torchs() -> None:
    ours, theirs = (inspect.signature(kind.__init__).parameters for kind in (TorchMuon, torch.optim.Muon))
    assert [(name, p.default, p.kind) for name, p in ours.items()] == [
        (name, p.default, p.kind) for name, p in theirs.items()
    ]


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3),
    momentum=st.sampled_from([0.0, 0.5, 0.95, 0.99]),
    nesterov=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    adjust_lr_fn=st.sampled_from([None, "original", "match_rms_adamw"]),
    ns=st.sampled_from([(KELLER, 5), (KELLER, 1), ((2.0, -1.5, 0.5), 8), ([1.5, -0.5, 0.0], 3)]),
    eps=st.sampled_from([1e-7, 1e-2, 30.0]),
    scale=st.sampled_from([1.0, 1e-9, 1e6]),
    seed=st.integers(0, 99),
)
def test_random_shapes_and_options_step_as_torch(
    shapes: list[tuple[int, int]], ns: Any, scale: float, seed: int, **options: Any
) -> None:
    """Also where the norm of the update is below eps, so that torch shrinks it."""
    start = make_params(*shapes, dtype=torch.float64, seed=seed)
    coefficients, ns_steps = ns
    runs = both(start, lr=0.02, ns_coefficients=coefficients, ns_steps=ns_steps, **options)
    (_, theirs), (_, ours) = runs
    bounds = [8 * torch.finfo(torch.float64).eps * param.norm().item() for param in start]  # of the weights themselves
    for step in range(4):
        before = copies(theirs)
        run(runs, [step], scale)
        bounds = [bound + EXACT * (b - a).norm().item() for bound, a, b in zip(bounds, before, theirs, strict=True)]
    for a, b, bound in zip(theirs, ours, bounds, strict=True):
        assert (a - b).norm().item() <= bound
        torch.testing.assert_close(runs[1][0].state[b]["momentum_buffer"], runs[0][0].state[a]["momentum_buffer"])


def test_groups_and_changes_between_steps_are_read_as_torch_reads_them() -> None:
    """Own options per group, a schedule of momentum, other coefficients, steps and rules, and a group that comes
    later.
    """
    start = make_params(*SHAPES, dtype=torch.float64)
    runs = []
    for kind in (torch.optim.Muon, TorchMuon):
        own = copies(start)
        groups: list[dict[str, Any]] = [
            {"params": own[:2], "lr": 0.05, "ns_steps": 3},
            {"params": own[2:4], "eps": 9.0},
        ]
        groups[1] |= {"ns_coefficients": (2.0, -1.5, 0.5), "adjust_lr_fn": "match_rms_adamw", "nesterov": False}
        optimizer = kind(groups, lr=torch.tensor(0.02, dtype=torch.float64), momentum=0.8)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(8):
            for group in optimizer.param_groups:
                group["momentum"] = 0.8 + 0.02 * step
            if step == 3:
                optimizer.add_param_group({"params": own[4], "weight_decay": 0.5})
            if step == 5:
                optimizer.param_groups[0] |= {
                    "ns_steps": 6,
                    "adjust_lr_fn": None,
                    "ns_coefficients": (1.5, -0.5, 0.0),
                    "eps": 5.0,
                }
            run([(optimizer, own)], [step])
            assert all(param.grad is not None for param in own)  # torch leaves gradients
            scheduler.step()
        runs.append(own)
    assert_moved_alike(runs[1], runs[0], start, EXACT)


def test_named_parameters_and_silence() -> None:
    """Names that would make Muon warn, and torch's default lr, which is small for its default rule."""
    layer = nn.Linear(6, 4, bias=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = TorchMuon((f"embed_tokens.qkv_proj.{name}", param) for name, param in layer.named_parameters())
        optimizer.step()  # without a gradient nothing happens
        assert not optimizer.state_dict()["state"]
    assert optimizer.param_groups[0]["param_names"] == ["embed_tokens.qkv_proj.weight"]


@pytest.mark.parametrize("named", [False, True])
def test_states_go_both_ways(named: bool) -> None:
    """After four steps of one class, the other goes on from its state as if it had run from the start; so does ours
    itself.
    """
    start = make_params(*SHAPES, dtype=torch.float64)

    def given(params: list[nn.Parameter]) -> Any:
        return [(f"layers.{k}.weight", param) for k, param in enumerate(params)] if named else params

    steps, options = range(4, 8), {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 4}
    expected = copies(start)
    run([(torch.optim.Muon(expected, **options), expected)], range(8))
    for first, second in ((torch.optim.Muon, TorchMuon), (TorchMuon, torch.optim.Muon), (TorchMuon, TorchMuon)):
        params = copies(start)
        begun = first(given(params), **options)
        run([(begun, params)], range(4))
        saved = copy.deepcopy(begun.state_dict())
        assert saved.keys() == {"state", "param_groups"}
        keys = torch.optim.Muon(given(copies(start))).state_dict()["param_groups"][0].keys()
        assert set(saved["param_groups"][0]) == set(keys)
        others = copies(params)
        resumed = second(given(others))
        resumed.load_state_dict(saved)
        run([(resumed, others)], steps)
        assert_moved_alike(others, expected, start, EXACT)
        if first is second:
            run([(begun, params)], steps)
            assert_same_bits(others, params)


def test_states_of_distributed_checkpoints() -> None:
    """Their keys are names, and loading makes the optimizer step once to create its state."""
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 3, bias=False))
    first = TorchMuon(model.parameters(), ns_steps=4)
    run([(first, list(model.parameters()))], range(3))
    saved = get_optimizer_state_dict(model, first)
    assert saved["state"]["1.weight"].keys() == {"momentum_buffer"}
    other = copy.deepcopy(model)
    second = TorchMuon(other.parameters())
    set_optimizer_state_dict(other, second, copy.deepcopy(saved))
    run([(first, list(model.parameters())), (second, list(other.parameters()))], range(3, 6))
    assert_same_bits(other.parameters(), model.parameters())


def test_a_copy_goes_on_with_the_same_bits() -> None:
    params = make_params(*SHAPES)
    optimizer = TorchMuon(params, eps=2.0)
    run([(optimizer, params)], range(2))
    copied = copy.deepcopy(optimizer)
    others = [param for group in copied.param_groups for param in group["params"]]
    run([(optimizer, params), (copied, others)], range(2, 5))
    assert_same_bits(others, params)


def test_states_of_other_optimizers_are_refused_and_muon_converts_this_one() -> None:
    params = make_params((6, 4))
    ours, muon = TorchMuon(params), Muon([{"params": copies(params), "names": ["w"], "use_muon": True}])
    for other in (muon, torch.optim.SGD(copies(params), momentum=0.9), torch.optim.AdamW(copies(params))):
        with pytest.raises(
            StateError, match=r"not from TorchMuon or torch\.optim\.Muon, which keep momentum as a mean"
        ):
            ours.load_state_dict(other.state_dict())
    run([(ours, params)], range(3))
    with pytest.raises(StateError, match=r"from torch\.optim\.Muon, which keeps momentum as a mean"):
        muon.load_state_dict(ours.state_dict())
    muon.load_state_dict(convert_torch_state(muon, ours.state_dict(), None, muon_names=["w"]))
    (state,) = muon.state.values()
    torch.testing.assert_close(state["momentum_buffer"], ours.state[params[0]]["momentum_buffer"] / (1 - 0.95))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: TorchMuon(nn.Linear(3, 3)),
            r"got Linear\. TorchMuon takes what torch\.optim\.Muon takes; meshmuon",
        ),
        (
            lambda: TorchMuon(nn.Linear(3, 3).parameters()),
            r"takes matrices.* a parameter of shape \(3,\): give it to AdamW",
        ),
        (lambda: TorchMuon(nn.Linear(3, 3).weight), "got Parameter"),
        (lambda: TorchMuon([]), "params is empty"),
        (lambda: TorchMuon([{"params": [("w", torch.ones(2, 2, 2))]}]), r"shape \(2, 2, 2\)"),
        (lambda: TorchMuon(make_params((2, 2)), adjust_lr_fn="spectral"), "adjust_lr_fn='spectral' is none of torch's"),
        (
            lambda: TorchMuon(make_params((2, 2)), ns_coefficients=(1, 2)),
            r"ns_coefficients=\(1, 2\) must be three numbers",
        ),  # type: ignore[arg-type]
        (lambda: TorchMuon(make_params((2, 2)), ns_coefficients=("a", 1, 2)), "every step is a triple"),  # type: ignore[arg-type]
        (lambda: TorchMuon(make_params((2, 2)), eps=-1.0), "TorchMuon: eps=-1.0 must be at least 0"),
        (lambda: TorchMuon(make_params((2, 2)), momentum=1.0), r"momentum=1.0 must be in \[0, 1\)"),
        (lambda: TorchMuon(make_params((2, 2)), ns_steps=0), "ns_steps=0 must be a whole number from 1"),
        (lambda: TorchMuon(make_params((2, 2)), lr=-0.1), "lr=-0.1"),
        (lambda: TorchMuon(make_params((2, 2)), weight_decay=-0.1), "weight_decay=-0.1"),
    ],
)
def test_bad_arguments_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build()
    assert isinstance(caught.value, ValueError)  # which torch raises


def test_a_bad_value_set_by_hand_is_refused_before_anything_is_written() -> None:
    params = make_params((6, 4))
    optimizer = TorchMuon(params)
    before = copies(params)
    optimizer.param_groups[0]["ns_coefficients"] = None
    with pytest.raises(ConfigError, match="ns_coefficients=None must be three numbers"):
        run([(optimizer, params)], [0])
    assert_same_bits(params, before)


PLACEMENTS = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((3,), (Shard(1),)),
    "replicas": ((2,), (Replicate(),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "both dims": ((2, 2), (Shard(0), Shard(1))),
}


@pytest.mark.parametrize("layout", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_layout_has_the_bits_of_one_device(layout: str, dtype: torch.dtype) -> None:
    """Weights and momentum, with a norm below eps for some, and after a state_dict that another optimizer loads."""
    sizes, placements = PLACEMENTS[layout]
    options: dict[str, Any] = {"lr": 0.02, "eps": 40.0, "adjust_lr_fn": "match_rms_adamw"}

    def stepped(place: Any) -> list[Tensor]:
        params = [nn.Parameter(place(seeded(shape, k).to(dtype))) for k, shape in enumerate(SHAPES)]
        optimizer = TorchMuon(params, **options)
        for step in range(4):
            for k, param in enumerate(params):
                param.grad = place(seeded(param.shape, 10 * step + k).to(dtype))
            optimizer.param_groups[0]["momentum"] = 0.9 + 0.01 * step
            optimizer.step()
            if step == 1:
                saved, optimizer = optimizer.state_dict(), TorchMuon(params, **options)
                optimizer.load_state_dict(saved)
        return [*params, *(optimizer.state[param]["momentum_buffer"] for param in params)]

    whole = stepped(lambda value: value)

    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", sizes)

        def place(value: Tensor) -> Tensor:
            return distribute_tensor(value.clone(), mesh, placements, src_data_rank=None)

        assert_same_bits(map(local, stepped(place)), (local(place(value.detach())) for value in whole))

    run_threads(4 if len(sizes) == 2 else sizes[0], main)
