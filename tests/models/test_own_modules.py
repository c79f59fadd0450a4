"""Modules that people write themselves: embeddings that are no nn.Embedding, biases of stacks, fused weights, small
parts.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshmuon import Muon, RoutingWarning, get_default_muon_param_groups
from meshmuon.models import LOOKS_FUSED

from .test_contents import contents, in_block, linear, module

# Embeddings.


@pytest.mark.parametrize("name", ["tok_emb", "token_emb", "emb", "word_embed", "char_embs", "embed_in", "codebook_0"])
def test_embeddings_of_other_classes_by_name(name: str) -> None:
    """As a module with a weight, and as a parameter of the model itself."""
    table = module("Lookup", weight=(50, 16))
    assert contents(module("Model", **{name: table}, up=linear(64, 16)), f"{name}.weight").route == "adamw"
    assert contents(module("Model", **{name: (50, 16)}, up=linear(64, 16)), name).route == "adamw"


def test_embeddings_by_class() -> None:
    model = module("Model", words=module("VocabParallelEmbedding", weight=(50, 16)), up=linear(64, 16))
    assert contents(model, "words.weight").reason == "embedding: by class"


def test_a_mixin_named_after_embeddings_makes_no_table() -> None:
    """As transformers' models have it."""
    mixin = type("EmbeddingAccessMixin", (), {})
    model: nn.Module = type("Model", (nn.Module, mixin), {})()
    model.projection = nn.Parameter(torch.zeros(16, 8))
    assert contents(model, "projection").route == "muon"


@pytest.mark.parametrize("name", ["embed_proj", "time_emb_mlp", "emb_to_hidden"])
def test_projections_of_embeddings_are_matrices(name: str) -> None:
    assert (
        contents(in_block(**{name: module("ColumnParallel", weight=(64, 16))}), f"layers.0.{name}.weight").route
        == "muon"
    )
    assert contents(in_block(**{name: linear(64, 16)}), f"layers.0.{name}.weight").route == "muon"


def test_linear_layers_named_after_an_embedding() -> None:
    """A layer of a class of its own is told by in_features or by its class; a word in front of ``emb`` does not
    make a table.
    """
    own = module("QuantLinear", weight=(64, 16))
    assert contents(in_block(cond_emb=own), "layers.0.cond_emb.weight").route == "muon"
    assert contents(in_block(cond_emb=linear(64, 16)), "layers.0.cond_emb.weight").route == "muon"


def test_lists_of_tables() -> None:
    model = module(
        "Model", embs=nn.ParameterList([torch.zeros(50, 16)]), registers=nn.ParameterList([torch.zeros(8, 16)])
    )
    assert {contents(model, name).route for name, _ in model.named_parameters()} == {"adamw"}


def test_bare_tables_of_the_size_of_the_vocabulary() -> None:
    model = module("Model", config=SimpleNamespace(vocab_size=50), first=(50, 16), last=(16, 50), up=linear(64, 16))
    assert contents(model, "first").reason == "table: rows equal vocab_size"
    assert contents(model, "last").reason == "table: columns equal vocab_size"


@pytest.mark.parametrize("parametrisation", ["spectral_norm", "orthogonal"])
def test_parametrised_layers_are_what_they_are(parametrisation: str) -> None:
    parametrised = getattr(nn.utils.parametrizations, parametrisation)
    model = module("Model", tok=parametrised(nn.Embedding(24, 16)), fc=parametrised(linear(40, 16)), head=linear(9, 16))
    found = {name: contents(model, name).route for name, param in model.named_parameters() if param.dim() == 2}
    assert found == {
        "tok.parametrizations.weight.original": "adamw",
        "fc.parametrizations.weight.original": "muon",
        "head.weight": "adamw",
    }


# Biases of stacks.


def test_biases_of_expert_stacks() -> None:
    experts = module("Experts", w1=(6, 16, 32), b1=(6, 32), w2=(6, 32, 16), b2=(6, 16), up_b=(6, 32), gate=(6, 16))
    model = module("Model", experts=experts)
    found = {name.removeprefix("experts."): contents(model, name) for name, _ in model.named_parameters()}
    assert {name for name, known in found.items() if known.reason == "bias of a stack"} == {"b1", "b2", "up_b"}
    assert found["gate"].route == "muon"  # a router has the shape of a bias
    assert contents(module("LowRank", a=(32, 8), b=(8, 32)), "b").route == "muon"  # no stack beside it


# Fused weights.


@pytest.mark.parametrize(
    ("told", "after", "split"),
    [(True, True, (64, 16, 16)), (False, True, None), (True, False, None), (False, False, None)],
)
def test_grouped_queries_are_never_thirds(told: bool, after: bool, split: Any) -> None:
    """8 query heads and 2 key heads of 8, under names that no table has."""
    layers = nn.ModuleList(
        module("Attention", qkv=linear(96, 64), **({"hq": 8, "hkv": 2} if told else {})) for _ in range(3)
    )
    for layer in layers if after else ():
        layer.wo = linear(64, 64)
    model = nn.ModuleDict({"layers": layers})
    found = contents(model, "layers.0.qkv.weight")
    assert found.matrices.split == split
    assert found.reason == ("fused q, k, v" if split else LOOKS_FUSED)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Muon(get_default_muon_param_groups(model))
    doubts = [str(warning.message) for warning in caught if issubclass(warning.category, RoutingWarning)]
    assert len(doubts) == (0 if split else 1)  # one for all layers
    assert all("layers.0.qkv.weight (and 2 more of its kind)" in doubt and "split=(...)" in doubt for doubt in doubts)


