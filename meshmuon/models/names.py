"""Names of parameters: what wrappers add to them, and which are those of embeddings and output heads."""

from __future__ import annotations

import re

from ..matrices import without_wrappers

_EMBEDDINGS = re.compile(  # W_E and W_pos are those of TransformerLens
    r"embed(ding|dings)?|(vision_)?embed_tokens|tok_embeddings|token_embeddings?|word_embeddings|(tok|token|word)_emb(ed)?|wte|W_E"
    r"|wpe|W_pos|position_embeddings|pos_emb(ed|edding)?|embed_positions|patch_embed(ding|dings|der)?"
)
_TABLES = re.compile(
    r"(\w+_)?(emb|embs|embed|embeds|embedding|embeddings|codebooks?)(_?\d+|_(in|tokens?|table|layer|weights?|matrix))?"
)
_HEADS = re.compile(
    r"W_U|(\w+_)?(lm_head|embed_out|un_?embed(ding)?|to_logits|vocab(_proj|_projection)?|classifier|score|logits|logits_\w+|qa_outputs|predictor)"
    r"|(\w+_)?heads?|(ctc_|text_|audio_|cls_|mlm_|qa_|final_)?(output|outputs|output_layer|output_projection)"
)
_OUTERMOST_HEADS = re.compile(r"\w+_out_proj|proj_out|final_(proj|linear|layer)")  # if the model itself holds them
_LISTS_OF_HEADS = re.compile(r"(\w+_)?(heads|classifiers|class_embed|bbox_embed|class_head|logits)")


def name_parts(name: str) -> list[str]:
    """The components of a parameter's name, without those that wrappers insert."""
    return without_wrappers(name).split(".")


def is_embedding_name(parts: list[str]) -> bool:
    return any(map(_EMBEDDINGS.fullmatch, parts))


def is_table_label(label: str) -> bool:
    """Whether the name of a module or parameter is that of an embedding, if no linear layer has it: ``tok_emb``,
    ``embed_in``.
    """
    return _TABLES.fullmatch(label) is not None


def is_head_name(parts: list[str]) -> bool:
    """Whether the module that holds a parameter is named as an output head.

    A head's name counts only outside numbered blocks: ``output.weight`` is a head, ``layers.3.attention.output.weight``
    is a projection. It must be the name of the module that holds the parameter: ``output.dense.weight`` is not a head.
    Lists of heads, such as ``lm_heads.2.weight``, count as well.
    """
    modules = parts[:-1] or parts
    if modules[-1].isdigit() and len(modules) > 1:
        return _LISTS_OF_HEADS.fullmatch(modules[-2]) is not None and not any(map(is_number, modules[:-1]))
    if len(modules) == 1 and len(parts) == 2 and _OUTERMOST_HEADS.fullmatch(modules[0]):
        return True
    return _HEADS.fullmatch(modules[-1]) is not None and not any(map(is_number, modules))


def is_number(part: str) -> bool:
    """Whether a component of a name counts blocks: ``3`` of ``layers.3``, ``layer_3``, ``block3``."""
    return re.fullmatch(r"(layers?|blocks?|h)?_?\d+", part) is not None


def is_table_name(name: str) -> bool:
    parts = name_parts(name)
    return is_embedding_name(parts) or is_head_name(parts)
