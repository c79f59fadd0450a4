"""What each parameter of a model is, and why: the record from which param groups and the routing table are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..matrices import ONE_MATRIX, ParamMatrices, part_sizes
from .experts import stack_of
from .fused import fused_split, looks_fused_name
from .heads import HeadFinder, declared_heads, is_repeated, last_linear
from .names import is_embedding_name
from .not_matrices import FEW_ROWS, Filter, filter_of, has_few_rows, why_no_matrix, why_not_flattened
from .place import ParamPlace, models_in, places_of

LOOKS_FUSED = "matrix: looks fused, parts unknown"
UNKNOWN_STACK = "more than two dims, not known as a stack of matrices"
"""Reasons that lead to a warning or an error."""
CONV_ADAMW = 'conv="adamw"'
"""The reason of filters that Muon would have by default."""
LORA_FACTOR = "LoRA "
"""What the reasons of LoRA's factors begin with."""

_WITHOUT_DECAY = ("scalar", "vector", "norm", "bias", "bias of a stack")
_IN_OUT = r"^Conv1D$"  # GPT-2's linear layer, in transformers and elsewhere
_IN_OUT_PARAMETERS = frozenset(
    ("mm_input_projection_weight", "text_projection", "prompts_visual_projection", "visual_projection", "proj")
)
_ADAPTER = "adapter_layer_names"  # PEFT's layers list what they add under this name
_FLATTENED = {"XLNetRelativeAttention": {"q": "in_out", "k": "in_out", "v": "in_out", "r": "in_out", "o": "out_in"}}
_FLATTENED["FunnelRelMultiheadAttention"] = {"r_kernel": "in_out"}


@dataclass(frozen=True, slots=True)
class ParamContents:
    """What a parameter is.

    Attributes:
        route: ``"muon"`` or ``"adamw"``.
        reason: why, in a few words for the routing table.
        matrices: which matrices it holds, for Muon.
    """

    route: str
    reason: str
    matrices: ParamMatrices = ONE_MATRIX

    @property
    def decays(self) -> bool:
        """Whether it has weight decay: norms, biases and all other vectors have none, also those that are stacked."""
        return self.reason not in _WITHOUT_DECAY


