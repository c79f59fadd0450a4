"""What must hold of the default param groups of any model. The oracles look at modules and sources, not at our
tables.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from meshmuon import MeshmuonError, Muon, RoutingRow, RoutingWarning, get_default_muon_param_groups

from .fused_in_source import cut_layers

# Parameters that no linear, convolutional or recurrent layer holds, and that are matrices nevertheless: class and name.
_RAW_MATRICES = re.compile(
    r"\w*(Router|Gate)\.weight|\w*(Experts|ExpertGLU)\.\w+|MultiheadAttention\.\w*proj_weight|\w*HyperConnection\.fn"
    r"|XLNetRelativeAttention\.[qkvor]|FunnelRelMultiheadAttention\.r_kernel|RecurrentGemmaRglru\.\w+_gate_weight"
    r"|ZambaMambaMixer\.(x|dt)_proj_weight|\w*MultiModalProjector\.mm_input_projection_weight|OmDetTurboLanguageBackbone\.text_projection"
    r"|XCLIPModel\.prompts_visual_projection|InklingRelativeLogits\.proj|Glm5NextTextIndexer\.index_kpool_compress_gate"
    r"|WanAnimateMotionEncoder\.motion_synthesis_weight|\w*Conv1D\.weight|\w*Linear\w*\.weight"
)
# Cut in forward, but one projection: rotary and other dims of a query, coordinates of points, time steps that are left
# out.
_ONE_ROLE = re.compile(
    r"q_b_proj|q_proj|wq_b|wq|linear_(q|kv)_points|query|v_proj|\w*sampling_offsets|dt_proj|index_\w+|wk|k_proj|weights_proj"
)


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass
class Findings:
    """What the checks of a model found: numbers to report, and problems, of which there must be none."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def check_model(model: nn.Module) -> Findings:
    """Routes a model and checks the result."""
    findings = Findings()
    if not any(param.requires_grad for param in model.parameters()):
        return findings
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            table = Muon(get_default_muon_param_groups(model), allow_inactive=True).routing_table()
    except MeshmuonError as error:
        findings.problems.append(f"refused: {error}")
        return findings
    doubts = [str(warning.message) for warning in caught if issubclass(warning.category, RoutingWarning)]
    findings.counts["warnings"] = len(doubts)
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    declared = _declared_tables(model)
    for row in table.rows:
        path, _, last = row.name.rpartition(".")
        holder, owner = modules[path], modules[path.rpartition(".")[0]]
        findings.counts[row.route] += 1
        if not row.why:
            findings.problems.append(f"{row.name}: no reason")
        if row.route == "muon":
            findings.problems += _in_muon(row, holder, last, id(params[row.name]) in declared)
        findings.problems += _filter(row, holder, last, findings.counts)
        findings.problems += _expert_stack(row, holder, last, findings.counts)
        findings.problems += _fused(row, holder, owner, path.rpartition(".")[2], doubts, findings.counts)
    return findings


def _declared_tables(model: nn.Module) -> set[int]:
    """Embeddings by type, and heads by what the model says itself."""
    tables: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            tables.append(module.weight)
        for method in ("get_output_embeddings", "get_classifier"):
            try:
                head = getattr(module, method)()
            except (AttributeError, NotImplementedError, TypeError):
                continue
            tables += list(head.parameters()) if isinstance(head, nn.Module) else []
    return {id(table) for table in tables}


def _in_muon(row: RoutingRow, holder: nn.Module, last: str, declared: bool) -> Iterator[str]:
    where = f"{row.name} {row.shape} of {type(holder).__name__} in Muon"
    if declared:
        yield f"{where}: an embedding or a head"
    if "Norm" in type(holder).__name__ and not hasattr(holder, "in_features"):
        yield f"{where}: a norm"
    if "bias" in last or "scale" in last or "embed" in last or re.search(r"(^|_)(pos|position|token)s?(_|$)", last):
        yield f"{where}: a bias, a scale or a table"
    if min(row.shape[-2:]) <= 4 and not isinstance(holder, CONVOLUTIONS):
        yield f"{where}: few rows"
    layered = isinstance(holder, (nn.Linear, nn.RNNBase, nn.RNNCellBase, nn.Bilinear, *CONVOLUTIONS))
    if not layered and not _RAW_MATRICES.fullmatch(f"{type(holder).__name__}.{last}"):
        yield f"{where}: not known to be a matrix"


def _filter(row: RoutingRow, holder: nn.Module, last: str, counts: Counter[str]) -> Iterator[str]:
    """A filter without groups that is large enough and sees no pixels is for Muon, unless it begins or ends the
    model.
    """
    if not isinstance(holder, CONVOLUTIONS) or last != "weight":
        return
    transposed = "Transpose" in type(holder).__name__
    pixels = holder.out_channels if transposed else holder.in_channels
    large = min(row.shape[0], math.prod(row.shape[1:])) >= 16
    counts["filters"] += row.route == "muon"
    if (row.route == "muon") != (holder.groups == 1 and large and pixels > 4) and not (
        row.route == "adamw" and re.match("patch embedding|1-D stem|output head|embedding", row.why)
    ):
        yield f"{row.name} {row.shape} of {holder} in {row.route}: {row.why}"


def _expert_stack(row: RoutingRow, holder: nn.Module, last: str, counts: Counter[str]) -> Iterator[str]:
    """A stack is what a class of experts holds in three dims; transformers' modules say how it is stored."""
    if "Expert" not in type(holder).__name__ or len(row.shape) != 3 or "bias" in last or min(row.shape[1:]) <= 4:
        return
    counts["expert stacks"] += 1
    gated = "gate_up" in last or (last == "weight" and row.name.endswith("input_linear.weight"))
    expected = row.shape[0] * (2 if gated else 1)
    if row.route != "muon" or row.matrices != expected:
        of = type(holder).__name__
        yield f"{row.name} {row.shape} of {of}: {row.matrices} matrices in {row.route}, not {expected}"
    transposed = getattr(holder, "is_transposed", None)
    if transposed is not None and ("(E, in, out)" in row.why) is not transposed:
        yield f"{row.name}: {row.why}, but is_transposed={transposed}"


def _fused(
    row: RoutingRow, holder: nn.Module, owner: nn.Module, label: str, doubts: list[str], counts: Counter[str]
) -> Iterator[str]:
    if not isinstance(holder, nn.Linear) and type(holder).__name__ != "Conv1D":
        return
    cut = any(
        label in cut_layers(cls) for cls in type(owner).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module
    )
    if row.route != "muon" or not row.name.endswith(".weight") or not cut or _ONE_ROLE.fullmatch(label):
        return
    if label == "kv_a_proj_with_mqa" and owner.qk_rope_head_dim == 0:  # nothing is cut off
        return
    counts["fused weights"] += 1
    if row.matrices < 2 and not any(label in doubt for doubt in doubts):
        yield f"{row.name} {row.shape} of {type(owner).__name__} is cut in forward, but not split: {row.why}"
