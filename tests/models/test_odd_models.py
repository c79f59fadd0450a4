"""Models as people write them, which no table knows: mixtures, fused attention, tied weights, a UNet, state spaces.

What is expected is written down by hand for each, from what their forward would do.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from meshmuon import Muon, get_default_muon_param_groups

from .test_contents import contents, in_block, linear, module


def routed(model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Matrices by name for Muon, "adamw" for the rest, without vectors; and the warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = Muon(get_default_muon_param_groups(model), allow_inactive=True).routing_table()
    return {row.name: row.matrices if row.route == "muon" else "adamw" for row in table.rows if len(row.shape) > 1}, list(
        table.warnings
    )


def raw(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def test_a_mixture_with_its_own_stacks() -> None:
    """(E, in, out), as the biases say in one, and the router in the other."""
    ffn = module(
        "SparseFFN", w_in=(8, 32, 64), b_in=(8, 64), w_out=(8, 64, 32), b_out=(8, 32), router=linear(8, 32), noise=linear(8, 32)
    )
    stacked = module("SwitchMoE", gate_w=(32, 8), wi_0=(8, 32, 64), wi_1=(8, 32, 64), wo=(8, 64, 32))
    model = module("Model", tok_emb=nn.Embedding(200, 32), pos_emb=(1, 128, 32), head=linear(200, 32))
    model.layers = nn.ModuleList([nn.ModuleDict({"moe": ffn}), nn.ModuleDict({"mlp": stacked})])
    found, doubts = routed(model)
    assert not doubts
    assert found == {
        "tok_emb.weight": "adamw",
        "pos_emb": "adamw",
        "head.weight": "adamw",
        "layers.0.moe.w_in": 8,
        "layers.0.moe.b_in": "adamw",
        "layers.0.moe.w_out": 8,
        "layers.0.moe.b_out": "adamw",
        "layers.0.moe.router.weight": 1,
        "layers.0.moe.noise.weight": 1,
        "layers.1.mlp.gate_w": 1,
        "layers.1.mlp.wi_0": 8,
        "layers.1.mlp.wi_1": 8,
        "layers.1.mlp.wo": 8,
    }
    for name in ("layers.0.moe.w_in", "layers.0.moe.w_out", "layers.1.mlp.wi_0", "layers.1.mlp.wo"):
        assert contents(model, name).reason == "expert stack (E, in, out)"


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"w1": (8, 64, 32), "b1": (8, 64)}, "expert stack (E, out, in)"),
        ({"w1": (8, 32, 64), "b1": (8, 64)}, "expert stack (E, in, out)"),
        ({"w1": (8, 64, 32), "gate": (8, 32)}, "expert stack (E, out, in)"),
        ({"w2": (8, 32, 64), "gate": (8, 32)}, "expert stack (E, out, in)"),
        ({"w2": (8, 64, 32), "gate": (32, 8)}, "expert stack (E, in, out)"),
        ({"w1": (8, 64, 32)}, "expert stack (E, out, in, assumed)"),
        ({"blend": (8, 64, 32), "gate": (8, 32)}, "expert stack (E, out, in, assumed)"),
        ({"w1": (8, 32, 32)}, "expert stack (E, out, in)"),
    ],
)
def test_orientation_by_what_is_beside(shapes: dict[str, Any], reason: str) -> None:
    assert contents(module("Model", experts=module("Experts", **shapes)), f"experts.{next(iter(shapes))}").reason == reason


def test_attention_and_mlps_with_names_of_their_own() -> None:
    attention = module("Att", nq=6, nkv=2, hd=16, w_qkv=linear(160, 48), w_o=linear(48, 96), q_norm=(6, 16), k_norm=(6, 16))
    gated, halved = module("Mlp", w_gate_up=linear(160, 48), w_down=linear(48, 80)), module("Mlp", wi=linear(160, 48))
    halved.dense_out = linear(48, 80)
    plain = module("Mlp", up=linear(160, 48), down=linear(48, 160))
    model = module("Model", wte=nn.Embedding(200, 48), back=linear(200, 48))  # not the last one that is registered
    model.h = nn.ModuleDict({"layer0": nn.ModuleDict({"att": attention, "a": gated, "b": halved, "c": plain})})
    found, doubts = routed(model)
    assert not doubts
    assert contents(model, "back.weight").reason == "output head: the shape of an embedding"
    assert {name.removeprefix("h.layer0."): matrices for name, matrices in found.items()} == {
        "wte.weight": "adamw",
        "back.weight": "adamw",
        "att.w_qkv.weight": 3,
        "att.w_o.weight": 1,
        "att.q_norm": "adamw",
        "att.k_norm": "adamw",
        "a.w_gate_up.weight": 2,
        "a.w_down.weight": 1,
        "b.wi.weight": 2,
        "b.dense_out.weight": 1,
        "c.up.weight": 1,
        "c.down.weight": 1,
    }


def test_a_tied_encoder_decoder() -> None:
    model = module("Translator", shared=nn.Embedding(150, 32), generator=nn.Linear(32, 150), length_predictor=linear(20, 32))
    model.enc_embed = model.shared
    model.generator.weight = model.shared.weight
    model.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 1, enable_nested_tensor=False)
    model.dec = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64), 1)
    found, doubts = routed(model)
    assert not doubts
    assert {name for name, matrices in found.items() if matrices == "adamw"} == {"shared.weight", "length_predictor.weight"}
    assert {name for name, matrices in found.items() if matrices == 3} == {
        "enc.layers.0.self_attn.in_proj_weight",
        "dec.layers.0.self_attn.in_proj_weight",
        "dec.layers.0.multihead_attn.in_proj_weight",
    }


def test_a_unet() -> None:
    res = nn.ModuleDict({"n": nn.GroupNorm(4, 16), "c": nn.Conv2d(16, 32, 3), "t": linear(64, 128), "skip": nn.Conv2d(16, 32, 1)})
    cross = module("Cross", to_q=linear(32, 32), to_kv=linear(64, 48), to_out=nn.Sequential(linear(32, 32), nn.Dropout()))
    model = module("UNet", label_emb=nn.Embedding(10, 128), null_label=(1, 128), inp=nn.Conv2d(3, 16, 3))
    model.time_mlp = nn.Sequential(linear(128, 32), nn.SiLU(), linear(128, 128))
    model.down, model.up = nn.ModuleList([res, cross]), nn.ConvTranspose2d(32, 32, 4)
    model.out = nn.Sequential(nn.GroupNorm(4, 32), nn.Conv2d(32, 3, 3))
    found, doubts = routed(model)
    assert not doubts
    assert {name: matrices for name, matrices in found.items() if matrices != "adamw"} == {
        "time_mlp.0.weight": 1,
        "time_mlp.2.weight": 1,
        "down.0.t.weight": 1,
        "down.1.to_q.weight": 1,
        "down.1.to_kv.weight": 2,
        "down.1.to_out.0.weight": 1,
    }


def test_state_spaces() -> None:
    mamba = module("SSMBlock", in_proj=linear(128, 32), x_proj=linear(21, 64), dt_proj=linear(64, 5), A_log=(64, 8), D=(64,))
    mamba.conv1d, mamba.out_proj = nn.Conv1d(64, 64, 4, groups=64), linear(32, 64)
    s4d = module("S4D", log_dt=(32,), log_A_real=(32, 8), A_imag=(32, 8), B=(32, 8), C=(32, 8, 2), output_linear=linear(64, 32))
    lru = module("LRU", nu_log=(16,), B_re=(16, 32), B_im=(16, 32), C_re=(32, 16), C_im=(32, 16), D=(32,))
    model = module("Model", encoder=linear(32, 7), layers=nn.ModuleList([mamba, s4d, lru]), decoder=linear(10, 32))
    found, doubts = routed(model)
    assert not doubts
    assert {name: matrices for name, matrices in found.items() if matrices != "adamw"} == {
        "encoder.weight": 1,
        "layers.0.in_proj.weight": 2,
        "layers.0.x_proj.weight": 3,
        "layers.0.dt_proj.weight": 1,
        "layers.0.out_proj.weight": 1,
        "layers.1.output_linear.weight": 1,
    }


def test_low_rank_factors_are_no_state_space() -> None:
    """A LoRA of one's own: (r, in) and (out, r)."""
    model = in_block(up=module("LoRALinear", base=linear(64, 32), A=(8, 32), B=(64, 8)))
    assert {contents(model, f"layers.0.up.{name}").route for name in "AB"} == {"muon"}
    assert contents(in_block(ssm=module("SSM", A=(16, 16), B=(16, 16), C=(16, 16))), "layers.0.ssm.A").route == "adamw"
