"""Models that pipelining or fx has rebuilt: classes and graphs tell what their modules were."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from meshmuon import Muon, RoutingRow, RoutingWarning, get_default_muon_param_groups, torch_compat
from meshmuon.models.traced import class_of


class Attention(nn.Module):
    """4 query heads and 2 key heads of 8; only the graph can say so once it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o_proj = nn.Linear(32, 64, bias=False), nn.Linear(32, 32)
        self.num_heads, self.num_kv_heads, self.head_dim = 4, 2, 8

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([32, 16, 16], dim=-1)
        out: Tensor = self.o_proj(q + k.repeat(1, 1, 2) * v.repeat(1, 1, 2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm = Attention(), nn.LayerNorm(32)
        self.conv, self.depthwise = nn.Conv1d(32, 32, 3, padding=1), nn.Conv1d(32, 32, 3, padding=1, groups=32)
        self.up, self.down, self.rnn = nn.Linear(32, 64), nn.Linear(64, 32), nn.GRU(32, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        x = x + self.depthwise(self.conv(x.transpose(1, 2))).transpose(1, 2)
        out: Tensor = self.rnn(x)[0] + self.down(self.up(x).relu())
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(100, 32), nn.ModuleList([Block(), Block()])
        self.where = nn.Parameter(torch.randn(50, 32))
        self.final = nn.Linear(32, 100, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + nn.functional.embedding(torch.arange(10), self.where)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.final(x)
        return out


def rows_of(model: nn.Module, conv: str | None = None) -> dict[str, RoutingRow]:
    return {row.name: row for row in Muon(get_default_muon_param_groups(model, conv=conv)).routing_table().rows}


@functools.cache
def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    pipe = pipeline(Model(), mb_args=(torch.randint(100, (2, 10)),), split_spec={"layers.1": SplitPoint.BEGINNING})
    return [pipe.get_stage_module(0), pipe.get_stage_module(1)]


@pytest.mark.parametrize("conv", [None, "flatten", "adamw"])
def test_the_stages_of_a_pipeline_are_routed_as_the_model(conv: str | None) -> None:
    whole = rows_of(Model(), conv)
    for stage in stages():
        assert type(stage.get_submodule("layers")).__name__ == "InterpreterModule"
        found = rows_of(stage, conv)
        lookup = found.pop("where", None)  # no name and no class tells what it is; the graph does
        assert lookup is None or (lookup.route, whole["where"].route) == ("adamw", "muon")
        assert {name: (row.route, row.matrices) for name, row in found.items()} == {
            name: (whole[name].route, whole[name].matrices) for name in found
        }


def test_reasons_of_a_stage() -> None:
    first, last = (rows_of(stage) for stage in stages())
    assert first["layers.0.attn.qkv.weight"].why == "fused parts, as its graph cuts them"
    assert first["words.weight"].why == "embedding"
    assert first["layers.0.conv.weight"].why == "matrix, filter (out, in·kernel)"
    assert first["layers.0.depthwise.weight"].why == "filter of a depthwise convolution"
    assert first["layers.0.rnn.weight_hh_l0"].why == "fused 3 gates"
    assert last["final.weight"].why == "output head: the last linear layer"


def test_without_names_of_classes_the_graph_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshmuon.models.traced.traced_class", lambda module: None)
    first = rows_of(stages()[0])
    assert first["words.weight"].why == "embedding"
    assert first["layers.0.conv.weight"].why == "matrix, filter (out, in·kernel)"
    assert first["layers.0.attn.qkv.weight"].matrices == 3


def test_the_class_that_a_module_was_traced_from(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stages()[0]
    assert torch_compat.traced_class(stage.get_submodule("words")) == "torch.nn.modules.sparse.Embedding"
    assert torch_compat.traced_class(nn.Linear(2, 2)) is None
    assert class_of(stage.get_submodule("words")) is nn.Embedding
    assert class_of(stage.get_submodule("layers.0.attn")) is Attention
    monkeypatch.setattr(
        "meshmuon.models.traced.traced_class", lambda module: "models.of.another.program.BloomAttention"
    )
    assert class_of(stage).__name__ == "BloomAttention"


def test_models_traced_by_fx() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.attn, self.head = nn.Parameter(torch.randn(50, 32)), Attention(), nn.Linear(32, 9)

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(self.attn(nn.functional.embedding(tokens, self.rows)))
            return out

    found = rows_of(fx.symbolic_trace(Small()))
    assert found["rows"].why == "embedding"
    assert (found["attn.qkv.weight"].matrices, found["attn.o_proj.weight"].matrices) == (3, 1)
    assert found["head.weight"].route == "adamw"


def test_what_no_graph_tells_is_warned_of() -> None:
    class PerHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query_key_value, self.dense = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.query_key_value(x).view(2, 10, 4, 24).split(8, dim=-1)
            out: Tensor = self.dense((q + k * v).flatten(2))
            return out

    with pytest.warns(RoutingWarning, match=r"query_key_value\.weight looks like several projections"):
        Muon(get_default_muon_param_groups(fx.symbolic_trace(PerHead())))
