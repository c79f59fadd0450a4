"""Models as people write them, which no table knows: mixtures, fused attention, tied weights, a UNet, state spaces.

What is expected is written down by hand for each, from what their forward would do.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

from meshmuon import Muon, RoutingWarning, get_default_muon_param_groups

from .test_contents import contents, in_block, linear, module


def routed(model: nn.Module) -> dict[int, str]:
    """Number of matrices → names of the parameters that hold so many, without vectors; 0 for AdamW. Nothing is
    warned of.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoutingWarning)
        table = Muon(get_default_muon_param_groups(model), allow_inactive=True).routing_table()
    names: dict[int, list[str]] = {}
    for row in sorted((row for row in table.rows if len(row.shape) > 1), key=lambda row: row.name):
        names.setdefault(row.matrices, []).append(row.name)
    return {matrices: " ".join(found) for matrices, found in names.items()}


def test_a_mixture_with_its_own_stacks() -> None:
    """(E, in, out), as the biases say in one, and the router in the other."""
    ffn = module(
        "SparseFFN",
        w_in=(8, 32, 64),
        b_in=(8, 64),
        w_out=(8, 64, 32),
        b_out=(8, 32),
        router=linear(8, 32),
        noise=linear(8, 32),
    )
    stacked = module("SwitchMoE", gate_w=(32, 8), wi_0=(8, 32, 64), wi_1=(8, 32, 64), wo=(8, 64, 32))
    model = module("Model", tok_emb=nn.Embedding(200, 32), pos_emb=(1, 128, 32), head=linear(200, 32))
    model.layers = nn.ModuleList([nn.ModuleDict({"moe": ffn}), nn.ModuleDict({"mlp": stacked})])
    assert routed(model) == {
        0: "head.weight layers.0.moe.b_in layers.0.moe.b_out pos_emb tok_emb.weight",
        1: "layers.0.moe.noise.weight layers.0.moe.router.weight layers.1.mlp.gate_w",
        8: "layers.0.moe.w_in layers.0.moe.w_out layers.1.mlp.wi_0 layers.1.mlp.wi_1 layers.1.mlp.wo",
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
    assert (
        contents(module("Model", experts=module("Experts", **shapes)), f"experts.{next(iter(shapes))}").reason == reason
    )


def test_attention_and_mlps_with_names_of_their_own() -> None:
    attention = module(
        "Att", nq=6, nkv=2, hd=16, w_qkv=linear(160, 48), w_o=linear(48, 96), q_norm=(6, 16), k_norm=(6, 16)
    )
    gated, halved = module("Mlp", w_gate_up=linear(160, 48), w_down=linear(48, 80)), module("Mlp", wi=linear(160, 48))
    halved.dense_out = linear(48, 80)
    plain = module("Mlp", up=linear(160, 48), down=linear(48, 160))
    model = module("Model", wte=nn.Embedding(200, 48), back=linear(200, 48))  # not the last one that is registered
    model.h = nn.ModuleDict({"layer0": nn.ModuleDict({"att": attention, "a": gated, "b": halved, "c": plain})})
    assert contents(model, "back.weight").reason == "output head: the shape of an embedding"
    assert {matrices: names.replace("h.layer0.", "") for matrices, names in routed(model).items()} == {
        0: "back.weight att.k_norm att.q_norm wte.weight",
        1: "a.w_down.weight att.w_o.weight b.dense_out.weight c.down.weight c.up.weight",
        2: "a.w_gate_up.weight b.wi.weight",
        3: "att.w_qkv.weight",
    }


def test_a_tied_encoder_decoder() -> None:
    model = module(
        "Translator", shared=nn.Embedding(150, 32), generator=nn.Linear(32, 150), length_predictor=linear(20, 32)
    )
    model.enc_embed = model.shared
    model.generator.weight = model.shared.weight
    model.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 1, enable_nested_tensor=False)
    model.dec = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64), 1)
    found = routed(model)
    assert found[0] == "length_predictor.weight shared.weight"
    attention = "dec.layers.0.multihead_attn dec.layers.0.self_attn enc.layers.0.self_attn"
    assert found[3] == " ".join(f"{name}.in_proj_weight" for name in attention.split())


def test_a_unet() -> None:
    res = nn.ModuleDict(
        {"n": nn.GroupNorm(4, 16), "c": nn.Conv2d(16, 32, 3), "t": linear(64, 128), "skip": nn.Conv2d(16, 32, 1)}
    )
    cross = module(
        "Cross", to_q=linear(32, 32), to_kv=linear(64, 48), to_out=nn.Sequential(linear(32, 32), nn.Dropout())
    )
    model = module("UNet", label_emb=nn.Embedding(10, 128), null_label=(1, 128), inp=nn.Conv2d(3, 16, 3))
    model.time_mlp = nn.Sequential(linear(128, 32), nn.SiLU(), linear(128, 128))
    model.down, model.up = nn.ModuleList([res, cross]), nn.ConvTranspose2d(32, 32, 4)
    model.out = nn.Sequential(nn.GroupNorm(4, 32), nn.Conv2d(32, 3, 3))
    found = routed(model)
    filters, others = "down.0.c.weight down.0.skip.weight", "down.1.to_out.0.weight down.1.to_q.weight"
    assert found[1] == f"{filters} down.0.t.weight {others} time_mlp.0.weight time_mlp.2.weight up.weight"
    assert found[2] == "down.1.to_kv.weight"
    assert set(found) == {0, 1, 2}


def test_state_spaces() -> None:
    mamba = module(
        "SSMBlock", in_proj=linear(128, 32), x_proj=linear(21, 64), dt_proj=linear(64, 5), A_log=(64, 8), D=(64,)
    )
    mamba.conv1d, mamba.out_proj = nn.Conv1d(64, 64, 4, groups=64), linear(32, 64)
    s4d = module(
        "S4D", log_dt=(32,), log_A_real=(32, 8), A_imag=(32, 8), B=(32, 8), C=(32, 8, 2), output_linear=linear(64, 32)
    )
    lru = module("LRU", nu_log=(16,), B_re=(16, 32), B_im=(16, 32), C_re=(32, 16), C_im=(32, 16), D=(32,))
    model = module("Model", encoder=linear(32, 7), layers=nn.ModuleList([mamba, s4d, lru]), decoder=linear(10, 32))
    found = routed(model)
    assert found[1] == "encoder.weight layers.0.dt_proj.weight layers.0.out_proj.weight layers.1.output_linear.weight"
    assert (found[2], found[3]) == ("layers.0.in_proj.weight", "layers.0.x_proj.weight")
    assert set(found) == {0, 1, 2, 3}


def test_low_rank_factors_are_no_state_space() -> None:
    """A LoRA of one's own: (r, in) and (out, r)."""
    model = in_block(up=module("LoRALinear", base=linear(64, 32), A=(8, 32), B=(64, 8)))
    assert {contents(model, f"layers.0.up.{name}").route for name in "AB"} == {"muon"}
    assert contents(in_block(ssm=module("SSM", A=(16, 16), B=(16, 16), C=(16, 16))), "layers.0.ssm.A").route == "adamw"
