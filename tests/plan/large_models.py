"""Public shapes of large mixture-of-experts models, and how expert parallelism lays them out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from meshmuon.layout import Layout, Mesh, Placement, Sharded
from meshmuon.ortho import expected_flops, resolve_scheme
from meshmuon.plan import Plan, PlannedParam, PlanOptions, cost_model_for, make_plan

SCHEME = resolve_scheme("polar_express", 5)


@dataclass(frozen=True)
class Model:
    """Matrices of a layer as (out, in), how many layers have them, and the experts of a layer."""

    dense: tuple[tuple[int, tuple[int, int]], ...]  # (number of layers, shape)
    moe_layers: int
    experts: int
    hidden: int
    expert_width: int


def attention(layers: int, *shapes: tuple[int, int]) -> tuple[tuple[int, tuple[int, int]], ...]:
    return tuple((layers, shape) for shape in shapes)


def mlp(layers: int, width: int, hidden: int) -> tuple[tuple[int, tuple[int, int]], ...]:
    return attention(layers, (width, hidden), (width, hidden), (hidden, width))


_MLA = ((1536, 7168), (576, 7168))
MODELS = {
    "Qwen3-235B-A22B": Model(
        attention(94, (8192, 4096), (512, 4096), (512, 4096), (4096, 8192), (128, 4096)), 94, 128, 4096, 1536
    ),
    "DeepSeek-V3": Model(
        attention(61, *_MLA, (24576, 1536), (32768, 512), (7168, 16384)) + mlp(3, 18432, 7168) + mlp(58, 2048, 7168),
        58,
        256,
        7168,
        2048,
    ),
    "Kimi K2": Model(
        attention(61, *_MLA, (12288, 1536), (16384, 512), (7168, 8192)) + mlp(1, 18432, 7168) + mlp(60, 2048, 7168),
        60,
        384,
        7168,
        2048,
    ),
    # 60 layers of 512 experts of 3 × 4096 × 1024: 387 billion expert weights.
    "397B-class": Model(
        attention(60, (8192, 4096), (512, 4096), (512, 4096), (4096, 8192), (512, 4096)), 60, 512, 4096, 1024
    ),
}


@lru_cache(maxsize=4096)
def flops(rows: int, cols: int) -> int:
    return expected_flops(rows, cols, SCHEME, "auto", torch.bfloat16)


def expert_layout(shape: tuple[int, int, int], ranks: int, ep: int) -> Layout:
    """As torchtitan does it: the expert dim over ep, then FSDP on the same dim, or on the rows if experts are too
    few.
    """
    mesh = Mesh((ranks // ep, ep), tuple(range(ranks)))
    inner: Placement = (
        Sharded(0, ep) if ranks <= shape[0] and ep > 1 else Sharded(0) if ranks <= shape[0] else Sharded(1)
    )
    return Layout(shape, mesh, (inner, Sharded(0)))


def plan_of(model: Model, ranks: int, ep: int, budget: int = 64 * 2**20) -> Plan:
    mesh = Mesh((ranks,), tuple(range(ranks)))
    entries = []
    for number, (layers, shape) in enumerate(model.dense):
        for k in range(layers):
            layout = Layout(shape, mesh, (Sharded(0),))
            entries.append(PlannedParam(f"layers.{k}.{number}.weight", (layout,), 0, "bf16", 2, flops(*shape)))
    width, hidden = model.expert_width, model.hidden
    for k in range(model.moe_layers):
        for name, rows, cols in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            layout = expert_layout((model.experts, rows, cols), ranks, ep)
            entries.append(PlannedParam(f"layers.{k}.experts.{name}", (layout,), 1, "bf16", 2, flops(rows, cols)))
    return make_plan(entries, PlanOptions(cost_model_for("cuda"), budget=budget))
