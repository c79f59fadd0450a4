"""Parameters of two and more dims that are no matrices: tables, tokens, scales, biases, parts of a weight norm."""

from __future__ import annotations

import re

from torch import nn

from .place import ParamPlace

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)  # (in, out, *kernel): no (out, in·kernel) matrix
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_WEIGHTED = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase)

FEW_ROWS = 4
"""A matrix with no more rows, or columns, has nothing to orthogonalise: gates, boxes, scores."""

NOT_MATRICES: tuple[tuple[str, str], ...] = (
    ("bias", r"(\w+_)?bias(es)?(_\w+)?"),
    ("weight-norm part", r"weight_[gv]|original[01]"),
    ("position table", r"(\w+_)?(pos|position|positional|positions|ape|rel_pos|relative)(_\w+)?|\w*_pos_\w+|\w*posemb\w*"),
    ("state-space parameter", r"A|D|A_log|A_real|A_imag|log_A\w*|log_dt|dt|dt_\w*bias|C_log"),
    (
        "scale",
        r"(\w+_)?(scale|scales|scaler|gamma|beta|gain|alpha|lambdas?|temperature|tau|translate|ls)(_\w+|\d+)?|time_(mix|decay|first)\w*",
    ),
    ("embedding table", r"(\w+_)?(emb|embs|embed|embeds|embedding|embeddings|codebooks?|codevectors|prototypes?|vocab)(_\w+)?"),
    (
        "token or query table",
        r"(\w+_)?(token|tokens|cls|registers?|mask|probe|latents?|query|queries|query_tokens|prompts?|pointer|slots?|anchors?|memory)"
        r"(_\d\w*)?",
    ),
    ("table", r"\w*table\w*"),
)
"""Reason, and a regular expression for the whole name of a parameter that no linear layer holds."""


def why_no_matrix(place: ParamPlace) -> str | None:
    """Why a parameter is not a matrix; None if nothing speaks against it."""
    module, last = place.module, place.parts[-1]
    if isinstance(module, _NORMS) or (place.held_by(r"Norm\w*$|GRN$") and not hasattr(module, "in_features")):
        return "norm"
    if "parametrizations" in place.parts and re.fullmatch(r"original[01]", last):
        return "weight-norm part"
    if re.fullmatch(r"\w*(rel_pos|relative_(attention|position)|position|pos)_(\w+_)?bias", place.label):
        return "position table"  # also as a linear layer after one-hot vectors
    if isinstance(module, _WEIGHTED) and last not in ("weight_g", "weight_v"):
        return "bias" if last.startswith("bias") else None
    for reason, pattern in NOT_MATRICES:
        if last != "weight" and re.fullmatch(pattern, last, re.IGNORECASE):
            return reason
    if place.param.dim() > 2 and place.param.size(0) == 1:
        return "token or table: its first dim is 1"
    return None


def convolution_of(place: ParamPlace) -> nn.Module | None:
    """The convolution that a filter belongs to; None for anything else."""
    convolution = place.module if isinstance(place.module, _CONVOLUTIONS) and place.parts[-1] == "weight" else None
    return convolution if place.param.dim() > 2 else None


def why_no_flat_filter(convolution: nn.Module) -> str | None:
    """Why a filter is no (out, in·kernel) matrix; None if it is one."""
    if isinstance(convolution, _TRANSPOSED):
        return "filter of a transposed convolution"
    return "filter of a grouped convolution" if convolution.groups != 1 else None


def has_few_rows(place: ParamPlace) -> bool:
    """Whether there is nothing to orthogonalise in its matrices."""
    return min(place.param.shape[-2:]) <= FEW_ROWS
