"""Modules that people write themselves: embeddings that are no nn.Embedding, biases of stacks, fused weights, small parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon import Muon, RoutingWarning, get_default_muon_param_groups
from meshmuon.models import LOOKS_FUSED
from tests.support.architectures import library

from .test_contents import contents, in_block, linear, module
from .test_parts import places, randomised, same, scale, sets_of

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
    assert contents(in_block(**{name: module("ColumnParallel", weight=(64, 16))}), f"layers.0.{name}.weight").route == "muon"
    assert contents(in_block(**{name: linear(64, 16)}), f"layers.0.{name}.weight").route == "muon"


def test_linear_layers_named_after_an_embedding() -> None:
    """A layer of a class of its own is told by in_features or by its class; a word in front of ``emb`` does not make a table."""
    own = module("QuantLinear", weight=(64, 16))
    assert contents(in_block(cond_emb=own), "layers.0.cond_emb.weight").route == "muon"
    assert contents(in_block(cond_emb=linear(64, 16)), "layers.0.cond_emb.weight").route == "muon"


def test_lists_of_tables() -> None:
    model = module("Model", embs=nn.ParameterList([torch.zeros(50, 16)]), registers=nn.ParameterList([torch.zeros(8, 16)]))
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
    shapes: dict[str, Any] = {
        "w1": (6, 16, 32),
        "b1": (6, 32),
        "w2": (6, 32, 16),
        "b2": (6, 16),
        "up_b": (6, 32),
        "gate": (6, 16),
    }
    model = module("Model", experts=module("Experts", **shapes))
    found = {name.removeprefix("experts."): contents(model, name) for name, _ in model.named_parameters()}
    assert {name for name, known in found.items() if known.reason == "bias of a stack"} == {"b1", "b2", "up_b"}
    assert found["gate"].route == "muon"  # a router has the shape of a bias
    assert contents(module("LowRank", a=(32, 8), b=(8, 32)), "b").route == "muon"  # no stack beside it


# Fused weights.


class GroupedAttention(nn.Module):
    """8 query heads and 2 key heads of 8, under names that no table has."""

    def __init__(self, told: bool, after: bool, fused: str = "qkv") -> None:
        super().__init__()
        if told:
            self.hq, self.hkv = 8, 2
        self.add_module(fused, linear(96, 64))
        if after:
            self.wo = linear(64, 64)


@pytest.mark.parametrize(
    ("told", "after", "split"), [(True, True, (64, 16, 16)), (False, True, None), (True, False, None), (False, False, None)]
)
def test_grouped_queries_are_never_thirds(told: bool, after: bool, split: Any) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([GroupedAttention(told, after) for _ in range(3)])})
    found = contents(model, "layers.0.qkv.weight")
    assert found.matrices.split == split
    assert found.reason == ("fused q, k, v" if split else LOOKS_FUSED)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Muon(get_default_muon_param_groups(model))
    doubts = [str(warning.message) for warning in caught if issubclass(warning.category, RoutingWarning)]
    assert len(doubts) == (0 if split else 1)  # one for all layers
    assert all("layers.0.qkv.weight and 2 more" in doubt and "split=(...)" in doubt for doubt in doubts)


def test_other_attention_of_the_same_sizes_is_not_cut() -> None:
    """Values of 64 and keys of 16 outputs are [q, k, v] = [16, 16, 64], as 8 heads of queries and 2 of keys are [64, 16, 16]."""
    attention = GroupedAttention(told=False, after=True)
    attention.num_heads, attention.ratio = 2, 4
    assert contents(in_block(attn=attention), "layers.0.attn.qkv.weight").reason == LOOKS_FUSED


@pytest.mark.parametrize(("inner", "expected"), [(64, (64,) * 3), (32, (32,) * 3)])
def test_equal_parts_of_any_width(inner: int, expected: tuple[int, ...]) -> None:
    """What follows attention tells the width of q; of ``to_out`` it is one level down."""
    attention = module("Attention", to_qkv=linear(3 * inner, 64), to_out=nn.Sequential(linear(64, inner), nn.Dropout()))
    assert contents(in_block(attn=attention), "layers.0.attn.to_qkv.weight").matrices.split == expected


def test_where_stages_of_a_backbone_meet() -> None:
    """SAM 2: 96 channels come in, 192 go out."""
    attention = module("MultiScaleAttention", qkv=linear(576, 96), proj=linear(192, 192))
    assert contents(in_block(attn=attention), "layers.0.attn.qkv.weight").matrices.split == (192,) * 3


def test_thirds_that_the_next_layer_denies() -> None:
    """(192, 64) looks like three square blocks, but attention hands on 96 channels: 96 + 48 + 48."""
    attention = module("Attention", qkv=linear(192, 64), o_proj=linear(64, 96))
    assert contents(in_block(attn=attention), "layers.0.attn.qkv.weight").reason == LOOKS_FUSED


def test_heads_that_are_pooled_after_attention() -> None:
    """MiniMax H3: the next layer takes less than q has, but heads and their size tell; differential attention has five parts."""
    attention = module("Attention", qkv=linear(192, 64), proj=linear(32, 32), num_heads=4, head_dim=16)
    assert contents(in_block(attn=attention), "layers.0.attn.qkv.weight").matrices.split == (64,) * 3
    differential = module("StableAudio3SelfAttention", to_qkv=linear(320, 64), to_out=linear(64, 64), use_differential=True)
    assert contents(in_block(attn=differential), "layers.0.attn.to_qkv.weight").matrices.split == (64,) * 5


def test_two_blocks_need_queries_beside_them() -> None:
    """(128, 64) is k and v of cross-attention, or q with half as many keys and values."""
    cross = module("Attention", c_attn=linear(128, 64), q_attn=linear(64, 64), c_proj=linear(64, 64))
    assert contents(in_block(attn=cross), "layers.0.attn.c_attn.weight").matrices.split == (64, 64)
    grouped = module("Attention", c_attn=linear(128, 64), c_proj=linear(64, 64), nh=8, ng=4)
    assert contents(in_block(attn=grouped), "layers.0.attn.c_attn.weight").matrices.split == (64, 32, 32)


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
    assert (found.route, found.reason) == ("adamw", "fused b, a of each key head: parts of at most 4 rows, too few for Muon")


# Layouts of torchtitan and timm that their tables' rows claim.


def attention_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v)


class AttentionCl(nn.Module):
    """As timm's class of this name: q, k, v of each head one after the other, or three blocks."""

    def __init__(self, head_first: bool) -> None:
        super().__init__()
        self.num_heads, self.dim_head, self.head_first = 3, 8, head_first
        self.qkv, self.proj = linear(72, 16), linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.head_first:
            q, k, v = self.qkv(x).view(batch, length, self.num_heads, 3 * self.dim_head).transpose(1, 2).chunk(3, dim=3)
        else:
            q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, self.dim_head).transpose(1, 3).unbind(2)
        out: Tensor = self.proj(attention_of(q, k, v).transpose(1, 2).reshape(batch, length, -1))
        return out