def test_bare_parameters() -> None:
    attention = module("Attention", wqkv=(96, 64), wo=(64, 64), hq=8, hkv=2)
    assert contents(in_block(attn=attention), "layers.0.attn.wqkv").matrices.split == (64, 16, 16)


# Small parts.


def test_small_parts_share_the_route_of_the_weight() -> None:
    model = in_block(modulation=module("FocalNetModulation", projection_in=linear(35, 16), focal_level=2))
    found = contents(model, "layers.0.modulation.projection_in.weight")
    assert (found.route, found.matrices.split) == ("muon", (16, 16, 3))
    assert found.reason == "fused q, context, gates; also its part of 3 rows: a weight has one route"


def test_a_weight_of_small_parts_only_goes_to_adamw() -> None:
    mixer = module("Mixer", in_proj_ba=linear(8, 16), num_v_heads=4, num_k_heads=2)
    found = contents(in_block(mixer=mixer), "layers.0.mixer.in_proj_ba.weight")
    assert (found.route, found.reason) == (
        "adamw",
        "fused b, a of each key head: parts of at most 4 rows, too few for Muon",
    )


D = 32


@pytest.mark.parametrize(
    ("layers", "parts"),
    [
        ({"in_proj": linear(3 * D, D), "out_proj": linear(D, D)}, 3),
        ({"in_proj": linear(3 * 48, D), "out_proj": linear(D, 48)}, 3),
        ({"in_proj": linear(3 * D, D), "out_proj": linear(D, D), "fc1": linear(3 * D, D), "fc2": linear(D, 3 * D)}, 3),
        ({"in_proj": linear(3 * D, D), "out_proj": linear(D, 3 * D)}, 1),  # an MLP
        ({"in_proj": linear(3 * D, D), "out_proj": linear(D, 3 * D // 2)}, 2),  # gate and up, or a state space
        ({"in_proj": linear(3 * D, D)}, 1),
        ({"in_proj": linear(4 * D, D), "out_proj": linear(D, 2 * D)}, 2),
    ],
)
def test_in_proj_beside_out_proj(layers: dict[str, nn.Module], parts: int) -> None:
    model = in_block(mix=module("Mix", **layers))
    rows = {row.name: row.matrices for row in Muon(model).routing_table().rows}
    assert rows["layers.0.mix.in_proj.weight"] == parts
    assert {rows[f"layers.0.mix.{name}.weight"] for name in layers if name != "in_proj"} <= {1}


@pytest.mark.parametrize(
    ("where", "class_name", "label"),
    [
        ("attn", "Mix", "project"),
        ("self_attention", "Mix", "in_linear"),
        ("mix", "CausalSelfAttention", "project"),
        ("mix", "MultiHeadMixer", "w"),
        ("mix", "Mix", "attn"),
        ("mha", "Mix", "in_layer"),
    ],
)
def test_a_weight_three_times_as_tall_in_attention_is_q_k_v(where: str, class_name: str, label: str) -> None:
    """By the name or the class of its module, or its own; not where the name says that it is one of the three."""
    for other in ({}, {"o": linear(D, D)}):
        owner = module(class_name, **{label: linear(3 * D, D)}, **other)
        rows = {row.name: row for row in Muon(in_block(**{where: owner})).routing_table().rows}
        found = rows[f"layers.0.{where}.{label}.weight"]
        assert (found.matrices, found.why) == (3, "fused q, k, v")


def test_attention_beside_the_mlp_of_its_block() -> None:
    """Both have the same shape; the name of one says attention."""
    block = module("Block", attn=linear(3 * D, D), o=linear(D, D), fc1=linear(3 * D, D), fc2=linear(D, 3 * D))
    rows = {row.name: row.matrices for row in Muon(in_block(block=block)).routing_table().rows}
    assert [rows[f"layers.0.block.{name}.weight"] for name in ("attn", "o", "fc1", "fc2")] == [3, 1, 1, 1]


@pytest.mark.parametrize(
    "layers",
    [
        {"fc1": linear(3 * D, D), "fc2": linear(D, 3 * D)},  # the MLP of an attention block
        {"fc1": linear(3 * D, D), "fc2": linear(D, 3 * D), "o": linear(D, D)},
        {"query": linear(3 * D, D), "key": linear(3 * D, D), "value": linear(3 * D, D)},  # heads wider than the model
        {"a": linear(3 * D, D), "b": linear(3 * D, D)},
        {"q_proj": linear(3 * D, D), "o_proj": linear(D, D)},
        {"project": linear(2 * D, D)},
        {"project": linear(3 * D + 3, D)},
        {"project": linear(3 * D, D), "out": linear(D, 2 * D)},  # it takes something else
    ],
)
def test_what_is_no_q_k_v_in_attention(layers: dict[str, nn.Module]) -> None:
    model = in_block(attn=module("AttentionBlock", **layers))
    assert {row.matrices for row in Muon(model).routing_table().rows} == {1}


def test_a_weight_three_times_as_tall_elsewhere_is_one_matrix() -> None:
    """Also in a class that has attention as a mixin, as diffusers' models do."""
    mixin = type("AttentionMixin", (), {})
    model: nn.Module = type("Model", (nn.Module, mixin), {})()
    model.embed, model.project, model.norm, model.back = (
        nn.Embedding(9, D),
        linear(3 * D, D),
        nn.LayerNorm(D),
        linear(D, D),
    )
    assert contents(model, "project.weight").reason == "matrix"
    assert (
        contents(in_block(mlp=module("Mlp", project=linear(3 * D, D))), "layers.0.mlp.project.weight").reason
        == "matrix"
    )