class ModelContents:
    """Tells of each parameter of a model what it is.

    ``expert_keys`` and ``conv`` are the user's options of the same names, which override what is known.
    """

    def __init__(self, model: nn.Module, expert_keys: Sequence[str] = (), conv: str | None = None) -> None:
        self._expert_keys, self._conv = expert_keys, conv
        places = list(places_of(model))
        self._places = {place.name: place for place in places}
        self._embeddings = [_addresses(param) for param in _embeddings(model, places)]
        self._heads = [_addresses(param) for param in declared_heads(model)]
        self._head_finder = HeadFinder(places)
        last = [
            last_linear(part, inside) for part, inside in models_in(model, places) if not self._has_head(part, inside)
        ]
        self._last = {place.name for place in last if place is not None}

    def _has_head(self, model: nn.Module, places: Sequence[ParamPlace]) -> bool:
        """Whether a head is known by more than being the last linear layer."""
        weights = [getattr(module, "weight", None) for module in model.modules() if isinstance(module, nn.Linear)]
        weights += [place.param for place in places if not _is_embedding(place.module)]
        tied_head = any(isinstance(weight, Tensor) and _overlaps(weight, self._embeddings) for weight in weights)
        return tied_head or any(map(self._head_finder.reason, places)) or any(True for _ in declared_heads(model))

    def of_param(self, name: str) -> ParamContents:
        place = self._places[name]
        if place.param.dim() < 2:
            return ParamContents("adamw", "scalar" if place.param.dim() == 0 else "vector")
        return self._table(place) or _adapter(place) or self._no_matrix(place) or self._matrix(place)

    def _table(self, place: ParamPlace) -> ParamContents | None:
        for tables, reason in ((self._embeddings, "embedding"), (self._heads, "output head")):
            if _overlaps(place.param, tables):
                own = _is_embedding(place.module) or reason == "output head" or not isinstance(place.module, nn.Linear)
                return ParamContents("adamw", reason if own else f"tied to an {reason}")
        if is_embedding_name(list(place.parts)) and not self._is_expert(place):
            if filter_of(place) is None:
                return ParamContents("adamw", "embedding: by name")
            if not is_repeated(place):  # a patch embedding may be a network
                return ParamContents("adamw", "patch embedding")
        return None

    def _is_expert(self, place: ParamPlace) -> bool:
        return place.param.dim() == 3 and any(key in place.name for key in self._expert_keys)

    def _no_matrix(self, place: ParamPlace) -> ParamContents | None:
        """What is not one matrix: a stack, a filter, and what goes to AdamW. The user's word comes first."""
        no_matrix, stack = why_no_matrix(place), stack_of(place)
        if self._is_expert(place) and no_matrix not in ("bias", "norm"):
            return ParamContents("muon", "expert_keys", ONE_MATRIX if stack is None else stack[1])
        conv_filter = filter_of(place)
        if conv_filter is not None:
            return self._filter(place, conv_filter)
        reason = no_matrix or self._head_finder.reason(place)
        if reason is None and stack is not None:
            if not has_few_rows(place):
                return _in_parts(*stack, place.param.shape[-1 if stack[1].dims == "in_out" else -2])
            reason = f"{stack[0]} of few rows: nothing to orthogonalise"
        if reason is None and place.name in self._last:
            reason = "output head: the last linear layer"
        if reason is None and place.param.dim() == 2 and has_few_rows(place):
            reason = "at most 4 rows or columns: too few for Muon"
        return None if reason is None else ParamContents("adamw", reason)

    def _filter(self, place: ParamPlace, conv_filter: Filter) -> ParamContents:
        """A filter of a convolution. Those that AdamW has are matrices, too, for a user who gives them to Muon."""
        rows, channels = place.param.shape[:2]
        if conv_filter.groups > 1:
            inputs = rows if conv_filter.transposed else channels * conv_filter.groups
            kind = "depthwise" if conv_filter.groups == inputs else "grouped"
            return ParamContents("adamw", f"filter of a {kind} convolution")
        matrices = ParamMatrices(flatten=True, dims="in_out" if conv_filter.transposed else "out_in")
        if self._conv == "flatten":
            return ParamContents("muon", 'conv="flatten"', matrices)
        reason = why_not_flattened(place, conv_filter) or self._head_finder.reason(place)
        if reason is None and place.name in self._last:
            reason = "output head: the last layer"
        if reason is None and self._conv == "adamw":
            reason = CONV_ADAMW
        if reason is not None:
            return ParamContents("adamw", reason, matrices)
        if conv_filter.transposed:
            return ParamContents("muon", "matrix, filter (in, out·kernel)", matrices)
        return _whole_or_parts(place, matrices, "matrix, filter (out, in·kernel)", rows, place.param.numel() // rows)

    def _matrix(self, place: ParamPlace) -> ParamContents:
        flat = next((rows for holder, rows in _FLATTENED.items() if place.held_by(holder)), {}).get(place.parts[-1])
        if place.param.dim() > 2:
            if flat is not None:
                return ParamContents("muon", "heads side by side: one matrix", ParamMatrices(dims=flat, flatten=True))
            if self._conv == "flatten":
                return ParamContents("muon", 'conv="flatten"', ParamMatrices(flatten=True))
            return ParamContents(
                "adamw", "a vector in several dims" if min(place.param.shape[-2:]) == 1 else UNKNOWN_STACK
            )
        flipped = place.held_by(_IN_OUT) or (
            place.parts[-1] in _IN_OUT_PARAMETERS and not hasattr(place.module, "in_features")
        )
        dims = "in_out" if flipped else "out_in"
        rows, cols = place.param.shape
        outputs, inputs = (cols, rows) if flipped else (rows, cols)
        kind = "matrix stored (in, out)" if flipped else "matrix"
        return _whole_or_parts(place, ParamMatrices(dims=dims), kind, outputs, inputs)


def _whole_or_parts(place: ParamPlace, matrices: ParamMatrices, kind: str, outputs: int, inputs: int) -> ParamContents:
    """A weight that is one matrix of this kind, or several fused ones."""
    known = fused_split(place, outputs, inputs)
    if known is not None and known[1] is not None:
        return _in_parts(f"fused {known[0]}{kind.removeprefix('matrix')}", replace(matrices, split=known[1]), outputs)
    return ParamContents("muon", LOOKS_FUSED if known is None and looks_fused_name(place.parts) else kind, matrices)


def _in_parts(reason: str, matrices: ParamMatrices, outputs: int) -> ParamContents:
    """A weight of several parts. It has one route: Muon, unless each of its parts is too small for it."""
    sizes = part_sizes(matrices.split, outputs)
    if sizes and max(sizes) <= FEW_ROWS:
        return ParamContents("adamw", f"{reason}: parts of at most {FEW_ROWS} rows, too few for Muon")
    small = [size for size in sizes if size <= FEW_ROWS]
    which = "part" if len(small) == 1 else "parts"
    too = f"; also its {which} of {', '.join(map(str, small))} rows: a weight has one route" if small else ""
    return ParamContents("muon", reason + too, matrices)


def _adapter(place: ParamPlace) -> ParamContents | None:
    """A parameter that an adapter (PEFT's LoRA and others) adds to a model; None if it belongs to none.

    The factors of LoRA are matrices of ``r`` rows or columns. All else that adapters learn (scales, rotations, prompts,
    factors of other products) is none.
    """
    depth = next((k for k, module in enumerate(place.modules) if hasattr(module, _ADAPTER)), None)
    factor = next((part for part in place.parts if part in ("lora_A", "lora_B")), None)
    if depth is None and factor is None:
        return None
    added = place.parts[depth] if depth is not None and depth < len(place.parts) else place.parts[-1]
    if factor is None or place.param.dim() != 2:
        return ParamContents("adamw", "embedding of an adapter" if "embedding" in added else "adapter parameter")
    rank = min(place.param.shape)
    if rank == 1:
        return ParamContents("adamw", f"{LORA_FACTOR}factor of rank 1")
    at = place.parts.index(factor)
    layer = place.modules[at]
    if getattr(layer, "num_experts", 1) > 1:
        return ParamContents("adamw", f"{LORA_FACTOR}factor of an expert stack")
    reason = f"{LORA_FACTOR}{factor[-1]}, rank {rank}"
    base = replace(place, parts=(*place.parts[:at], "weight"), modules=place.modules[: place.modules.index(layer) + 1])
    known = (
        fused_split(base, place.param.shape[0], int(getattr(layer, "in_features", 0) or 0))
        if factor == "lora_B"
        else None
    )
    if known is None or known[1] is None:
        return ParamContents("muon", reason)
    return ParamContents("muon", f"{reason}, of a fused {known[0]}", ParamMatrices(split=known[1]))


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def _embeddings(model: nn.Module, places: Sequence[ParamPlace]) -> Iterator[Tensor]:
    """The tables of embeddings, of tied ones too; a parametrised one is known by its place only."""
    weights = (getattr(module, "weight", None) for module in model.modules() if _is_embedding(module))
    yield from (weight for weight in weights if isinstance(weight, Tensor))
    yield from (place.param for place in places if _is_embedding(place.module))


def _overlaps(param: Tensor, tables: Sequence[range]) -> bool:
    """Whether it shares memory with one of the tables."""
    addresses = _addresses(param)
    return any(addresses.start < table.stop and table.start < addresses.stop for table in tables)


def _addresses(param: Tensor) -> range:
    """The memory addresses of a parameter. Tied parameters overlap; parameters that are views of one flat buffer do
    not.
    """
    start = param.data_ptr()
    if start == 0:  # a meta or empty tensor has no address, so it is tied to itself only
        return range(id(param), id(param) + 1)
    last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
    return range(start, start + (last + 1) * param.element_size())
