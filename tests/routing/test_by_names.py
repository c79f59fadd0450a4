"""``Muon(model.named_parameters())``: the routes of the model where names and shapes tell them, and a warning of
the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshmuon import Muon, RoutingWarning
from tests.routing.test_routing import Block
from tests.support.tensors import like, local, seeded
from tests.support.threads import run_threads

Routes = dict[str, tuple[str, int, bool]]


def routes(optimizer: Muon) -> Routes:
    """Of each parameter the route, the number of its matrices, and whether it decays."""
    decays = {name: bool(group["weight_decay"]) for group in optimizer.param_groups for name in group["param_names"]}
    return {row.name: (row.route, row.matrices, decays[row.name]) for row in optimizer.routing_table().rows}


def by_names(named: Iterator[tuple[str, Tensor]]) -> Routes:
    with pytest.warns(
        RoutingWarning, match="names and parameters without the model.*cannot see tied weights"
    ) as caught:
        optimizer = Muon(named)
    assert [entry.filename for entry in caught] == [__file__]  # one warning, at the user's line
    return routes(optimizer)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)


class Conv1D(nn.Module):
    """GPT-2's linear layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(inputs, outputs)), nn.Parameter(torch.ones(outputs))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.ones(4, 32, 8)), nn.Parameter(torch.ones(4, 8, 16))
        self.up_proj_bias = nn.Parameter(torch.ones(4, 32))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_emb, self.wpe = nn.Embedding(40, 8), nn.Parameter(torch.ones(6, 8))
        self.layers = nn.ModuleList([nn.ModuleDict(self._block()) for _ in range(2)])
        self.to_words = nn.Linear(8, 40, bias=False)  # known by the shape of the embedding

    @staticmethod
    def _block() -> dict[str, nn.Module]:
        return {"mlp": Block(), "attn": Attention(8), "experts": Experts(), "c_fc": Conv1D(8, 24)}


class Vision(nn.Sequential):
    def __init__(self) -> None:
        depthwise, dense = nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 32, 3)
        super().__init__(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), depthwise, nn.Linear(32, 16), dense, nn.Linear(16, 10)
        )


class Sound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.down, self.classifier = nn.Conv1d(6, 16, 3), nn.Linear(16, 32), nn.Linear(32, 12)


@pytest.mark.parametrize("build", [Language, Vision, Sound, lambda: nn.Transformer(16, 2, 2, 2, 32)])
def test_the_routes_are_those_of_the_model(build: Callable[[], nn.Module]) -> None:
    model = build()
    assert by_names(model.named_parameters()) == routes(Muon(model))


def test_what_is_known_by_shape() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(4096, 8), "one": nn.Linear(8, 12), "two": nn.Linear(12, 12)})
    found = by_names(model.named_parameters())
    assert {name for name, (route, _, _) in found.items() if route == "muon"} == {"one.weight", "two.weight"}
    model = nn.ModuleDict({"words": nn.Embedding(4095, 8), "one": nn.Linear(8, 12), "two": nn.Linear(12, 12)})
    assert by_names(model.named_parameters())["words.weight"][0] == "muon"  # what the warning is about


def test_weights_tied_under_two_names_are_one_parameter() -> None:
    model = nn.ModuleDict(
        {"embed_tokens": nn.Embedding(16, 8), "mlp": nn.Linear(8, 8), "decoder": nn.Linear(8, 16, bias=False)}
    )
    model["decoder"].weight = model["embed_tokens"].weight
    found = by_names(model.named_parameters(remove_duplicate=False))
    assert found == routes(Muon(model))
    assert "decoder.weight" not in found


def test_frozen_parameters_are_routed_and_options_hold() -> None:
    model = Vision()
    model[3].weight.requires_grad_(False)
    with pytest.warns(RoutingWarning, match="without the model"):
        optimizer = Muon(list(model.named_parameters()), lr=0.5e-2, conv="flatten")
    assert routes(optimizer)["3.weight"][0] == "muon"
    assert routes(optimizer)["0.weight"][0] == "muon"
    assert routes(optimizer)["2.weight"][0] == "adamw"  # depthwise, by its shape
    assert optimizer.param_groups[0]["conv"] == "flatten"


def test_sharded_parameters_step_as_those_of_the_model() -> None:
    """Bit for bit under FSDP2, with the warning on one rank."""

    def main(rank: int) -> None:
        mesh, stepped = init_device_mesh("cpu", (2,)), []
        for named in (False, True):
            model = Language()
            with torch.no_grad():
                for k, param in enumerate(model.parameters()):
                    param.copy_(seeded(param.shape, k))
            fully_shard(model, mesh=mesh)
            optimizer = Muon(model.named_parameters() if named else model, lr=1e-3)
            for k, param in enumerate(model.parameters()):
                param.grad = like(param, seeded(param.shape, 100 + k))
            optimizer.step()
            stepped.append([local(param) for param in model.parameters()])
        assert all(map(torch.equal, *stepped))

    with pytest.warns(RoutingWarning, match="without the model") as caught:
        run_threads(2, main)
    assert len(caught) == 1
