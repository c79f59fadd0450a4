"""Parameters that adapters add to a model (PEFT's LoRA and others)."""

from __future__ import annotations

from dataclasses import replace

from ..matrices import ONE_MATRIX, ParamMatrices
from .fused import fused_split
from .place import ParamPlace

LORA_FACTOR = "LoRA "  # the reasons of LoRA's factors begin with it
_MARK = "adapter_layer_names"  # PEFT's layers list what they add under this name
_FACTORS = ("lora_A", "lora_B")


def adapter_matrices(place: ParamPlace) -> tuple[str, ParamMatrices | None] | None:
    """Why a parameter of an adapter goes where, and its matrices if it goes to Muon; None if it belongs to no adapter.

    The factors of LoRA are matrices of ``r`` rows or columns. All else that adapters learn (scales, rotations, prompts, factors
    of other products) is none.
    """
    depth = next((k for k, module in enumerate(place.modules) if hasattr(module, _MARK)), None)
    factor = next((part for part in place.parts if part in _FACTORS), None)
    if depth is None and factor is None:
        return None
    added = place.parts[depth] if depth is not None and depth < len(place.parts) else place.parts[-1]
    if factor is None or place.param.dim() != 2:
        return ("embedding of an adapter" if "embedding" in added else "adapter parameter"), None
    rank = min(place.param.shape)
    if rank == 1:
        return f"{LORA_FACTOR}factor of rank 1", None
    layer = place.modules[place.parts.index(factor)]
    if getattr(layer, "num_experts", 1) > 1:
        return f"{LORA_FACTOR}factor of an expert stack", None
    if factor == "lora_A":
        return f"{LORA_FACTOR}A, rank {rank}", ONE_MATRIX
    base = replace(
        place,
        parts=(*place.parts[: place.parts.index(factor)], "weight"),
        modules=place.modules[: place.modules.index(layer) + 1],
    )
    known = fused_split(base, place.param.shape[0], int(getattr(layer, "in_features", 0) or 0))
    if known is None or known[1] is None:
        return f"{LORA_FACTOR}B, rank {rank}", ONE_MATRIX
    return f"{LORA_FACTOR}B, rank {rank}, of a fused {known[0]}", ParamMatrices(split=known[1])
