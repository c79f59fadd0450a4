"""What is known of parameters, without any model library: modules of our own that are named and shaped like theirs."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon import ConfigError, Interleaved, Muon, get_default_muon_param_groups
from meshmuon.matrices import ParamMatrices
from meshmuon.models import LOOKS_FUSED, ModelContents, ParamContents
from meshmuon.models.fused import FUSED


def module(class_name: str = "Module", /, **attributes: Any) -> nn.Module:
    """A module of a class of this name, with attributes, parameters (from shapes) and submodules."""
    made: nn.Module = type(class_name, (nn.Module,), {})()
    for name, value in attributes.items():
        is_shape = isinstance(value, tuple) and all(isinstance(size, int) for size in value)
        setattr(made, name, nn.Parameter(torch.zeros(value)) if is_shape else value)
    return made


def linear(outputs: int, inputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def contents(model: nn.Module, name: str, **options: Any) -> ParamContents:
    return ModelContents(model, **options).of_param(name)


def in_block(**children: nn.Module) -> nn.Module:
    """A model with one block, so that no child is taken for the last layer."""
    return module("Model", layers=nn.ModuleList([nn.ModuleDict(children)]))


# Not matrices.


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("relative_position_bias_table", (169, 8), "bias"),
        ("attention_biases", (8, 196), "bias"),
        ("bias_u", (8, 64), "bias"),
        ("rel_pos_h", (27, 64), "position table"),
        ("position_embedding", (197, 64), "position table"),
        ("cls_token", (1, 1, 64), "token or query table"),
        ("latents", (64, 128), "token or query table"),
        ("latents_1d", (64, 128), "token or query table"),
        ("A_log", (64, 16), "state-space parameter"),
        ("D", (6, 64), "state-space parameter"),
        ("layer_scale_1", (64, 8), "scale"),
        ("logit_scale", (6, 1, 1), "scale"),
        ("weight_g", (64, 8), "weight-norm part"),
        ("level_embed", (8, 64), "embedding table"),
        ("mystery", (1, 6, 64), "token or table: its first dim is 1"),
        ("gate_weight", (4, 64), "at most 4 rows or columns: too few for Muon"),
    ],
)
def test_no_matrix(name: str, shape: tuple[int, ...], reason: str) -> None:
    found = contents(module("Attention", **{name: shape}), name)
    assert (found.route, found.reason) == ("adamw", reason)


@pytest.mark.parametrize(
    "name", ["w", "prompts_visual_projection", "kernel", "weight", "proj_weight", "alphabet_matrix"]
)
def test_other_parameters_are_matrices(name: str) -> None:
    assert contents(module("Mixer", **{name: (16, 8)}), name).route == "muon"


def test_parts_of_a_weight_norm() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    reasons = {name: contents(model, name).reason for name, param in model.named_parameters() if param.dim() == 2}
    assert set(reasons.values()) == {"weight-norm part"}
    assert len(reasons) == 2


def test_a_bias_that_a_linear_layer_holds_is_a_table() -> None:
    assert contents(in_block(rel_pos_bias=linear(12, 32)), "layers.0.rel_pos_bias.weight").reason == "position table"


# Heads.


def test_the_last_linear_layer_is_a_head() -> None:
    model = nn.Sequential(linear(16, 8), nn.ReLU(), linear(10, 16))
    assert contents(model, "2.weight") == ParamContents("adamw", "output head: the last linear layer")
    assert contents(model, "0.weight").route == "muon"


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(linear(16, 8), linear(16, 16)),  # square: perhaps a pooler
        nn.Sequential(*(nn.Sequential(linear(16, 8), linear(8, 16)) for _ in range(2))),  # a repeated block
        module("Model", first=linear(16, 8), layers=nn.ModuleList([linear(8, 16)])),
        linear(16, 8),  # the only layer
        module("BaseModel", config=SimpleNamespace(model_type="x"), first=linear(16, 8), proj=linear(8, 16)),
    ],
    ids=["square", "repeated", "list", "single", "base model"],
)
def test_no_head_at_the_end(model: nn.Module) -> None:
    assert all(contents(model, name).route == "muon" for name, _ in model.named_parameters())


def test_models_in_a_dict_have_heads_of_their_own() -> None:
    """Each is routed as alone, whatever heads the others have: so two models get names that differ."""

    def plain() -> nn.Module:
        return nn.Sequential(linear(16, 8), nn.ReLU(), linear(16, 16), linear(10, 16))

    named = module("Model", first=linear(16, 8), lm_head=linear(40, 16))
    both = nn.ModuleDict({"a": plain(), "b": named, "c": plain()})
    for key, alone in both.items():
        for name, _ in alone.named_parameters():
            assert contents(both, f"{key}.{name}") == contents(alone, name), (key, name)
    assert contents(both, "a.3.weight").reason == "output head: the last linear layer"
    layers = nn.ModuleDict({"first": linear(16, 8), "last": linear(10, 16)})
    assert contents(layers, "last.weight").reason == "output head: the last linear layer", (
        "of one model, layer by layer"
    )


def test_a_task_model_has_a_head_at_its_end() -> None:
    model = module(
        "ModelForPrediction", config=SimpleNamespace(model_type="x"), first=linear(16, 8), proj=linear(8, 16)
    )
    assert contents(model, "proj.weight").reason == "output head: the last linear layer"


def test_rows_that_equal_the_vocabulary() -> None:
    config = SimpleNamespace(vocab_size=50, num_labels=7)
    model = module(
        "Model", config=config, out=linear(50, 16), tags=linear(8, 16), back=linear(16, 50), body=linear(16, 16)
    )
    # 50 outputs are what ``back`` takes, so ``out`` may be a hidden layer.
    assert contents(model, "out.weight").route == "muon"
    assert contents(model, "back.weight").reason == "output head: columns equal vocab_size"
    assert contents(model, "tags.weight").reason == "output head: rows equal num_labels"
    del model.back
    assert contents(model, "out.weight").reason == "output head: rows equal vocab_size"


def test_hidden_layers_of_that_size_in_blocks_are_no_heads() -> None:
    model = in_block(up=linear(50, 16))
    model.config = SimpleNamespace(vocab_size=50)
    assert contents(model, "layers.0.up.weight").route == "muon"


# Stacks.


@pytest.mark.parametrize(
    ("class_name", "name", "expected"),
    [
        ("GroupedExperts", "w1", ParamMatrices(experts=True)),
        ("GroupedExperts", "w2_EDF", ParamMatrices(experts=True)),
        ("GptOssGroupedExperts", "mlp1_weight_EGD", ParamMatrices(experts=True, split=Interleaved((1, 1), 8))),
        ("GroupedMLP", "weight1", ParamMatrices(experts=True)),
        ("MyExperts", "w13", ParamMatrices(experts=True, split=(8, 8))),
        ("MLP", "w1", ParamMatrices(experts=True, dims="in_out")),
    ],
)
def test_stacks(class_name: str, name: str, expected: ParamMatrices) -> None:
    found = contents(module("Model", mlp=module(class_name, **{name: (5, 16, 8)})), f"mlp.{name}")
    assert (found.route, found.matrices) == ("muon", expected)


def test_experts_below_each_other() -> None:
    mlp = module("DbrxExpertGLU", ffn_hidden_size=6, w1=(18, 8), w2=(18, 8))
    assert contents(mlp, "w1").matrices == ParamMatrices(experts=3)
    assert contents(mlp, "w2").matrices == ParamMatrices(experts=3, dims="in_out")
    optimizer = Muon(get_default_muon_param_groups(mlp))
    assert [row.matrices for row in optimizer.routing_table().rows] == [3, 3]
    with pytest.raises(
        ConfigError, match=r'w2: NorMuon keeps one number per output, .*matrices=\{"w2": \{"experts": 3\}\}'
    ):
        Muon(get_default_muon_param_groups(mlp), rule="normuon")


# Fused weights.


def test_every_row_of_the_table_can_be_read() -> None:
    """No row has a size that the reader of sizes would misread."""
    for row in FUSED:
        for size in (*row.sizes.split(", "), row.repeats or "1"):
            assert re.fullmatch(r"[\w.]+([*/+-][\w.]+)*", size)


DT_B_C = {"d_inner": 16, "d_state": 5, "dt_rank": 3}
MAMBA2 = {"d_inner": 16, "d_state": 5}
HEADS = {"num_heads": 3, "dim_head": 8}
CONFIG = SimpleNamespace(head_dim=99, num_kv_heads=2, new_decoder_architecture=True)
GROUPED = {"n_head": 4, "head_dim": 8, "config": CONFIG}


@pytest.mark.parametrize(
    ("owner", "label", "shape", "attributes", "split"),
    [
        ("Attention", "qkv", (24, 8), {}, (8, 8, 8)),
        ("Attention", "qkv_proj", (32, 16), {"num_heads": 2, "num_key_value_heads": 1, "head_dim": 8}, (16, 8, 8)),
        # Attributes of the owner count before those of configs; True is no number.
        ("FalconAttention", "query_key_value", (64, 16), {**GROUPED, "kv_heads": True}, Interleaved((16, 8, 8), 2)),
        ("Attention", "to_kv", (16, 24), {}, (8, 8)),
        ("BloomAttention", "query_key_value", (24, 8), {"num_heads": 2}, Interleaved((4, 4, 4), 2)),
        ("FSDPBloomAttention", "query_key_value", (24, 8), {"num_heads": 2}, Interleaved((4, 4, 4), 2)),
        ("MyMLP", "gate_up_proj", (32, 8), {}, (16, 16)),
        ("AdaLayerNormZero", "linear", (48, 8), {}, (8,) * 6),
        ("DeepseekV3Attention", "kv_a_proj_with_mqa", (12, 8), {"kv_lora_rank": 12, "qk_rope_head_dim": 0}, None),
        ("Attention", "query_key_value", (24, 8), {}, LOOKS_FUSED),
        # What follows attention tells the width of q; of ``to_out`` it is one level down.
        ("Attention", "to_qkv", (192, 64), {"to_out": nn.Sequential(linear(64, 64), nn.Dropout())}, (64,) * 3),
        ("Attention", "to_qkv", (96, 64), {"to_out": nn.Sequential(linear(64, 32), nn.Dropout())}, (32,) * 3),
        # SAM 2, where stages of a backbone meet: 96 channels come in, 192 go out.
        ("MultiScaleAttention", "qkv", (576, 96), {"proj": linear(192, 192)}, (192,) * 3),
        # Looks like three square blocks, but attention hands on 96 channels: 96 + 48 + 48.
        ("Attention", "qkv", (192, 64), {"o_proj": linear(64, 96)}, LOOKS_FUSED),
        # [q, k, v] = [16, 16, 64] has the sizes of 8 heads of queries and 2 of keys, [64, 16, 16].
        ("Attention", "qkv", (96, 64), {"wo": linear(64, 64), "num_heads": 2, "ratio": 4}, LOOKS_FUSED),
        # MiniMax H3 pools heads after attention: the next layer takes less than q has, but heads and their size tell.
        ("Attention", "qkv", (192, 64), {"proj": linear(32, 32), "num_heads": 4, "head_dim": 16}, (64,) * 3),
        (
            "StableAudio3SelfAttention",
            "to_qkv",
            (320, 64),
            {"to_out": linear(64, 64), "use_differential": True},
            (64,) * 5,
        ),
        # (128, 64) is k and v of cross-attention, or q with half as many keys and values.
        ("Attention", "c_attn", (128, 64), {"q_attn": linear(64, 64), "c_proj": linear(64, 64)}, (64, 64)),
        ("Attention", "c_attn", (128, 64), {"c_proj": linear(64, 64), "nh": 8, "ng": 4}, (64, 32, 32)),
        # timm's: AttentionCl, LeViT and TinyViT, GC ViT with and without queries from elsewhere.
        (
            "AttentionCl",
            "qkv",
            (72, 16),
            {**HEADS, "head_first": True, "proj": linear(16, 24)},
            Interleaved((8, 8, 8), 3),
        ),
        ("AttentionCl", "qkv", (72, 16), {**HEADS, "head_first": False, "proj": linear(16, 24)}, (24,) * 3),
        ("Attention", "qkv", (66, 16), {"num_heads": 3, "key_dim": 6, "val_dim": 10}, Interleaved((6, 6, 10), 3)),
        ("WindowAttentionGlobal", "qkv", (24, 12), {**HEADS, "use_global": True, "proj": linear(12, 12)}, (12, 12)),
        ("WindowAttentionGlobal", "qkv", (36, 12), {**HEADS, "use_global": False, "proj": linear(12, 12)}, (12,) * 3),
        # mamba_ssm's two, the second also with an MLP beside the state-space model.
        ("Mamba", "in_proj", (32, 8), {**DT_B_C, "x_proj": linear(13, 16), "out_proj": linear(8, 16)}, (16, 16)),
        ("Mamba", "x_proj", (13, 16), DT_B_C, (3, 5, 5)),
        ("Mamba2", "in_proj", (56, 8), {**MAMBA2, "ngroups": 2, "d_ssm": 16, "nheads": 4}, (16, 16, 10, 10, 4)),
        ("Mamba2", "in_proj", (45, 8), {**MAMBA2, "ngroups": 1, "d_ssm": 12, "nheads": 3}, (4, 4, 12, 12, 5, 5, 3)),
    ],
)
def test_fused(owner: str, label: str, shape: tuple[int, int], attributes: dict[str, Any], split: Any) -> None:
    model = in_block(attn=module(owner, **attributes, **{label: linear(*shape)}))
    found = contents(model, f"layers.0.attn.{label}.weight")
    assert found.route == "muon"
    assert (found.reason if split == LOOKS_FUSED else found.matrices.split) == split
    assert (found.reason == LOOKS_FUSED) == (split == LOOKS_FUSED)


def test_wrappers_do_not_hide_the_owner() -> None:
    wrapped = module("CheckpointWrapper", _checkpoint_wrapped_module=linear(24, 8))
    model = in_block(attn=module("BloomAttention", num_heads=2, query_key_value=wrapped))
    found = contents(model, "layers.0.attn.query_key_value._checkpoint_wrapped_module.weight")
    assert found.matrices.split == Interleaved((4, 4, 4), 2)


def test_gpt2_stores_its_weights_the_other_way_round() -> None:
    conv1d = module("Conv1D", nf=24, weight=(8, 24))
    model = in_block(
        attn=module("GPT2Attention", c_attn=conv1d), mlp=module("MLP", c_fc=module("Conv1D", weight=(8, 32)))
    )
    assert contents(model, "layers.0.attn.c_attn.weight").matrices == ParamMatrices(dims="in_out", split=(8, 8, 8))
    optimizer = Muon(get_default_muon_param_groups(model), lr=0.02, adjust_lr_fn="spectral")
    # Outputs over inputs: √(8/8) for each part, √(32/8) for the 32 × 8 matrix that is stored as 8 × 32.
    assert [row.lr for row in optimizer.routing_table().rows] == pytest.approx([0.02, 0.04])


# The user's word comes first.


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = linear(24, 8)
        self.experts = module("Experts", up=(5, 8, 6))
        self.conv = nn.Conv1d(8, 8, 3)


@pytest.mark.parametrize("where", ["groups", "optimizer"])
def test_split_overrides(where: str) -> None:
    def split(name: str, shape: tuple[int, ...]) -> Any:
        return 12 if "qkv" in name else None

    options: dict[str, Any] = {"split": split}
    groups = get_default_muon_param_groups(Attention(), **options if where == "groups" else {})
    rows = Muon(groups, **options if where == "optimizer" else {}).routing_table().rows
    assert [row.matrices for row in rows[:2]] == [2, 5]


def test_is_muon_func_overrides_the_route_and_keeps_the_parts() -> None:
    groups = get_default_muon_param_groups(Attention(), is_muon_func=lambda name, param: "qkv" in name)
    rows = Muon(groups).routing_table().rows
    assert [(row.name, row.route, row.matrices, row.why) for row in rows[:2]] == [
        ("qkv.weight", "muon", 3, "is_muon_func"),
        ("experts.up", "adamw", 0, "is_muon_func"),
    ]


def test_conv_and_expert_keys_override() -> None:
    assert contents(Attention(), "conv.weight").route == "adamw"
    assert contents(Attention(), "conv.weight", conv="flatten").matrices == ParamMatrices(flatten=True)
    assert contents(module("M", blend=(5, 8, 6)), "blend", expert_keys=["blend"]).reason == "expert_keys"


# The option.


def test_names_with_stars() -> None:
    model = nn.ModuleList([Attention() for _ in range(3)])
    muon, adamw, vectors = get_default_muon_param_groups(model)
    assert muon["matrices"] == {"*.experts.up": {"experts": True}, "*.qkv.weight": {"split": (8, 8, 8)}}
    assert muon["reasons"] == {"*.qkv.weight": "fused q, k, v", "*.experts.up": "expert stack (E, out, in, assumed)"}
    assert (adamw["reasons"], vectors["reasons"]) == (
        {"*.conv.weight": "filter with a side below 16: too small for Muon"},
        {"*.conv.bias": "vector"},
    )


def test_layers_that_differ_are_listed_one_by_one() -> None:
    model = nn.ModuleList([module("A", qkv=linear(24, 8)), module("A", qkv=linear(48, 16))])
    (muon,) = get_default_muon_param_groups(model)
    assert muon["matrices"] == {"0.qkv.weight": {"split": (8, 8, 8)}, "1.qkv.weight": {"split": (16, 16, 16)}}


def test_the_state_survives_weights_only(tmp_path: Any) -> None:
    flags = {"is_transposed": True, "is_concatenated": False, "has_gate": True}
    model = module("GptOssExperts", gate_up_proj=(3, 8, 24), **flags)
    optimizer = Muon(get_default_muon_param_groups(model))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    other = Muon(get_default_muon_param_groups(model))
    other.load_state_dict(loaded)
    assert other.param_groups[0]["matrices"] == {
        "gate_up_proj": {"experts": True, "dims": "in_out", "split": ((1, 1), 12)}
    }
    assert [row.matrices for row in other.routing_table().rows] == [6]


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ("w", "must be a mapping from names of parameters"),
        ({3: {}}, "must be a mapping from names of parameters"),
        ({"w": 3}, "must be a mapping with some of experts, dims, split, flatten"),
        ({"w": {"rows": 3}}, "must be a mapping with some of experts, dims, split, flatten"),
        ({"w": {"experts": "all"}}, "must be True, False or a number of blocks of rows"),
        ({"w": {"experts": 0}}, "must be True, False or a number of blocks of rows"),
        ({"w": {"dims": "rows"}}, "is unknown; write one of"),
        ({"w": {"flatten": 1}}, "must be True or False"),
        ({"w": {"split": lambda name, shape: 2}}, "a function of names belongs into the option split"),
        ({"w": {"split": "x"}}, "must be sizes of parts"),
        ({"w": {"experts": 5}}, "5 blocks of rows do not divide its 8 rows: correct experts=5"),
        ({"w": {"experts": 2, "split": 4}}, "2 blocks of rows cannot be split as well"),
    ],
)
def test_wrong_entries(matrices: Any, message: str) -> None:
    group = {"params": [nn.Parameter(torch.zeros(8, 8))], "names": ["w"], "use_muon": True}
    with pytest.raises(ConfigError, match=message):
        Muon([group], matrices=matrices)
    with pytest.raises(ConfigError, match=message):
        Muon([{**group, "matrices": matrices}])


def test_entries_are_read_at_every_step() -> None:
    """Two halves that are orthogonalised separately give another update than the whole."""

    def updated(entries: dict[str, Any] | None) -> Tensor:
        param = nn.Parameter(torch.zeros(8, 6))
        optimizer = Muon([{"params": [param], "names": ["w"], "use_muon": True}], lr=1e-3, weight_decay=0.0)
        optimizer.param_groups[0]["matrices"] = entries
        param.grad = torch.arange(48.0).reshape(8, 6).sin()
        optimizer.step()
        return param.detach()

    halves = updated({"w": {"split": (4, 4)}})
    assert not torch.equal(halves, updated(None))
    assert torch.equal(halves, updated({"w": {"experts": 2}}))
