"""Parameters of two and more dims that are no matrices: tables, tokens, scales, biases, parts of a weight norm."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from torch import nn

from .heads import is_repeated
from .names import is_table_label
from .place import ParamPlace, is_a

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)  # (in, out, *kernel)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_LISTS = (nn.ParameterList, nn.ParameterDict)
_WEIGHTED = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase)

FILTER_SIDE = 16
"""A flattened filter has at least so many rows and columns by default."""
PIXEL_CHANNELS = 4
"""A filter with no more input channels sees pixels, or a signal: grey, colours, with alpha."""
SPECTRUM_CHANNELS = 128
"""A first 1-D filter with no more input channels sees a spectrum over time: 80 or 128 mel bands."""
SMALL_FILTER = f"filter with a side below {FILTER_SIDE}: too small for Muon"
_PATCHES = re.compile(r"(?i)patch_?(embed|conv|proj|if)")
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


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter of a convolution. One without groups is a matrix: (out, in·kernel), or (in, out·kernel) if it is
    transposed.
    """

    groups: int
    transposed: bool


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


def filter_of(place: ParamPlace) -> Filter | None:
    """The filter of a convolution that a parameter is; None if it is none."""
    if place.param.dim() < 3 or not isinstance(place.module, _CONVOLUTIONS) or place.parts[-1] != "weight":
        return None
    return Filter(place.module.groups, isinstance(place.module, _TRANSPOSED))


def why_not_flattened(place: ParamPlace, conv_filter: Filter) -> str | None:
    """Why a filter without groups is better left to AdamW; None if Muon may have it as one matrix."""
    sizes, own_name = place.param.shape, ".".join(place.parts[-3:])
    channels = sizes[1]  # inputs, or outputs of a transposed filter
    if _PATCHES.search(own_name) or is_a(place.owner, _PATCHES.pattern):
        return "patch embedding"
    if channels <= PIXEL_CHANNELS and sizes[0] > FEW_ROWS:
        what = "pixels" if len(sizes) > 3 else "signal"
        return (
            f"filter that {'gives' if conv_filter.transposed else 'sees'} the {what}: at most {PIXEL_CHANNELS} channels"
        )
    first = not conv_filter.transposed and channels <= SPECTRUM_CHANNELS and _is_first_of_tower(place)
    if first and len(sizes) == 3 and sizes[2] > 1:
        return "1-D stem"
    if min(sizes[0], math.prod(sizes[1:])) < FILTER_SIDE:
        return SMALL_FILTER
    return None


def _is_first_of_tower(place: ParamPlace) -> bool:
    """Whether it is the first weight of the model, or of a part of it that is not in a repeated block."""
    for depth, module in enumerate(place.modules[:-1]):
        first = next(param for param in module.parameters() if param.dim() > 1)
        around = replace(place, parts=place.parts[: depth + 2], modules=place.modules[: depth + 2])
        if first is place.param and not is_repeated(around):
            return True
    return False


def has_few_rows(place: ParamPlace) -> bool:
    """Whether there is nothing to orthogonalise in its matrices."""
    return min(place.param.shape[-2:]) <= FEW_ROWS