class Levit(nn.Module):
    """As timm's LeViT and TinyViT: keys of 6 and values of 10 in each head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.key_dim, self.val_dim = 3, 6, 10
        self.qkv, self.proj = linear(66, 16), linear(16, 30)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, self.num_heads, -1)
        q, k, v = (part.transpose(1, 2) for part in heads.split([self.key_dim, self.key_dim, self.val_dim], dim=3))
        out: Tensor = self.proj(attention_of(q, k, v).transpose(1, 2).reshape(batch, length, -1))
        return out


class Titan(nn.Module):
    """Attention over torchtitan's own ``FusedQKVLinear``: 6 heads in 2 groups of [q, q, q, k, v]."""

    def __init__(self) -> None:
        super().__init__()
        from torchtitan.models.common.attention import FusedQKVLinear
        from torchtitan.models.common.linear import Linear

        config = FusedQKVLinear.Config(
            head_dim=8, n_heads=6, n_kv_heads=2, wqkv=Linear.Config(in_features=16, out_features=80, bias=False)
        )
        self.qkv_linear, self.wo = FusedQKVLinear(config), linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv_linear(x))
        k, v = (part.repeat_interleave(3, dim=1) for part in (k, v))
        out: Tensor = self.wo(attention_of(q, k, v).transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda: AttentionCl(True), [(24, 16)] * 3),
        (lambda: AttentionCl(False), [(24, 16)] * 3),
        (Levit, [(18, 16), (18, 16), (30, 16)]),
        (Titan, [(48, 16), (16, 16), (16, 16)]),
    ],
    ids=["timm by head", "timm in blocks", "timm LeViT", "torchtitan by group"],
)
def test_parts_of_heads_and_groups(build: Callable[[], nn.Module], shapes: list[tuple[int, int]]) -> None:
    """Queries times 3 and keys over 3 change nothing; without values nothing is left."""
    if build is Titan:
        library("torchtitan")
    layer = build()
    model = randomised(nn.ModuleDict({"layers": nn.ModuleList([layer])}))
    (name,) = [name for name, _ in model.named_parameters() if "qkv" in name]
    weight, parts = dict(model.named_parameters())[name], sets_of(model, name)
    assert [part.lr_shape for part in parts] == shapes
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = layer(x)
        scale(weight, parts[0], 3.0)
        assert not same(layer(x), plain)
        scale(weight, parts[1], 1 / 3.0)
        assert same(layer(x), plain)
        scale(weight, parts[2], 0.0)
        assert not layer(x).any()


def test_torchtitan_stores_the_same_parts() -> None:
    """Its checkpoints have the parts as separate weights."""
    library("torchtitan")
    model = nn.ModuleDict({"layers": nn.ModuleList([randomised(Titan())])})
    name = "layers.0.qkv_linear.wqkv.weight"
    weight, saved = dict(model.named_parameters())[name], model.state_dict()
    for part, label in zip(sets_of(model, name), ("wq", "wk", "wv"), strict=True):
        assert torch.equal(weight[places(weight, part)], saved[name.replace("wqkv", label)])
