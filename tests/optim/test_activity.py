"""An optimizer that would train nothing says so: without matrices or gradients, or with parameters that the model
replaced.
"""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshmuon import ConfigError, GradientError, InactiveWarning, Muon, get_default_muon_param_groups
from meshmuon.integrations.factory import muon_for
from tests.support.reference import LR, assert_same_bits, copies, gradients, group, make_params, set_gradients
from tests.support.small_model import give_gradients, initial, muon_of, world_mesh
from tests.support.threads import run_threads

NO_MATRIX = "there is no matrix for Muon.*FSDP2.*use_muon=True.*allow_inactive=True"
NO_GRADIENT = "none of Muon's matrices has had a gradient.*after fully_shard.*allow_inactive=True"
REPLACED = r"0\.weight: the model has replaced this parameter.*Build the optimizer after fully_shard"


strictly = pytest.mark.filterwarnings("error::meshmuon.InactiveWarning")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    # the last one is a head
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 6)).square().sum().backward()


def mixed(**options: Any) -> tuple[list[nn.Parameter], Muon]:
    params = make_params((6, 4), (4, 4), (5,))
    return params, Muon([group(params[:2]), group(params[2:], use_muon=False, prefix="norms")], lr=LR, **options)


def grads_for(params: list[nn.Parameter], chosen: range) -> None:
    given = gradients(params, 0)
    set_gradients(params, [given[k] if k in chosen else None for k in range(len(params))])


def test_no_matrix_raises_at_every_step_and_writes_nothing() -> None:
    params = make_params((4, 6), (5,))
    before = copies(params)
    optimizer = Muon([group(params, use_muon=False)], lr=LR)
    for _ in range(2):
        set_gradients(params, gradients(params, 0))
        with pytest.raises(ConfigError, match=NO_MATRIX):
            optimizer.step()
    assert_same_bits(params, before)
    assert not optimizer.state


