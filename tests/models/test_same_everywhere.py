"""What a parameter is does not depend on wrappers, tied weights, subclasses or how many blocks a stage has."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from meshmuon import Muon, get_default_muon_param_groups
from meshmuon.integrations.factory import muon_for

from .test_contents import module


def routes(model: nn.Module) -> dict[str, tuple[str, int]]:
    rows = Muon(get_default_muon_param_groups(model), allow_inactive=True).routing_table().rows
    return {row.name: (row.route, row.matrices) for row in rows}


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_a_checkpoint_fits_a_wrapped_and_a_plain_model(wrapped_first: bool) -> None:
    plain, inner = (module("Model", layers=nn.ModuleList([nn.MultiheadAttention(16, 2)])) for _ in range(2))
    models = [module("DDP", module=inner), plain][:: 1 if wrapped_first else -1]
    saver, loader = (Muon(get_default_muon_param_groups(model)) for model in models)
    for param in models[0].parameters():
        param.grad = torch.ones_like(param)
    saver.step()
    loader.load_state_dict(saver.state_dict())
    (matrices,) = [row.matrices for row in loader.routing_table().rows if row.name.endswith("in_proj_weight")]
    assert matrices == 3


def test_gates_of_recurrent_layers() -> None:
    class Own(nn.LSTM):  # as FSDP2 makes one
        pass

    assert routes(Own(16, 32))["weight_hh_l0"] == ("muon", 4)
    assert routes(nn.GRU(16, 32))["weight_ih_l0"] == ("muon", 3)
    assert routes(nn.LSTM(16, 32, proj_size=8))["weight_hr_l0"] == ("muon", 1)


def with_head() -> nn.Module:
    head = nn.Linear(16, 50, bias=False)
    return module("Model", tok=nn.Embedding(50, 16), up=nn.Linear(16, 64), down=nn.Linear(64, 16), lm_head=head)


@pytest.mark.parametrize("tie", [True, False])
def test_a_tied_head_is_a_head(tie: bool) -> None:
    model = with_head()
    if tie:
        model.lm_head.weight = model.tok.weight
    assert routes(model)["down.weight"] == ("muon", 1)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("container", ["list", "dict", "sequential"])
def test_the_blocks_of_a_stage(container: str, count: int) -> None:
    block = module("Block", w1=nn.Linear(32, 128), w2=nn.Linear(128, 32))
    blocks = [copy.deepcopy(block) for _ in range(count)]
    made = {"list": nn.ModuleList(blocks), "dict": nn.ModuleDict({str(k): block for k, block in enumerate(blocks)})}
    stage = nn.Module()
    stage.layers = made.get(container, nn.Sequential(*blocks))
    assert routes(stage)[f"layers.{count - 1}.w2.weight"] == ("muon", 1)


def test_a_width_equal_to_the_vocabulary() -> None:
    model = nn.Module()
    model.vocab_size = 256
    model.emb, model.connector, model.back = nn.Embedding(256, 256), nn.Linear(256, 512), nn.Linear(512, 256)
    model.lm_head = nn.Linear(256, 256, bias=False)
    found = routes(model)
    assert found["connector.weight"] == found["back.weight"] == ("muon", 1)
    assert found["lm_head.weight"] == ("adamw", 0)


def test_a_copy_of_an_active_optimizer_is_active() -> None:
    model = with_head()
    optimizer = muon_for(model, lr=1e-3)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    model.zero_grad()
    twin = copy.deepcopy(optimizer)
    for _ in range(3):
        twin.step()  # neither warns nor raises
