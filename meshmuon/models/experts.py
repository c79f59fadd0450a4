"""Parameters that hold a stack of independent matrices, such as the experts of a mixture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..matrices import Interleaved, ParamMatrices, Split
from .fused import fused_split
from .place import ParamPlace


@dataclass(frozen=True)
class Stack:
    """A kind of stack: the class that holds it, which of its parameters, and how these are stored."""

    holder: str  # regular expression for a class of the module that holds the parameter
    label: str  # regular expression for the whole name of the parameter
    dims: str = "out_in"
    parts: str = ""  # "" for one matrix each, "halves" or "in turns" for gate and up


STACKS: tuple[Stack, ...] = (
    Stack("GptOssGroupedExperts", r"mlp1_weight\w*", parts="in turns"),  # torchtitan
    Stack("GroupedExperts", r"w[123](_[A-Z]+)?|mlp[12]_weight\w*"),  # torchtitan
    Stack("Llama4TextExperts", "gate_up_proj", "in_out", "halves"),
    Stack("Llama4TextExperts", "down_proj", "in_out"),
    Stack("RecurrentGemmaRglru", "(input|recurrent)_gate_weight", "in_out"),
    Stack("ZambaMambaMixer", "x_proj_weight|dt_proj_weight"),
    Stack("^MLP$|^GLU$|^MemoryOptimizedMLP$", "w1|v1|w2", "in_out"),  # megablocks, dense: (experts, in, out)
)

_BLOCKS_OF_ROWS: tuple[Stack, ...] = (  # 2-D weights with one expert below the other: all are (experts · ff, hidden)
    Stack("DbrxExpertGLU|SparseMLP|SparseGLU|MemoryOptimizedGroupedMLP", "w1|v1"),
    Stack("DbrxExpertGLU|SparseMLP|SparseGLU|MemoryOptimizedGroupedMLP", "w2", "in_out"),
)
_GATE_AND_UP = re.compile(r"gate_up\w*|gate_and_up\w*|w13\w*|input_linear|up_gate\w*|mlp1_weight\w*")
_EXPERTS = re.compile(r"(\w+_)?experts?|(\w+_)?moe(_\w+)?|mixture(_\w+)?", re.IGNORECASE)
_UP = re.compile(
    r"(\w+_)?(w_?1|w_?3|w_?in|wi(_\d)?|up|gate|fc_?1|c_fc|lin_?1|linear_?1)(_proj|_weight|_w)?|w_(up|gate)"
)
_DOWN = re.compile(r"(\w+_)?(w_?2|w_?out|wo|down|fc_?2|c_proj|lin_?2|linear_?2)(_proj|_weight|_w)?|w_(down|out)")


def stack_of(place: ParamPlace) -> tuple[str, ParamMatrices] | None:
    """What a parameter stacks, as text and as its matrices; None if it is not a known stack."""
    if place.param.dim() == 2:
        return _blocks_of_rows(place)
    if place.param.dim() != 3:
        return None
    declared = _declared(place)
    if declared is not None:
        return declared
    for row in STACKS:
        if place.held_by(row.holder) and re.fullmatch(row.label, place.parts[-1]):
            return _described(place, row.dims, row.parts)
    named = place.held_by("Experts|GroupedMLP|MoE|Moe|MOE|Mixture") or any(
        _EXPERTS.fullmatch(part) for part in place.parts
    )
    if not named:
        return None
    dims = _proven_dims(place)
    text, matrices = _described(place, dims or "out_in", "halves" if _GATE_AND_UP.fullmatch(place.label) else "")
    rows, cols = place.param.shape[1:]
    return (text if dims or rows == cols else text.replace(")", ", assumed)", 1)), matrices


def _proven_dims(place: ParamPlace) -> str | None:
    """How a stack of an unknown module is stored, by what is beside it; None if nothing tells.

    A bias has the size of the outputs: ``b1`` (E, f) of ``w1`` (E, d, f). A router has that of the model: from
    ``router.weight`` (E, d) it follows that ``w_up`` (E, d, f) takes d inputs, and that ``w_down`` (E, f, d) gives d
    outputs.
    """
    count, rows, cols = place.param.shape
    if rows == cols:
        return None
    name, params = place.parts[-1], place.module._parameters
    for bias_name in (re.sub("^w", "b", name), name.replace("weight", "bias"), f"{name}_bias", f"{name}_b"):
        bias = params.get(bias_name) if bias_name != name else None
        if bias is not None and bias.dim() == 2 and bias.shape[0] == count and bias.shape[1] in (rows, cols):
            return "out_in" if bias.shape[1] == rows else "in_out"
    matrices = [param.shape for param in params.values() if param is not None and param.dim() == 2]
    routers = [shape for shape in (*matrices, *_linear_shapes(place.modules[-2:])) if count in shape]
    widths = {size for shape in routers for size in shape if size != count} & {rows, cols}
    if len(widths) != 1 or bool(_UP.fullmatch(name)) == bool(_DOWN.fullmatch(name)):
        return None
    inputs_last = widths.pop() == cols
    return "out_in" if inputs_last == bool(_UP.fullmatch(name)) else "in_out"


def _linear_shapes(modules: Sequence[nn.Module]) -> Iterator[Sequence[int]]:
    for child in (child for module in modules for child in module.children()):
        weight = getattr(child, "weight", None)
        if isinstance(child, nn.Linear) and isinstance(weight, Tensor):
            yield weight.shape


def _declared(place: ParamPlace) -> tuple[str, ParamMatrices] | None:
    """transformers' expert modules say themselves how they store their weights."""
    module = place.module
    if not all(hasattr(module, flag) for flag in ("is_transposed", "is_concatenated", "has_gate")):
        return None
    fused = bool(module.has_gate) and place.label.startswith("gate_up")
    parts = ("halves" if module.is_concatenated else "in turns") if fused else ""
    return _described(place, "in_out" if module.is_transposed else "out_in", parts)


def _described(place: ParamPlace, dims: str, parts: str) -> tuple[str, ParamMatrices]:
    _, rows, cols = place.param.shape
    outputs, inputs = (rows, cols) if dims == "out_in" else (cols, rows)
    known = fused_split(place, outputs, inputs) if not parts else None
    split: Split | None = None if known is None else known[1]
    text = "" if known is None else f", fused {known[0]}"
    if parts and outputs % 2 == 0:
        split = (outputs // 2,) * 2 if parts == "halves" else Interleaved((1, 1), outputs // 2)
        text = ", gate and up" if parts == "halves" else ", gate and up in turns"
    order = "out, in" if dims == "out_in" else "in, out"
    return f"expert stack (E, {order}){text}", ParamMatrices(experts=True, dims=dims, split=split)


def _blocks_of_rows(place: ParamPlace) -> tuple[str, ParamMatrices] | None:
    for row in _BLOCKS_OF_ROWS:
        if place.held_by(row.holder) and re.fullmatch(row.label, place.parts[-1]):
            size = place.size("ff")
            if size and place.param.size(0) % size == 0:
                order = "out, in" if row.dims == "out_in" else "in, out"
                count = place.param.size(0) // size
                return f"expert stack (E·rows, cols), each ({order})", ParamMatrices(experts=count, dims=row.dims)
    return None
