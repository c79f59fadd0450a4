"""Weights that hold several projections: which are known, and how their parts follow from the modules around them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..matrices import Interleaved, Split
from .names import is_number
from .place import ParamPlace

_QKV = r"qkv|qkv_proj|qkv_linear|[wW]_?qkv|to_qkv|attn_qkv|c_attn|att_proj|in_proj_weight|in_proj_qkv"
_GATED_MLP = r"(\w+_)?(gate_?up|gate_and_up|up_gate)(_proj|_layer|_z|_weight)?|w_?12|w_?13|weights_in"
_FIRST_OF_MLP = (
    r"(\w+_)?(w?in|w?i|up|expand|wi|w_?1|fc_?1|fc_in|c_fc|(lin|linear|dense|proj|ff)_?(1|in))(_proj|_linear)?"
)
_FIRST_AND_SECOND = re.findall(  # layers of an MLP
    r"(\w+) → (\w+)",
    "Wi → Wo, wi → wo, fc1 → fc2, w1 → w2, ff_in → ff_out, proj_in → proj_out, linear_1 → linear_2, linear_fc1 → "
    "linear_fc2, linear_start → linear_end, input_linear → output_linear, dense_h_to_4h → dense_4h_to_h",
)
_VALUES, _B_AND_C = "num_v_heads/num_k_heads*head_v_dim", "n_groups*ssm_state_size, n_groups*ssm_state_size"
_SCALE_AND_SHIFT = "^AdaLayerNorm(Continuous)?$|AuraFlowPreFinal|ConvNextBlock"
_ADA_NORM = (
    r"Ada(Layer)?(RMS)?(Group)?(Norm|LN)|AdaLN|FlowResBlock|FlowFinalLayer|DiffusionHeadFinalLayer|AtomLayer|Modulation"
)


_ATTENTION = r"(?i)attn|attention|(^|_)mha($|_)|multi_?head"
_ONE_PROJECTION = r"(\w+_)?(w?[qkvo]|kv|query|key|value|out)s?(_\w+)?$"
_HALVES_OF_HEADS, _THIRDS_OF_HEADS = (", ".join([f"outputs/heads/{count}"] * count) for count in (2, 3))


@dataclass(frozen=True)
class Fused:
    """A kind of fused weight: how to recognise it, and the sizes of its parts as ``ParamPlace.size`` reads them.

    The sizes must add up to the outputs of the weight, otherwise the next row is tried. With ``repeats`` they are those
    of a pattern that recurs that many times. A single size without ``repeats`` is that of equal parts: ``outputs/2`` of
    halves.
    """

    parts: str  # for the routing table
    label: str  # regular expression for the whole name of the weight
    sizes: str  # separated by commas
    repeats: str = ""
    owner: str = ""  # regular expression for a class of the module that uses it; "" for any
    when: str = ""  # an attribute of the owner or its config that must be set
    beside: str = ""  # regular expression for the name of another layer that the owner must have
    within: str = ""  # regular expression for a part of the class or the name of the layer or its owner


FUSED: tuple[Fused, ...] = (
    # q, k, v of each head or group of heads, one after the other.
    Fused(
        "q, k, v of each group",
        "query_key_value",
        "heads/kv_heads*head_dim, head_dim, head_dim",
        "kv_heads",
        "Falcon",
        "new_decoder_architecture",
    ),
    Fused("q, k, v", "query_key_value", "heads*head_dim, head_dim, head_dim", "", "Falcon", "multi_query"),
    Fused("q, k, v of each head", "query_key_value", _THIRDS_OF_HEADS, "heads", "Falcon|Bloom|GPTNeoX|Persimmon"),
    Fused("q, k, v of each head", "qkv_proj", _THIRDS_OF_HEADS, "heads", "MiniMaxLightningAttention"),
    Fused("q, k, v of each head", "in_proj", _THIRDS_OF_HEADS, "heads", "DisentangledSelfAttention"),
    Fused("q, k, v of each head", "proj", _THIRDS_OF_HEADS, "heads", "EsmFoldSelfAttention"),
    Fused("q, k, v", "c_attn", "embed_dim, kv_dim, kv_dim", "", "GPTBigCodeAttention", "multi_query"),
    Fused("q, k, v of each head", "c_attn", _THIRDS_OF_HEADS, "heads", "GPTBigCodeAttention"),
    Fused("q, v, k of each quarter", "qkv_proj", "outputs/12, outputs/12, outputs/12", "4", "CodeGenAttention"),
    Fused("k, v of each head", "linear_kv", _HALVES_OF_HEADS, "heads", "InvariantPointAttention"),
    Fused(  # torchtitan's
        "q, k, v of each group",
        "wqkv",
        "heads_per_kv*head_dim, head_dim, head_dim",
        "outputs/r_dim/head_dim",
        "FusedQKVLinear",
    ),
    Fused(
        "q1, q2, k1, k2, v", "to_qkv", "outputs/5", "", "StableAudio3SelfAttention|SAMEAttention", "use_differential"
    ),
    Fused("k1, k2, v", "to_kv", "outputs/3", "", "StableAudio3CrossAttention", "use_differential"),
    # timm's.
    Fused("k, v", "qkv", "inputs, inputs", "", "WindowAttentionGlobal", "use_global"),  # q comes from elsewhere
    Fused("q, k, v of each head", "qkv", _THIRDS_OF_HEADS, "heads", "Attention(Cl|2d)", "head_first"),
    Fused("q, k, v of each head", r"qkv|qkv\.linear", "key_dim, key_dim, val_dim", "heads"),
    Fused("k, v of each head", r"kv\.linear", "key_dim, val_dim", "heads"),
    # LeViT keeps its linear layers beside their batch norms, one level down: the owner is that pair.
    Fused("q, k, v of each head", r"queries_keys_values\.linear", "key_dim, key_dim, attention_ratio*key_dim", "heads"),
    Fused("k, v of each head", r"keys_values\.linear", "key_dim, attention_ratio*key_dim", "heads"),
    # Multi-head latent attention.
    Fused("compressed kv, rotary k", "kv_a_proj_with_mqa|kv_a_proj|wkv_a", "kv_lora_rank, qk_rope_head_dim"),
    Fused("k, v of each head", "kv_b_proj|wkv_b", "qk_nope_head_dim, v_head_dim", "heads"),
    Fused("q, gate of each head", "q_gate_proj", "qk_head_dim, v_head_dim", "heads"),
    # Linear attention and state-space models.
    Fused(
        "q, k, v, z of each key head", "in_proj_qkvz", f"head_k_dim, head_k_dim, {_VALUES}, {_VALUES}", "num_k_heads"
    ),
    Fused("b, a of each key head", "in_proj_ba", "num_v_heads/num_k_heads, num_v_heads/num_k_heads", "num_k_heads"),
    Fused("q, k, v", "in_proj_qkv", "key_dim, key_dim, value_dim"),
    Fused("q, gate of each head", "q_proj", "head_dim, head_dim", "heads", "Qwen3_5|Qwen3Next|Qwen4Exp"),
    Fused("x, gate in turns", "in_proj", "1, 1", "outputs/2", "ZambaMambaMixer"),
    Fused(
        "gate, x, B, C, dt",
        "in_proj",
        f"intermediate_size, intermediate_size, {_B_AND_C}, num_heads",
        "",
        "Mamba|Mixer",
    ),
    Fused("x, gate", "in_proj", "intermediate_size, intermediate_size", "", "Mamba|Mixer"),
    Fused("dt, B, C", "x_proj|x_proj_weight", "time_step_rank, ssm_state_size, ssm_state_size"),
    Fused("dt, B, C", "x_proj", "dt_rank, d_state, d_state"),  # mamba_ssm's names
    Fused("dt, B, C", "x_proj", "dt_proj.in_features, A_log.columns, A_log.columns"),
    Fused(  # an MLP takes what the state-space model leaves of d_inner; usually nothing
        "z and x of an MLP, z, x, B, C, dt",
        "in_proj",
        "d_inner-d_ssm, d_inner-d_ssm, d_ssm, d_ssm, ngroups*d_state, ngroups*d_state, nheads",
        "",
        "Mamba",
        "d_ssm",
    ),
    Fused("z, x, B, C, dt", "in_proj", "d_inner, d_inner, ngroups*d_state, ngroups*d_state, nheads", "", "Mamba"),
    Fused("B, C, x", "in_proj", "outputs/3", "", "ShortConv"),
    Fused("index q, k", "index_qk_proj", "index_n_heads*index_head_dim, index_kv_heads*index_head_dim"),
    Fused("two windows", "kv_proj|gate_proj", "head_dim, head_dim", "", "DeepseekV4(Indexer|CSACompressor)"),
    Fused("one", "kv_proj", "outputs", "", "DeepseekV4"),
    Fused("one", "query_key", "outputs", "", "LSHSelfAttention"),
    Fused("one", "proj_up_gate", "outputs", "", "xLSTMFeedForward"),
    # Blocks of q, k, v: with the sizes that the model tells, or those that the layers around the weight prove.
    Fused("q, k, v", _QKV, "heads*head_dim, kv_heads*head_dim, kv_heads*head_dim"),
    Fused("q, k, v", _QKV, "q_dim, kv_dim, kv_dim"),
    Fused("q, k, v", _QKV, "heads*head_dim, heads*head_dim, heads*head_dim"),
    Fused("k, v", "c_attn|in_proj_weight", "outputs/2", beside=r"q|q_\w+|to_q|[wW]_?q|query\w*"),  # cross-attention
    Fused("q, k, v", _QKV, "proven_q, proven_kv, proven_kv"),
    Fused("thirds", "in_proj", ", ".join(["out_proj.in_features"] * 3)),
    Fused("k, v", r"kv|to_kv|w_?kv|kv_linear|key_value|kv_proj", "outputs/2"),
    Fused("q, k", r"qk|to_qk", "outputs/2"),
    Fused("q, k", "proj", "outputs/2", "", "EsmFoldSequenceToPair"),
    Fused("q, context, gates", "projection_in", "inputs, inputs, focal_level+1", "", "FocalNetModulation"),
    # Gated linear units.
    Fused("gate, up", _GATED_MLP, "outputs/2"),
    Fused("up, gate", "proj|proj_in", "outputs/2", "", "GEGLU|GeGLU|SwiGLU|GatedLinearUnit|^GLU$"),
    Fused("up, gate", "pointwise_lin1|proj_mlp", "outputs/2", "", "ConvolutionModule|OvisImageSingleTransformerBlock"),
    # The layer that follows takes half of the outputs.
    *(
        Fused("gated halves", first, f"{second}.in_features, {second}.in_features")
        for first, second in _FIRST_AND_SECOND
    ),
    Fused("gated halves", _FIRST_OF_MLP, "proven_half, proven_half"),
    Fused("left, right", "linear_x", "outputs/2", "", "PairUpdate"),
    Fused("two signals, two gates", "proj_bundle", "outputs/4", "", "TriangleMultiplicativeUpdate"),
    # Shifts, scales and gates that a conditioning vector gives; streams of hyper-connections.
    Fused("shifts, scales, gates", r"linear|linear_1|lin|proj|adaln_\w+|modulation", "inputs", "", _ADA_NORM),
    Fused("shifts, scales, gates", r"adaLN_modulation\.\d+", "inputs"),
    # Where the conditioning vector has another width.
    Fused("shifts, scales, gates", "proj|linear", "outputs/num_chunks", "", _ADA_NORM),
    Fused("shifts, scales, gates", "linear", "outputs/6", "", "CogVideoXLayerNormZero"),
    Fused(
        "scales, gates",
        "linear|adaln_modulation",
        "outputs/4",
        "",
        "(Mochi|Lumina)RMSNormZero|Ideogram4TransformerBlock",
    ),
    Fused("scale, shift", "linear|cond_embeds_mapper", "outputs/2", "", _SCALE_AND_SHIFT),
    Fused("shift, scale", "proj_out_1", "inputs", "", "Transformer2DModel"),
    Fused("pre, post, comb", "fn", "hc_mult, hc_mult, hc_mult*hc_mult", "", "HyperConnection"),
    Fused("pre, post", "fn", "hc_mult, hc_mult", "", "HyperConnection"),
    # under any other name
    Fused("q, k, v", rf"(?!{_ONE_PROJECTION})\w+", "a_third, a_third, a_third", within=_ATTENTION),
)
"""Rows are tried in order. A row whose sizes are unknown or do not add up does not count."""

_AFTER_ATTENTION = re.compile(
    r"(\w+_)?(o|out|output|outputs|dense|wo|to_out|proj|projection|project)|(o|out|c|attn|att|output|attention)_?proj(ection)?\w*|"
    r"[wW]_?[oO]|(fc|linear|lin)_?o(ut)?\w*|proj_?(o|out)?\w*"
)
_LOOKS_FUSED = re.compile(
    r"\w*qkv\w*|\w*query_key\w*|\w*keys?_values?\w*|\w*gate_up\w*|\w*up_gate\w*|(\w+_)?(kv|qk)(_proj|_linear)?|w1[23]|in_proj_weight|"
    r"c_attn|x_proj|\w*fused\w*|w?u?kv_(b|up)(_proj)?",
    re.IGNORECASE,
)
_GATES = {(nn.LSTM, nn.LSTMCell): 4, (nn.GRU, nn.GRUCell): 3}


def fused_split(place: ParamPlace, outputs: int, inputs: int) -> tuple[str, Split | None] | None:
    """The parts of a fused weight, as text and as a ``split`` (None for one part); None if it is not known to be
    fused.
    """
    if isinstance(place.module, (nn.RNNBase, nn.RNNCellBase)):
        gates = next((count for classes, count in _GATES.items() if isinstance(place.module, classes)), 1)
        projection = place.parts[-1].startswith("weight_hr")  # of the hidden state, with proj_size
        return None if gates == 1 or projection or outputs % gates else (f"{gates} gates", (outputs // gates,) * gates)
    if place.label == "in_proj_weight" and isinstance(place.module, nn.MultiheadAttention):
        return "q, k, v", (outputs // 3,) * 3
    # a layer inside a Sequential, or beside its norm, has a dull name
    labels = (place.label, ".".join(place.parts[-3:-1]))
    for row in FUSED:
        if not any(re.fullmatch(row.label, label) for label in labels):
            continue
        if (row.owner and not place.owned_by(row.owner)) or (row.when and not place.flag(row.when)):
            continue
        if row.within and not _says(place, row.within):
            continue
        if row.beside and not any(re.fullmatch(row.beside, label) for label, _, _ in place.neighbours()):
            continue
        split = _split_of_row(row, place, outputs, inputs)
        if split is not None:
            return row.parts, None if split == (outputs,) else split
    return None


def looks_fused_name(parts: Sequence[str]) -> bool:
    label = parts[-2] if parts[-1] == "weight" and len(parts) > 1 else parts[-1]
    return _LOOKS_FUSED.fullmatch(label) is not None


def _split_of_row(row: Fused, place: ParamPlace, outputs: int, inputs: int) -> Split | None:
    known = {"outputs": outputs, "inputs": inputs}
    if "proven_q" in row.sizes:
        proven = _proven_qkv(place, outputs, inputs)
        if proven is None:
            return None
        known |= {"proven_q": proven[0], "proven_kv": proven[1]}
    if "proven_half" in row.sizes and _is_halved(place, outputs, inputs):
        known["proven_half"] = outputs // 2
    if "a_third" in row.sizes and _is_in_thirds(place, outputs, inputs):
        known["a_third"] = inputs
    found = [place.size(size, **known) for size in row.sizes.split(", ")]
    # a part may have no outputs, such as rotary keys in a model without any
    sizes = tuple(size for size in found if size)
    if None in found or not sizes:
        return None
    if row.repeats:
        repeats = place.size(row.repeats, **known)
        return Interleaved(sizes, repeats) if repeats and sum(sizes) * repeats == outputs else None
    if len(found) == 1:
        equal = outputs // sizes[0]
        return sizes * equal if sizes[0] * equal == outputs and (equal > 1 or row.parts == "one") else None
    return sizes if sum(sizes) == outputs else None


def _proven_qkv(place: ParamPlace, outputs: int, inputs: int) -> tuple[int, int] | None:
    """The outputs of q, and of k and v each, in a weight of three blocks; None if nothing proves them.

    The layer after attention takes as many inputs as q has outputs. Where nothing shows that layer, q follows from the
    number of heads, or from a weight that is three times as tall as wide. If k and v are smaller than q, the module
    must know numbers of heads that agree, under whatever names: another kind of attention may have the same sizes in
    another order.
    """
    heads, head_dim = place.size("heads"), place.size("head_dim")
    q = _inputs_after(place, inputs)
    if q is None:
        q = heads * head_dim if heads and head_dim else inputs if outputs == 3 * inputs else None
    if q is None or not 0 < outputs - q <= 2 * q or (outputs - q) % 2:
        return None
    kv = (outputs - q) // 2
    return (q, kv) if kv == q or _are_grouped(q, kv, place.numbers()) else None


def _is_halved(place: ParamPlace, outputs: int, inputs: int) -> bool:
    """Whether what follows the first layer of an MLP takes half of its outputs, and nothing beside it takes all of
    them.
    """
    others = list(place.neighbours())
    back = any(2 * taken == outputs and given == inputs for _, given, taken in others)
    return back and not any(taken == outputs for _, _, taken in others)


def _is_in_thirds(place: ParamPlace, outputs: int, inputs: int) -> bool:
    """Whether it is three times as tall as wide, and nothing beside it shows that it is anything else.

    A layer beside it that takes all outputs is the second of an MLP, one that takes a half follows a gate, and one of
    the same shape is another projection.
    """
    others = [(given, taken) for _, given, taken in place.neighbours()]
    takes = {taken for _, taken in others}
    if re.search(_ATTENTION, place.label):  # such as ``attn`` beside the MLP of its block
        return outputs == 3 * inputs
    if outputs != 3 * inputs or takes & {outputs, outputs / 2} or (outputs, inputs) in others:
        return False
    return _inputs_after(place, inputs) in (None, inputs)


def _says(place: ParamPlace, pattern: str) -> bool:
    """Whether the name of a linear layer, or the name or a class of its owner, says so."""
    names = [*place.parts[-2:-1], *[part for part in place.parts[:-2] if not is_number(part)][-1:]]
    classes = [cls.__name__ for cls in type(place.owner).__mro__ if issubclass(cls, nn.Module)]  # no mixins
    return place.parts[-1] == "weight" and any(re.search(pattern, name) for name in (*names, *classes))


def _inputs_after(place: ParamPlace, width: int) -> int | None:
    """The inputs of the layer that takes the output of attention back to ``width``; None if no layer, or several, may
    be it.

    A layer that is named after it counts first, and even if it has other outputs, as where stages of a backbone meet.
    """
    others = list(place.neighbours())
    back = [(label, inputs) for label, outputs, inputs in others if outputs == width]
    named = {inputs for label, inputs in back if _AFTER_ATTENTION.fullmatch(label)}
    anywhere = {inputs for label, _, inputs in others if _AFTER_ATTENTION.fullmatch(label)}
    found = named or {inputs for _, inputs in back} or anywhere
    return found.pop() if len(found) == 1 else None


def _are_grouped(q: int, kv: int, numbers: set[int]) -> bool:
    """Whether two of the numbers are those of query and key heads of one size, or those of query heads and their
    size.
    """
    for heads in numbers:
        if q % heads or heads == 1:
            continue
        head_dim = q // heads
        if kv % head_dim == 0 and (head_dim in numbers or kv // head_dim in numbers):
            return True
    return False
