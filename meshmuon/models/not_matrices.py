"""Parameters of two and more dims that are no matrices: tables, tokens, scales, biases, parts of a weight norm."""

from __future__ import annotations

import re

from torch import nn

from .names import is_table_label
from .place import ParamPlace

# (in, out, *kernel): no (out, in·kernel) matrix
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_LISTS = (nn.ParameterList, nn.ParameterDict)
_WEIGHTED = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase)

FILTER = "convolution filter"
"""The reason of a filter that may be flattened."""
FEW_ROWS = 4
"""A matrix with no more rows, or columns, has nothing to orthogonalise: gates, boxes, scores."""

NOT_MATRICES: tuple[tuple[str, str], ...] = (
    ("bias", r"(\w+_)?bias(es)?(_\w+)?"),
    ("weight-norm part", r"weight_[gv]|original[01]"),
    (
        "position table",
        r"(\w+_)?(pos|position|positional|positions|ape|rel_pos|relative)(_\w+)?|\w*_pos_\w+|\w*posemb\w*",
    ),
    ("norm", r"(\w+_)?(norm|ln|layer_?norm|rms_?norm)(_(w|g|weight))?"),
    (
        "state-space parameter",
        r"D|dt|log_dt|dt_\w*bias|log_[ABCD]\w*|[ABCD]_(log|real|imag|re|im|bar)|(nu|theta|gamma)_log|Lambda(_\w+)?",
    ),
    (
        "scale",
        r"(\w+_)?(scale|scales|scaler|gamma|beta|gain|alpha|lambdas?|temperature|tau|translate|ls)(_\w+|\d+)?|time_(mix|decay|first)\w*",
    ),
    (
        "embedding table",
        r"(\w+_)?(emb|embs|embed|embeds|embedding|embeddings|codebooks?|codevectors|prototypes?|vocab)(_\w+)?",
    ),
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
    # of ``registers.0``, the list's
    label = place.parts[-2] if isinstance(module, _LISTS) and len(place.parts) > 1 else last
    for reason, pattern in NOT_MATRICES:
        if last != "weight" and re.fullmatch(pattern, label, re.IGNORECASE):
            return reason
    if re.fullmatch("[ABC]", label) and not _is_low_rank_factor(place):
        return "state-space parameter"
    if is_bias_of_stack(place):
        return "bias of a stack"
    if not hasattr(module, "in_features") and not place.held_by("Linear|Conv|Dense|Experts"):
        if is_table_label(place.label):
            return "embedding: by name"
        if place.held_by(r"(Embed(s|ding|dings|der)?|Codebooks?)(\dD|\d)?$"):
            return "embedding: by class"
    if place.param.dim() > 2 and place.param.size(0) == 1:
        return "token or table: its first dim is 1"
    return None


def _is_low_rank_factor(place: ParamPlace) -> bool:
    """Whether ``A`` and ``B`` are the factors of a product, (r, in) and (out, r), rather than matrices of a state
    space.
    """
    factors = [place.module._parameters.get(name) for name in ("A", "B")]
    if any(factor is None or factor.dim() != 2 for factor in factors) or place.parts[-1] == "C":
        return False
    a, b = (factor.shape for factor in factors if factor is not None)
    others = {
        name for name in place.module._parameters if re.fullmatch(r"[CD]|[ABCD]_\w+|log_\w+|dt\w*|Lambda\w*", name)
    }
    return not others and (a[0] == b[1] or a[1] == b[0])


def is_bias_of_stack(place: ParamPlace) -> bool:
    """Whether a 2-D parameter holds a bias for each matrix of a stack: ``b1`` of shape (E, n) beside ``w1`` of (E, m,
    n).

    A router beside a stack may have this shape too, so that the name must agree.
    """
    if place.param.dim() != 2 or not re.fullmatch(r"b\d*|b_\w+|b[A-Z]\w*|\w+_b\d*", place.parts[-1]):
        return False
    count, width = place.param.shape
    stacks = [param for param in place.module._parameters.values() if param is not None and param.dim() == 3]
    return any(stack.shape[0] == count and width in stack.shape[1:] for stack in stacks)


def filter_reason(place: ParamPlace) -> str | None:
    """What kind of filter of a convolution a parameter is, ``FILTER`` if one (out, in·kernel) matrix; None if it is
    none.
    """
    if place.param.dim() < 3 or not isinstance(place.module, _CONVOLUTIONS) or place.parts[-1] != "weight":
        return None
    if isinstance(place.module, _TRANSPOSED):
        return "filter of a transposed convolution"
    return FILTER if place.module.groups == 1 else "filter of a grouped convolution"


def has_few_rows(place: ParamPlace) -> bool:
    """Whether there is nothing to orthogonalise in its matrices."""
    return min(place.param.shape[-2:]) <= FEW_ROWS
