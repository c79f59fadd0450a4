"""Weights of tiny models, and what must be true of their parts; ``test_parts.py`` checks it with the library's own forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 32}
LLAMA = {**TINY, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "pad_token_id": 0}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_inner": 24, "vocab_size": 40, "n_positions": 32}


@dataclass(frozen=True)
class Case:
    """A weight of a tiny model, and what must be true of its parts."""

    model_type: str
    weight: str  # regular expression for the end of its name
    partner: str  # the projection after it: silencing a part is the same as silencing this
    shapes: tuple[tuple[int, int], ...]  # outputs and inputs of the parts
    config: dict[str, Any]
    silencing: tuple[int, ...] = ()
    reciprocal: tuple[tuple[int, int], ...] = ()
    scalable: tuple[int, ...] = ()
    zeroed: tuple[str, ...] = ()  # parameters that would add something of their own
    cls: str = "AutoModel"
    dims: tuple[bool, ...] = field(default=())  # whether the parts are flipped, if that matters


QKV = {"silencing": (2,), "reciprocal": ((0, 1),)}
NEW_FALCON = {
    **TINY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "new_decoder_architecture": True,
    "alibi": False,
}
MOE = {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2, "attention_bias": False}
DEEPSEEK = {
    **LLAMA,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "kv_lora_rank": 12,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "first_k_dense_replace": 1,
}
MAMBA = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 40, "state_size": 6, "time_step_rank": 5}
DBRX = {
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 1,
    "vocab_size": 40,
    "max_seq_len": 32,
    "attn_config": {"rope_theta": 1e4, "kv_n_heads": 1, "clip_qkv": 1e9},
    "ffn_config": {"hidden_size": 16, "ffn_hidden_size": 24, "moe_num_experts": 3, "moe_top_k": 3},
}
CASES = {
    "gpt2 c_attn": Case("gpt2", "attn.c_attn.weight", "attn.c_proj.weight", ((16, 16),) * 3, GPT2, **QKV, dims=(True,) * 3),
    "gpt2 c_fc": Case("gpt2", "mlp.c_fc.weight", "mlp.c_proj.weight", ((24, 16),), GPT2, dims=(True,), silencing=(0,)),
    "bloom": Case("bloom", "query_key_value.weight", "attention.dense.weight", ((16, 16),) * 3, {**TINY, "n_head": 2}, **QKV),
    "gpt_neox": Case("gpt_neox", "query_key_value.weight", "attention.dense.weight", ((16, 16),) * 3, TINY, **QKV),
    "persimmon": Case(
        "persimmon", "query_key_value.weight", "self_attn.dense.weight", ((16, 16),) * 3, {**TINY, "qk_layernorm": False}, **QKV
    ),
    "falcon heads": Case(
        "falcon", "query_key_value.weight", "self_attention.dense.weight", ((16, 16),) * 3, {**TINY, "multi_query": False}, **QKV
    ),
    "falcon multi-query": Case(
        "falcon", "query_key_value.weight", "self_attention.dense.weight", ((16, 16), (8, 16), (8, 16)), TINY, **QKV
    ),
    "falcon groups": Case(
        "falcon", "query_key_value.weight", "self_attention.dense.weight", ((32, 32), (16, 32), (16, 32)), NEW_FALCON, **QKV
    ),
    "codegen": Case(
        "codegen",
        "qkv_proj.weight",
        "attn.out_proj.weight",
        ((32, 32),) * 3,
        {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "vocab_size": 40},
        silencing=(1,),
        reciprocal=((0, 2),),
    ),
    "gpt_bigcode multi-query": Case(
        "gpt_bigcode", "attn.c_attn.weight", "attn.c_proj.weight", ((16, 16), (8, 16), (8, 16)), GPT2, **QKV
    ),
    "gpt_bigcode heads": Case(
        "gpt_bigcode", "attn.c_attn.weight", "attn.c_proj.weight", ((16, 16),) * 3, {**GPT2, "multi_query": False}, **QKV
    ),
    "mpt": Case(
        "mpt",
        "Wqkv.weight",
        "attn.out_proj.weight",
        ((16, 16),) * 3,
        {"d_model": 16, "n_heads": 2, "n_layers": 1, "vocab_size": 40},
        **QKV,
    ),
    "phi3 qkv": Case("phi3", "qkv_proj.weight", "o_proj.weight", ((16, 16), (8, 16), (8, 16)), LLAMA, **QKV),
    "phi3 gate-up": Case("phi3", "gate_up_proj.weight", "down_proj.weight", ((24, 16),) * 2, LLAMA, silencing=(0, 1)),
    "modernbert qkv": Case(
        "modernbert",
        "Wqkv.weight",
        "attn.Wo.weight",
        ((16, 16),) * 3,
        {**TINY, "intermediate_size": 24, "pad_token_id": 0},
        **QKV,
    ),
    "modernbert Wi": Case(
        "modernbert",
        "Wi.weight",
        "mlp.Wo.weight",
        ((24, 16),) * 2,
        {**TINY, "intermediate_size": 24, "pad_token_id": 0},
        silencing=(0, 1),
    ),
    "deberta": Case(
        "deberta",
        "in_proj.weight",
        "attention.output.dense.weight",
        ((16, 16),) * 3,
        {**TINY, "intermediate_size": 24},
        silencing=(2,),
        reciprocal=((0, 1),),
        zeroed=("q_bias", "v_bias"),
    ),
    "minimax": Case(
        "minimax",
        "qkv_proj.weight",
        "self_attn.out_proj.weight",
        ((16, 16),) * 3,
        {**MOE, "layer_types": ["linear_attention"], "block_size": 4},
        silencing=(0, 1, 2),
    ),
    "deepseek kv_b": Case("deepseek_v3", "kv_b_proj.weight", "o_proj.weight", ((20, 12), (10, 12)), DEEPSEEK, silencing=(1,)),
    "deepseek kv_a": Case(
        "deepseek_v3",
        "kv_a_proj_with_mqa.weight",
        "o_proj.weight",
        ((12, 16), (6, 16)),
        {**DEEPSEEK, "rms_norm_eps": 1e-30},
        scalable=(0,),
    ),
    "mamba": Case(
        "mamba", "in_proj.weight", "mixer.out_proj.weight", ((32, 16),) * 2, MAMBA, silencing=(0, 1), zeroed=("conv1d.bias",)
    ),
    "mamba x_proj": Case(
        "mamba",
        "x_proj.weight",
        "mixer.out_proj.weight",
        ((5, 32), (6, 32), (6, 32)),
        MAMBA,
        silencing=(1, 2),
        zeroed=("mixer.D",),
    ),
    "mamba2": Case(
        "mamba2",
        "in_proj.weight",
        "mixer.out_proj.weight",
        ((32, 16), (32, 16), (10, 16), (10, 16), (8, 16)),
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "vocab_size": 40,
            "num_heads": 8,
            "head_dim": 4,
            "n_groups": 2,
            "state_size": 5,
            "chunk_size": 4,
        },
        silencing=(0, 1, 2, 3),
        zeroed=("mixer.D", "conv1d.bias"),
    ),
    "lfm2": Case(
        "lfm2", "in_proj.weight", "conv.out_proj.weight", ((16, 16),) * 3, {**LLAMA, "layer_types": ["conv"]}, silencing=(0, 1, 2)
    ),
    "qwen3_next qkvz": Case(
        "qwen3_next",
        "in_proj_qkvz.weight",
        "linear_attn.out_proj.weight",
        ((12, 16), (12, 16), (30, 16), (30, 16)),
        {
            **LLAMA,
            "layer_types": ["linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 5,
            "num_experts": 0,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 1,
        },
        silencing=(0, 1, 2, 3),
    ),
    "qwen3_next q and gate": Case(
        "qwen3_next",
        "self_attn.q_proj.weight",
        "self_attn.o_proj.weight",
        ((16, 16), (16, 16)),
        {**LLAMA, "layer_types": ["full_attention"], "num_experts": 0, "mlp_only_layers": [0], "rms_norm_eps": 1e-30},
        scalable=(0,),
    ),
    "granite input_linear": Case(
        "granitemoeshared",
        "shared_mlp.input_linear.weight",
        "shared_mlp.output_linear.weight",
        ((20, 16),) * 2,
        {**MOE, "shared_intermediate_size": 20},
        silencing=(0, 1),
    ),
    # Experts.
    "mixtral gate-up": Case("mixtral", "experts.gate_up_proj", "experts.down_proj", ((24, 16),) * 2, MOE, silencing=(0, 1)),
    "mixtral down": Case("mixtral", "experts.down_proj", "experts.gate_up_proj", ((16, 24),), MOE, silencing=(0,)),
    "gpt_oss gate-up": Case(
        "gpt_oss", "experts.gate_up_proj", "experts.down_proj", ((24, 16),) * 2, MOE, silencing=(0,), dims=(True, True)
    ),
    "gpt_oss down": Case("gpt_oss", "experts.down_proj", "experts.down_proj", ((16, 24),), MOE, silencing=(0,), dims=(True,)),
    "llama4 gate-up": Case(
        "llama4_text",
        "experts.gate_up_proj",
        "experts.down_proj",
        ((24, 16),) * 2,
        {**MOE, "moe_layers": [0]},
        silencing=(0, 1),
        dims=(True, True),
    ),
    "llama4 down": Case(
        "llama4_text",
        "experts.down_proj",
        "experts.gate_up_proj",
        ((16, 24),),
        {**MOE, "moe_layers": [0]},
        silencing=(0,),
        dims=(True,),
    ),
    "aria gate-up": Case(
        "aria_text",
        "experts.gate_up_proj",
        "experts.down_proj",
        ((24, 16),) * 2,
        {**LLAMA, "moe_num_experts": 3, "moe_topk": 2},
        silencing=(0, 1),
        dims=(True, True),
    ),
    "granitemoe gate-up": Case(
        "granitemoe",
        r"experts.gate_up_proj|input_linear.weight",
        r"experts.down_proj|output_linear.weight",
        ((24, 16),) * 2,
        MOE,
        silencing=(0, 1),
    ),
    "jetmoe gate-up": Case(
        "jetmoe",
        "mlp.input_linear.weight",
        "mlp.output_linear.weight",
        ((24, 16),) * 2,
        {**LLAMA, "kv_channels": 8, "num_local_experts": 3, "num_experts_per_tok": 2},
        silencing=(0, 1),
    ),
    "dbrx w1": Case("dbrx", "experts.mlp.w1", "experts.mlp.w2", ((24, 16),) * 3, DBRX),
    "dbrx w2": Case("dbrx", "experts.mlp.w2", "experts.mlp.w1", ((16, 24),) * 3, DBRX, dims=(True,) * 3),
    "dbrx Wqkv": Case("dbrx", "Wqkv.weight", "attn.out_proj.weight", ((16, 16), (8, 16), (8, 16)), DBRX, **QKV),
}
