"""Weights of tiny models, and what must be true of their parts; ``test_parts.py`` checks it with the library's own
forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
LLAMA = {**TINY, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "pad_token_id": 0}
BERT = {**TINY, "intermediate_size": 24, "pad_token_id": 0}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_inner": 24, "vocab_size": 40, "n_positions": 32}
CODEGEN = {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "vocab_size": 40}
MPT = {"d_model": 16, "n_heads": 2, "n_layers": 1, "vocab_size": 40}
GROUPS = {"num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
MOE = {**LLAMA, **EXPERTS, "attention_bias": False}
LLAMA4 = {**MOE, "moe_layers": [0]}
ARIA = {**LLAMA, "moe_num_experts": 3, "moe_topk": 2}
MINIMAX = {**MOE, "layer_types": ["linear_attention"], "block_size": 4}
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 5}
DEEPSEEK = {**LLAMA, "num_key_value_heads": 2, "head_dim": 6, **LATENT, "first_k_dense_replace": 1}
SSM = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 40}
MAMBA = {**SSM, "state_size": 6, "time_step_rank": 5}
MAMBA2 = {**SSM, "num_heads": 8, "head_dim": 4, "n_groups": 2, "state_size": 5, "chunk_size": 4}
QWEN = {**LLAMA, "num_experts": 0, "mlp_only_layers": [0], "decoder_sparse_step": 1}
QWEN_FULL = {**QWEN, "layer_types": ["full_attention"], "rms_norm_eps": 1e-30}
DELTA_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
QWEN_DELTA = {**QWEN, **DELTA_HEADS, "layer_types": ["linear_attention"]}
GRANITE = {**MOE, "shared_intermediate_size": 20}
DBRX = {
    **MPT,
    "max_seq_len": 32,
    "attn_config": {"rope_theta": 1e4, "kv_n_heads": 1, "clip_qkv": 1e9},
    "ffn_config": {"hidden_size": 16, "ffn_hidden_size": 24, "moe_num_experts": 3, "moe_top_k": 3},
}


@dataclass(frozen=True)
class Case:
    """A weight of a tiny model, and what must be true of its parts."""

    model_type: str
    config: dict[str, Any]
    weights: str  # regular expressions for the ends of two names: "weight → partner", the projection after it
    sizes: str  # outputs × inputs of the parts
    silencing: tuple[int, ...] = ()  # parts without which it is as without the partner
    reciprocal: tuple[tuple[int, int], ...] = ()
    scalable: tuple[int, ...] = ()
    zeroed: tuple[str, ...] = ()  # parameters that would add something of their own
    flipped: bool = False  # stored (in, out)

    @property
    def weight(self) -> str:
        return self.weights.partition(" → ")[0]

    @property
    def partner(self) -> str:
        return self.weights.partition(" → ")[2]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(map(int, part.split("×"))) for part in self.sizes.split())


QKV: Any = {"silencing": (2,), "reciprocal": ((0, 1),)}
BOTH: Any = {"silencing": (0, 1)}
SQUARE, GROUPED, GATED = "16×16 16×16 16×16", "16×16 8×16 8×16", "24×16 24×16"
MAMBA2_PARTS, SKIPS = "32×16 32×16 10×16 10×16 8×16", ("mixer.D", "conv1d.bias")
FALCON = "query_key_value.weight → self_attention.dense.weight"
NEOX = "query_key_value.weight → attention.dense.weight"
STACKED = "experts.gate_up_proj → experts.down_proj"
DOWN = "experts.down_proj → experts.gate_up_proj"
CASES = {
    "gpt2 c_attn": Case("gpt2", GPT2, "attn.c_attn.weight → attn.c_proj.weight", SQUARE, **QKV, flipped=True),
    "gpt2 c_fc": Case("gpt2", GPT2, "mlp.c_fc.weight → mlp.c_proj.weight", "24×16", (0,), flipped=True),
    "bloom": Case("bloom", {**TINY, "n_head": 2}, NEOX, SQUARE, **QKV),
    "gpt_neox": Case("gpt_neox", TINY, NEOX, SQUARE, **QKV),
    "persimmon": Case(
        "persimmon", {**TINY, "qk_layernorm": False}, "query_key_value.weight → self_attn.dense.weight", SQUARE, **QKV
    ),
    "falcon heads": Case("falcon", {**TINY, "multi_query": False}, FALCON, SQUARE, **QKV),
    "falcon multi-query": Case("falcon", TINY, FALCON, GROUPED, **QKV),
    "falcon groups": Case("falcon", {**TINY, "hidden_size": 32, **GROUPS}, FALCON, "32×32 16×32 16×32", **QKV),
    "codegen": Case("codegen", CODEGEN, "qkv_proj.weight → attn.out_proj.weight", "32×32 32×32 32×32", (1,), ((0, 2),)),
    "gpt_bigcode multi-query": Case("gpt_bigcode", GPT2, "attn.c_attn.weight → attn.c_proj.weight", GROUPED, **QKV),
    "gpt_bigcode heads": Case(
        "gpt_bigcode", {**GPT2, "multi_query": False}, "attn.c_attn.weight → attn.c_proj.weight", SQUARE, **QKV
    ),
    "mpt": Case("mpt", MPT, "Wqkv.weight → attn.out_proj.weight", SQUARE, **QKV),
    "phi3 qkv": Case("phi3", LLAMA, "qkv_proj.weight → o_proj.weight", GROUPED, **QKV),
    "phi3 gate-up": Case("phi3", LLAMA, "gate_up_proj.weight → down_proj.weight", GATED, **BOTH),
    "modernbert qkv": Case("modernbert", BERT, "Wqkv.weight → attn.Wo.weight", SQUARE, **QKV),
    "modernbert Wi": Case("modernbert", BERT, "Wi.weight → mlp.Wo.weight", GATED, **BOTH),
    "deberta": Case(
        "deberta", BERT, "in_proj.weight → attention.output.dense.weight", SQUARE, **QKV, zeroed=("q_bias", "v_bias")
    ),
    "minimax": Case("minimax", MINIMAX, "qkv_proj.weight → self_attn.out_proj.weight", SQUARE, (0, 1, 2)),
    "deepseek kv_b": Case("deepseek_v3", DEEPSEEK, "kv_b_proj.weight → o_proj.weight", "20×12 10×12", (1,)),
    "deepseek kv_a": Case(
        "deepseek_v3",
        {**DEEPSEEK, "rms_norm_eps": 1e-30},
        "kv_a_proj_with_mqa.weight → o_proj.weight",
        "12×16 6×16",
        scalable=(0,),
    ),
    "mamba": Case(
        "mamba", MAMBA, "in_proj.weight → mixer.out_proj.weight", "32×16 32×16", **BOTH, zeroed=("conv1d.bias",)
    ),
    "mamba x_proj": Case(
        "mamba", MAMBA, "x_proj.weight → mixer.out_proj.weight", "5×32 6×32 6×32", (1, 2), zeroed=("mixer.D",)
    ),
    "mamba2": Case(
        "mamba2", MAMBA2, "in_proj.weight → mixer.out_proj.weight", MAMBA2_PARTS, (0, 1, 2, 3), zeroed=SKIPS
    ),
    "lfm2": Case(
        "lfm2", {**LLAMA, "layer_types": ["conv"]}, "in_proj.weight → conv.out_proj.weight", SQUARE, (0, 1, 2)
    ),
    "qwen3_next qkvz": Case(
        "qwen3_next",
        QWEN_DELTA,
        "in_proj_qkvz.weight → linear_attn.out_proj.weight",
        "12×16 12×16 30×16 30×16",
        (0, 1, 2, 3),
    ),
    "qwen3_next q and gate": Case(
        "qwen3_next", QWEN_FULL, "self_attn.q_proj.weight → self_attn.o_proj.weight", "16×16 16×16", scalable=(0,)
    ),
    "granite input_linear": Case(
        "granitemoeshared",
        GRANITE,
        "shared_mlp.input_linear.weight → shared_mlp.output_linear.weight",
        "20×16 20×16",
        **BOTH,
    ),
    # Experts.
    "mixtral gate-up": Case("mixtral", MOE, STACKED, GATED, **BOTH),
    "mixtral down": Case("mixtral", MOE, DOWN, "16×24", (0,)),
    "gpt_oss gate-up": Case("gpt_oss", MOE, STACKED, GATED, (0,), flipped=True),
    "gpt_oss down": Case("gpt_oss", MOE, "experts.down_proj → experts.down_proj", "16×24", (0,), flipped=True),
    "llama4 gate-up": Case("llama4_text", LLAMA4, STACKED, GATED, **BOTH, flipped=True),
    "llama4 down": Case("llama4_text", LLAMA4, DOWN, "16×24", (0,), flipped=True),
    "aria gate-up": Case("aria_text", ARIA, STACKED, GATED, **BOTH, flipped=True),
    "granitemoe gate-up": Case(
        "granitemoe",
        MOE,
        "experts.gate_up_proj|input_linear.weight → experts.down_proj|output_linear.weight",
        GATED,
        **BOTH,
    ),
    "jetmoe gate-up": Case(
        "jetmoe",
        {**LLAMA, **EXPERTS, "kv_channels": 8},
        "mlp.input_linear.weight → mlp.output_linear.weight",
        GATED,
        **BOTH,
    ),
    "dbrx w1": Case("dbrx", DBRX, "experts.mlp.w1 → experts.mlp.w2", "24×16 24×16 24×16"),
    "dbrx w2": Case("dbrx", DBRX, "experts.mlp.w2 → experts.mlp.w1", "16×24 16×24 16×24", flipped=True),
    "dbrx Wqkv": Case("dbrx", DBRX, "Wqkv.weight → attn.out_proj.weight", GROUPED, **QKV),
}
