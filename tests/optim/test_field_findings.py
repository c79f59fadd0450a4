"""Cases that were found by trying to break the optimizer; each one once gave a wrong or a raw result."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from meshmuon import GradientError, Muon, StateError, get_default_muon_param_groups
from meshmuon.checkpoint import convert_torch_state


def group(params: list[Tensor], use_muon: bool, **options: object) -> dict[str, object]:
    return {"params": params, "use_muon": use_muon, **options}


def test_adamw_state_follows_a_changed_memory_format() -> None:
    torch.manual_seed(0)
    start, grads = torch.randn(4, 3, 5, 5), [torch.randn(4, 3, 5, 5) for _ in range(3)]
    plain, moved = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [Muon([group([p], False)], lr=1e-2, allow_inactive=True) for p in (plain, moved)]
    for k, grad in enumerate(grads):
        plain.grad, moved.grad = grad.clone(), grad.clone()
        if k == 1:
            moved.data = moved.data.to(memory_format=torch.channels_last)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(moved, plain, rtol=0, atol=0)


def test_a_saved_number_as_step_is_loaded_as_a_tensor() -> None:
    param = nn.Parameter(torch.randn(3))
    optimizer = Muon([group([param], False)], allow_inactive=True)
    param.grad = torch.randn(3)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["step"] = 1.0
    optimizer.load_state_dict(state)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["step"], torch.tensor(2.0))


def test_state_of_torchs_muon_continues_once_converted() -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(4, 6))
    theirs = torch.optim.Muon([param])
    param.grad = torch.randn(4, 6)
    theirs.step()
    ours = Muon([group([param], True)])
    with pytest.raises(StateError, match="convert_torch_state"):
        ours.load_state_dict(theirs.state_dict())
    ours.load_state_dict(convert_torch_state(ours, theirs.state_dict(), None, muon_names=["group0.param0"]))
    assert ours.param_groups[0]["use_muon"] is True
    assert ours.param_groups[0]["adjust_lr_fn"] == "original"
    param.grad = torch.randn(4, 6)
    ours.step()
    assert param.isfinite().all()


@pytest.mark.parametrize("change", ["shape", "dtype", "stale gradient"])
def test_parameters_changed_under_their_state_write_nothing(change: str) -> None:
    matrix, vector = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))
    optimizer = Muon([group([matrix], True), group([vector], False)], none_grad=False)
    for param in (matrix, vector):
        param.grad = torch.randn_like(param)
    optimizer.step()
    if change == "dtype":
        vector.data = vector.data.double()
        vector.grad = torch.randn(6).double()
    else:
        vector.data = torch.randn(7)
        if change == "shape":
            vector.grad = torch.randn(7)
    before = matrix.detach().clone(), optimizer.state[matrix]["momentum_buffer"].clone()
    with pytest.raises((StateError, GradientError), match=r"group1\.param0"):
        optimizer.step()
    assert torch.equal(matrix, before[0])
    assert torch.equal(optimizer.state[matrix]["momentum_buffer"], before[1])


def test_planning_inside_inference_mode_leaves_usable_buffers() -> None:
    param = nn.Parameter(torch.randn(4, 6))
    optimizer = Muon([group([param], True)])
    for steps, inference in ((5, False), (4, True), (4, False)):
        optimizer.param_groups[0]["ns_steps"] = steps
        param.grad = torch.randn(4, 6)
        with torch.inference_mode(inference):
            optimizer.step()
    assert param.isfinite().all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("scheme", ["polar_express", "zolotarev", "hybrid", "halley"])
def test_a_first_step_inside_inference_mode_leaves_usable_buffers(scheme: str, deterministic: bool) -> None:
    """The first step makes the buffers of a scheme, those of inverses among them, and all later steps write them."""
    torch.manual_seed(0)
    start, grads = torch.randn(40, 48), [torch.randn(40, 48) for _ in range(3)]

    def train(inference: tuple[bool, ...]) -> Tensor:
        param = nn.Parameter(start.clone())
        optimizer = Muon([group([param], True)], scheme=scheme, deterministic=deterministic)
        for grad, inside in zip(grads, inference, strict=True):
            param.grad = grad.clone()
            with torch.inference_mode(inside):
                optimizer.step()
        return param.detach()

    expected = train((False, False, False))
    assert torch.equal(train((True, False, True)), expected)
    assert torch.equal(train((False, True, False)), expected)


def test_the_default_device_does_not_matter() -> None:
    param = nn.Parameter(torch.randn(4, 6))
    param.grad = torch.randn(4, 6)
    with torch.device("meta"):
        Muon([group([param], True, scheme=[(3.0, -4.0, 2.01)])]).step()
    assert param.isfinite().all()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.norm = nn.LayerNorm((4, 8))
        self.up = nn.ConvTranspose2d(8, 4, 3)
        self.proj = nn.Linear(8, 8)
        self.A_log = nn.Parameter(torch.zeros(8, 4))
        self.experts = nn.ParameterDict({"w1": torch.randn(2, 8, 8), "w1_bias": torch.randn(2, 8)})


def test_parameters_that_only_look_like_matrices_go_to_adamw() -> None:
    groups = get_default_muon_param_groups(Odd(), expert_keys=["experts"], conv="flatten")
    assert groups[0]["names"] == ["proj.weight", "experts.w1"]
    Muon(groups)
