"""Against torch.optim.Muon, with its Newton–Schulz in the parameter's dtype and as shipped (bfloat16)."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

from meshmuon import ConfigError, DistMuon, Muon, Scheme, UnknownOptionError, get_default_muon_param_groups
from meshmuon.dropped import NAMES
from meshmuon.ortho import keller
from meshmuon.ortho.remez import Quintic
from tests.support.bounds import nudge, orthogonalize_error
from tests.support.reference import (
    FACTORS,
    KELLER,
    KELLER_5,
    LR,
    Shape,
    assert_moved_alike,
    assert_moved_within_rounding,
    copies,
    gradients,
    make_params,
    muon,
    newton_schulz,
    run,
    set_gradients,
)

BLOCKED: tuple[Shape, ...] = ((400, 400), (512, 392), (392, 640))  # from 384 rows on, symmetric products go by panels


def compare(shapes: tuple[Shape, ...], dtype: torch.dtype, steps: int = 10, form: str = "auto", **options: Any) -> None:
    start = make_params(*shapes, dtype=dtype)
    ours, theirs = copies(start), copies(start)
    options = {"adjust_lr_fn": "match_rms_adamw", **options}
    run(muon(ours, form=form, **options), ours, range(steps))
    run(torch.optim.Muon(theirs, lr=LR, **options), theirs, range(steps))
    assert_moved_within_rounding(ours, theirs, start, steps, keller(options.get("ns_steps", 5)))


@pytest.mark.usefixtures("precise_torch")
@pytest.mark.parametrize("form", ["auto", "standard", "gram"])
def test_blocked_sizes_equal_torch(form: str) -> None:
    compare(BLOCKED, torch.float32, steps=4, form=form)


@pytest.mark.usefixtures("precise_torch")
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "momentum": 0.5}, {"weight_decay": 0.0, "ns_steps": 3}], ids=str
)
def test_the_call_that_replaces_torch_muon_makes_torchs_updates(options: dict[str, Any]) -> None:
    """Torch's momentum is a mean of the gradients and ours their sum: a factor, which orthogonalising removes."""
    call, _, _ = NAMES["TorchMuon"].partition(" makes the same updates")
    start = make_params((24, 24), (48, 20), (16, 48), (33, 50), dtype=torch.float64)
    ours, theirs = copies(start), copies(start)
    optimizer = eval(
        call.removesuffix(")") + ", **options)", {"Muon": Muon, "matrices": ours, "lr": LR, "options": options}
    )
    run(optimizer, ours, range(6))
    run(torch.optim.Muon(theirs, lr=LR, **options), theirs, range(6))
    assert_moved_alike(ours, theirs, start, 1e-9)