class ConvNet(nn.Module):
    """As a beginner writes it: filters, norms and a head, and no other matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm, self.fc = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8),
            nn.Linear(8, 6),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(self.second(self.first(images))).mean((2, 3)))


def test_filters_alone_are_refused_by_the_constructor() -> None:
    model = ConvNet()
    told = r'go to AdamW \(.*side below 16.*\): second\.weight\. Write Muon\(model, conv="flatten"\)'
    for build in (
        lambda: Muon(model),
        lambda: Muon(get_default_muon_param_groups(model)),
        lambda: muon_for(model, lr=LR),
    ):
        with pytest.raises(ConfigError, match=told) as caught:
            build()
        assert "FSDP" not in str(caught.value)
    optimizer = Muon(get_default_muon_param_groups(model, conv="flatten"), lr=LR)
    model(torch.ones(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == 2
    Muon(get_default_muon_param_groups(model), allow_inactive=True).step()
    model.hidden = nn.Linear(32, 32)  # a matrix for Muon: that filters go to AdamW is a choice then
    Muon(get_default_muon_param_groups(model))


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((8, 3, 3, 3), 'conv="flatten"'),
        ((8, 3, 4), r"expert_keys=\[\.\.\.\]"),
        ((8,), "use_muon=False.*DeepSpeed ZeRO.*FSDP2"),
    ],
)
def test_parameters_by_hand_that_are_no_matrices(shape: tuple[int, ...], told: str) -> None:
    """Refused by name, by the constructor, by add_param_group, and by the step if a parameter got its shape later."""
    wrong = [{"params": [("wrong.weight", nn.Parameter(torch.ones(shape)))], "use_muon": True}]
    with pytest.raises(ConfigError, match=rf"^wrong\.weight: shape .*{told}"):
        Muon(wrong)
    params, optimizer = mixed()
    with pytest.raises(ConfigError, match=rf"^wrong\.weight: shape .*{told}"):
        optimizer.add_param_group(wrong[0])
    assert len(optimizer.param_groups) == 2
    params[0].data = torch.ones(shape)
    params[0].grad = torch.ones(shape)
    with pytest.raises(ConfigError, match=told):
        optimizer.step()


@strictly
def test_intended_and_added_later() -> None:
    params = make_params((4, 6), (5,))
    before = copies(params)
    Muon([group(params, use_muon=False)], allow_inactive=True).step()  # without gradients
    intended = Muon([group(params, use_muon=False)], lr=LR, allow_inactive=True)
    set_gradients(params, gradients(params, 0))
    for optimizer in (intended, copy.deepcopy(intended), pickle.loads(pickle.dumps(intended))):
        optimizer.step()
    assert not torch.equal(params[0], before[0])
    grown = Muon([group(params[1:], use_muon=False)], lr=LR)
    grown.add_param_group(group(params[:1], prefix="grown"))
    grown.step()


def test_no_gradient_warns_once_and_then_raises() -> None:
    params, optimizer = mixed()
    with pytest.warns(InactiveWarning, match=NO_GRADIENT) as caught:
        optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]
    for chosen in (range(0), range(2, 3)):  # no gradient at all, AdamW's alone
        grads_for(params, chosen)
        before = copies(params)
        with pytest.raises(GradientError, match=NO_GRADIENT):
            optimizer.step()
        assert_same_bits(params, before)
    grads_for(params, range(3))
    optimizer.step()
    grads_for(params, range(0))
    optimizer.step()  # Muon was active once: an empty step is nothing unusual


def gradients_as_megatron_keeps_them(model: nn.Module) -> None:
    """From now on backward() adds to ``main_grad``, in float32, and leaves no ``grad``."""

    def move(param: nn.Parameter) -> None:
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None

    for param in model.parameters():
        if param.requires_grad:
            param.main_grad = torch.zeros(param.shape, dtype=torch.float32)
            param.register_post_accumulate_grad_hook(move)


@strictly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_megatrons_gradient_buffers_are_named(dtype: torch.dtype) -> None:
    """At the first step, before anything is written; what the error says then trains the same bits as without
    buffers.
    """
    model, plain = net().to(dtype), net().to(dtype)
    for each in (model, plain):
        each[2].bias.requires_grad_(False)
    gradients_as_megatron_keeps_them(model)
    optimizer, expected = (Muon(each, lr=LR) for each in (model, plain))
    for each in (model, plain):
        each(torch.ones(2, 6, dtype=dtype)).square().sum().backward()
    told = r"main_grad: Megatron's .*optimizer=False\), write before step\(\): (for p in .*)\. Otherwise .*FSDP2"
    for _ in range(2):
        before = copies(model.parameters())
        with pytest.raises(GradientError, match=told) as caught:
            optimizer.step()
        assert_same_bits(model.parameters(), before)
    code = re.search(told, str(caught.value))
    assert code
    exec(code[1])
    optimizer.step()
    expected.step()
    assert_same_bits(model.parameters(), plain.parameters())


def test_gradient_buffers_that_are_not_the_fault() -> None:
    """Beside gradients, without any backward pass, of frozen matrices; and where an optimizer without gradients is
    intended.
    """
    params, optimizer = mixed()
    for param in params:
        param.main_grad = None  # type: ignore[attr-defined]
    with pytest.warns(InactiveWarning, match=NO_GRADIENT):
        optimizer.step()
    for param in params:
        param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
        param.requires_grad_(False)
    optimizer.step()
    for param in params:
        param.requires_grad_(True)
    Muon(optimizer.param_groups, allow_inactive=True).step()
    grads_for(params, range(1))
    optimizer.step()
    grads_for(params, range(0))
    optimizer.step()  # Muon was active once


@strictly
def test_matrices_that_are_frozen_at_first() -> None:
    params, optimizer = mixed()
    for param in params[:2]:
        param.requires_grad_(False)
    for _ in range(3):
        grads_for(params, range(2, 3))
        optimizer.step()
    params[0].requires_grad_(True)
    grads_for(params, range(1))
    optimizer.step()


@strictly
def test_with_a_closure_a_scaler_and_a_loaded_state() -> None:
    params, first = mixed()

    def closure() -> None:
        grads_for(params, range(3))

    first.step(closure)
    _, second = mixed()
    second.load_state_dict(first.state_dict())
    with pytest.warns(InactiveWarning):
        second.step()  # loaded, but without gradients
    with pytest.raises(GradientError, match=NO_GRADIENT):
        second.step()
    _, scaled = mixed()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for grad in (float("inf"), 4.0):  # the first step is skipped
        for param in scaled.param_groups[0]["params"] + scaled.param_groups[1]["params"]:
            param.grad = torch.full_like(param, grad)
        scaler.scale(torch.ones(()))
        scaler.step(scaled)
        scaler.update()
    assert scaled.skipped_steps == 1


@strictly
def test_state_can_be_created_without_gradients() -> None:
    """torch.distributed.checkpoint steps with zeros and lr 0."""
    model = net()
    optimizer = Muon(get_default_muon_param_groups(model), lr=LR)
    assert get_optimizer_state_dict(model, optimizer)["state"]
    backward(model)
    optimizer.step()


@strictly
@pytest.mark.parametrize(
    ("layers", "biases", "steps"), [((0, 2), False, 0), ((0,), False, 0), ((0, 2, 4), True, 1)], ids=str
)
def test_replaced_parameters_raise_at_once(layers: tuple[int, ...], biases: bool, steps: int) -> None:
    """All matrices or one of them, before the first step or later."""
    model = net()
    optimizer = Muon(get_default_muon_param_groups(model), lr=LR)
    for _ in range(steps):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    for k in layers:
        model[k].weight = nn.Parameter(model[k].weight.detach().clone())
        if biases:
            model[k].bias = nn.Parameter(model[k].bias.detach().clone())
    backward(model)
    with pytest.raises(GradientError, match=REPLACED):
        optimizer.step()
    if not biases:
        optimizer.param_groups[0]["params"] = [model[0].weight, model[2].weight]
        optimizer.step()


@strictly
def test_what_is_no_replacement() -> None:
    """A part that was not used, a model that is gone, names inside wrappers, two models of one kind."""
    model = net()
    optimizer = Muon(get_default_muon_param_groups(model), lr=LR)
    model[0](torch.ones(2, 6)).sum().backward()
    optimizer.step()
    other, twin = net(), net()
    both = Muon(get_default_muon_param_groups(nn.ModuleDict({"other": other, "twin": twin})), lr=LR)
    backward(twin)
    both.step()
    gone = net()
    weight = gone[0].weight
    left = Muon(get_default_muon_param_groups(torch.compile(gone, backend="eager")), lr=LR)
    del gone
    weight.grad = torch.ones_like(weight)
    left.step()
    groups = get_default_muon_param_groups(net())
    assert type(pickle.loads(pickle.dumps(groups))[0]["names"]) is list
    assert copy.deepcopy(groups)[0]["names"] == groups[0]["names"]


def test_sharded_after_the_optimizer_was_built() -> None:
    """Default groups know their model: they raise at once. Groups by hand raise at the second step. Both do on
    every rank.
    """

    def on_rank(rank: int) -> list[str]:
        errors = []
        for by_hand in (False, True):
            model = net()
            groups: list[dict[str, Any]] = get_default_muon_param_groups(model)
            if by_hand:
                groups = [{**one, "names": list(one["names"])} for one in groups]
            optimizer = Muon(groups, lr=LR)
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
            backward(model)
            if by_hand:
                optimizer.step()
            with pytest.raises(GradientError) as caught:
                optimizer.step()
            errors.append(str(caught.value))
        return errors

    first, second = run_threads(2, on_rank)
    assert first == second
    assert "the model has replaced" in first[0]
    assert "after fully_shard" in first[1]


@strictly
def test_sharded_before_it() -> None:
    """Also while FSDP2 leaves its gathered parameters in the module after backward."""

    def on_rank(rank: int) -> None:
        model = fully_shard(net(), mesh=init_device_mesh("cpu", (2,)))
        model.set_reshard_after_backward(False)
        optimizer = Muon(get_default_muon_param_groups(model), lr=LR)
        backward(model)
        model[2].weight.grad = None
        optimizer.step()

    run_threads(2, on_rank)


def test_ranks_raise_together_or_not_at_all() -> None:
    """Only what no rank has counts as missing; nothing hangs."""

    def on_rank(rank: int) -> list[str]:
        params = initial(world_mesh())
        errors = []
        optimizer = muon_of(params)
        if rank == 0:  # gradients of shards on one rank alone
            give_gradients(params, 0)
        optimizer.step()
        quiet = muon_of(initial(world_mesh()))
        quiet.step()
        with pytest.raises(GradientError) as none:
            quiet.step()
        errors.append(str(none.value))
        buffered = initial(world_mesh())
        if rank == 0:
            buffered[0].main_grad = torch.zeros(())  # type: ignore[attr-defined]
        with pytest.raises(GradientError) as main_grad:  # in the first step, on the rank without one as well
            muon_of(buffered).step()
        errors.append(str(main_grad.value))
        vector = initial(world_mesh(), ((10,),))
        give_gradients(vector, 0)
        with pytest.raises(ConfigError) as empty:
            muon_of(vector).step()
        errors.append(str(empty.value))
        return errors

    first, second = run_threads(2, on_rank)
    assert first == second
    assert "has had a gradient yet" in first[0]
    assert "Megatron's gradient buffers" in first[1]
    assert "there is no matrix for Muon" in first[2]


@strictly
def test_a_matrix_that_only_one_rank_has() -> None:
    """The others share AdamW's parameters with it and have no matrix of their own."""

    def on_rank(rank: int) -> None:
        shared, own = initial(world_mesh(), ((10,),)), make_params((4, 4))
        groups = [{"params": [("shared", shared[0])], "use_muon": False}]
        if rank == 1:
            groups.append({"params": [("own", own[0])], "use_muon": True})
        optimizer = Muon(groups, lr=LR)
        for step in range(2):
            give_gradients([*shared, *own], step)
            optimizer.step()

    run_threads(2, on_rank)


class Shadowed(nn.Module):
    """Two parameters whose names differ only by a module that is called as wrappers are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.module = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 6, bias=False)


def test_a_module_called_module_is_no_wrapper() -> None:
    """``module.weight`` is in no group and has a gradient; ``weight`` is not taken for it."""
    model = Shadowed()
    [default] = get_default_muon_param_groups(model)
    names, params = default["names"], default["params"]
    del names[1], params[1]
    optimizer = Muon([default], lr=LR)
    model.module.weight.grad = torch.ones(6, 6)
    with pytest.warns(InactiveWarning):
        optimizer.step()
    model.weight = nn.Parameter(torch.ones(6, 6))
    model.weight.grad = torch.ones(6, 6)
    with pytest.raises(GradientError, match=r"^weight: the model has replaced this parameter"):
        optimizer.step()