@pytest.mark.usefixtures("precise_torch")
def test_training_a_model_equals_torch_muon_and_adamw() -> None:
    """Gradients here depend on the parameters, so that any difference would grow; float64 leaves it no room."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 5)).double()
    twin, moved, start = copy.deepcopy(model), copy.deepcopy(model), copies(model.parameters())
    nudge(moved.parameters(), 10, seed=0)
    again = Muon(get_default_muon_param_groups(moved), lr=LR, scheme="keller")
    ours = Muon(get_default_muon_param_groups(model), lr=LR, scheme="keller")
    matrices = [twin[0].weight, twin[2].weight]  # the last layer is the head
    vectors = [p for p in twin.parameters() if p.dim() == 1]
    theirs: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=LR, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([twin[4].weight], lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True),
        torch.optim.AdamW(vectors, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True),
    ]
    x, y = torch.randn(32, 12, dtype=torch.float64), torch.randn(32, 5, dtype=torch.float64)
    for _ in range(10):
        nn.functional.mse_loss(model(x), y).backward()
        ours.step()
        ours.zero_grad()
        nn.functional.mse_loss(moved(x), y).backward()
        again.step()
        again.zero_grad()
        nn.functional.mse_loss(twin(x), y).backward()
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    for a, b, other, s in zip(*(one.parameters() for one in (model, twin, moved)), start, strict=True):
        bound = 4 * (other - a).norm().item() / (b - s).norm().item()  # where rounding may lead, relative to the way
        assert bound < 1e-8
        assert_moved_alike([a], [b], [s], bound)


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_torch_as_shipped_within_its_rounding(rule: str, nesterov: bool) -> None:
    """torch computes in bfloat16, we in float32, so one step's updates differ by torch's rounding error.

    The gradients are fixed, so the momenta agree and the parameters' difference is at most the sum of lr·factor·error
    over the steps. For these shapes that is under 15 % of one update, less than what a wrong option does: dropping
    Nesterov changes an update by more than 20 %.
    """
    start = make_params((32, 32), (64, 32), (24, 96), (100, 60))
    ours, theirs = copies(start), copies(start)
    optimizer = muon(ours, nesterov=nesterov, adjust_lr_fn=rule, weight_decay=0.0)
    shipped = torch.optim.Muon(theirs, lr=LR, nesterov=nesterov, adjust_lr_fn=rule, weight_decay=0.0)
    bounds, buffers = [0.0] * len(start), [torch.zeros_like(p, requires_grad=False) for p in start]
    for step in range(10):
        grads = gradients(ours, step)
        set_gradients(ours, grads)
        set_gradients(theirs, grads)
        optimizer.step()
        shipped.step()
        for k, (buffer, grad) in enumerate(zip(buffers, grads, strict=True)):
            buffer.mul_(0.95).add_(grad)
            update = grad + 0.95 * buffer if nesterov else buffer
            lr = LR * FACTORS[rule](*grad.shape)
            error = orthogonalize_error(update, keller(), form="standard", dtype=torch.bfloat16, frobenius=True)
            bounds[k] += lr * error
            assert error < 0.15 * newton_schulz(update, KELLER_5).norm()
            assert (ours[k] - theirs[k]).norm().item() < bounds[k], f"{tuple(grad.shape)} at step {step}"


SHOWN = (
    r"The update of torch\.optim\.Muon is that of (.*?\))"
    r"(?:\.|, or that without adjust_lr_fn if you wrote 'match_rms_adamw')"
)
TORCHS: list[dict[str, Any]] = [
    {},
    {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7, "eps": 1e-7, "weight_decay": 0.0},
    {"ns_coefficients": [1.5, -0.5, 0.0], "lr": 0.02, "momentum": 0.5, "adjust_lr_fn": "original"},
    {"adjust_lr_fn": None, "lr": 0.02, "nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw", "eps": 1e-7},
]


@pytest.mark.usefixtures("precise_torch")
@pytest.mark.filterwarnings("ignore:group 0. lr=0.001 is small:meshmuon.RoutingWarning")  # torch's default
@pytest.mark.parametrize("given", TORCHS, ids=str)
def test_a_call_of_torch_is_answered_with_one_that_updates_alike(given: dict[str, Any]) -> None:
    """The call that the error shows is made as it stands there."""
    start = make_params((32, 32), (64, 40), (24, 96))
    with pytest.raises(ConfigError) as caught:
        Muon(copies(start), **given)
    shown = re.search(SHOWN, str(caught.value))
    assert shown
    call = shown[1]
    if given.get("adjust_lr_fn") == "match_rms_adamw":
        assert "without adjust_lr_fn if you wrote" in shown[0]
        call = call.replace(", adjust_lr_fn='original'", "")
    else:
        assert "adjust_lr_fn='original'" in call
    theirs = copies(start)
    run(torch.optim.Muon(theirs, **given), theirs, range(4))
    scheme = Scheme("torch's", (Quintic(*given.get("ns_coefficients", KELLER)),) * given.get("ns_steps", 5), "torch")
    ours = copies(start)
    run(eval(call, {"Muon": Muon, "matrices": ours}), ours, range(4))
    assert_moved_within_rounding(ours, theirs, start, 4, scheme)


def test_the_answer_names_what_was_passed() -> None:
    """A model with what is left to AdamW, groups, pairs, and the class that was called; other bare tensors are no
    torch call.
    """
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 2))
    groups = get_default_muon_param_groups(model)
    pairs = [(name, param) for name, param in model.named_parameters() if param.dim() == 2]
    told: list[tuple[Any, dict[str, Any], str]] = [
        (model, {}, r"Muon\(model, scheme=.*'original'\), and an adamw_lr for all that is no matrix\."),
        (model, {"adamw_lr": 3e-4}, r"Muon\(model, adamw_lr=0\.0003, scheme=.*'original'\)\."),
        (groups, {"lr": 0.02}, r"Muon\(groups, lr=0\.02, scheme="),
        (pairs, {"lr": 0.02}, r'Muon\(\[{"params": matrices, "use_muon": True}\], lr=0\.02, scheme='),
        ([param for _, param in pairs], {}, r'Muon\(\[{"params": matrices, "use_muon": True}\], scheme='),
    ]
    for params, options, answer in told:
        with pytest.raises(
            ConfigError, match=rf"^adjust_lr_fn=None is what torch\.optim\.Muon calls.*that of {answer}"
        ):
            Muon(params, adjust_lr_fn=None, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"that of DistMuon\(groups, "):
        DistMuon(groups, adjust_lr_fn=None)
    with pytest.raises(
        UnknownOptionError, match=r"^ns_coefficients=\(1, 2, 3\) is not an option of Muon\. The update of torch"
    ):
        Muon(model, ns_coefficients=(1, 2, 3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"such as model\.parameters") as caught:
        Muon(model.parameters())  # type: ignore[arg-type]
    assert "torch.optim.Muon" not in str(caught.value)
