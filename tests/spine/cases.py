"""All cases: features, layouts, and which feature runs on which layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import Interleaved, MuonEq, NorMuon

from .case import Case, Layout, Param

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
STRIDED, STRIDED_ROWS = _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=2)
HALF, DOUBLE = torch.bfloat16, torch.float64

# Polar Express as its authors published it (arXiv:2505.16932, algorithm 1), without their safety factor.
PUBLISHED = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)


def named(prefix: str, *params: Param) -> tuple[Param, ...]:
    return tuple(replace(param, name=f"{prefix}.{param.name}") for param in params)


MATRICES = (
    Param("wq", (12, 8)),
    Param("wo", (8, 12)),
    Param("up", (24, 8)),
    Param("down", (8, 24)),
)
ODD = (Param("odd", (7, 5)), Param("few", (2, 6)), Param("wide", (5, 17)), Param("row", (1, 9)), Param("tall", (13, 3)))
ADAMW = (Param("embed", (11, 6), "adamw"), Param("norm", (9,), "adamw"), Param("head", (12, 8), "adamw"))
EVEN = (*named("layers.0", *MATRICES), *named("layers.1", *MATRICES), Param("head", (12, 8), "adamw"))
MIXED = (*named("layers.0", *MATRICES[:2]), *named("layers.1", *ODD), *ADAMW)
EXPERTS = (
    Param("layers.0.experts.up", (4, 6, 8), "experts"),
    Param("layers.0.experts.odd", (5, 6, 4), "experts"),
    Param("layers.1.experts.few", (2, 8, 6), "experts"),
    Param("layers.1.experts.down", (4, 6, 10), "experts", entry={"experts": True, "dims": "in_out"}),
    Param("layers.1.experts.fused", (4, 10, 6), "experts", entry={"experts": True, "split": (3, 7)}),
    Param("layers.2.experts.fused", (2, 4, 9), "experts", entry={"experts": True, "dims": "in_out", "split": (3, 6)}),
    Param("layers.2.wq", (12, 8)),
    Param("layers.2.odd", (7, 5)),
    Param("layers.2.norm", (9,), "adamw"),
)
FUSED = (
    Param("layers.0.qkv", (18, 6), entry={"split": (8, 4, 6)}),
    Param("layers.0.heads", (12, 5), entry={"split": 4}),
    Param("layers.0.gate_up", (30, 4), entry={"split": Interleaved((6, 2, 2), 3)}),
    Param("layers.1.filter", (8, 3, 2, 2), "filter"),
    Param("layers.1.fused_filter", (8, 3, 3, 1), "filter", entry={"flatten": True, "split": (2, 6)}),
    Param("layers.1.wo", (8, 12)),
    Param("bias", (7,), "adamw"),
)
ATTENTION = (
    Param("layers.0.q_proj.weight", (16, 6)),
    Param("layers.0.k_proj.weight", (8, 6)),
    Param("layers.0.q_proj.bias", (16,), "adamw"),
    Param("layers.0.up.weight", (10, 6)),
)


def in_dtype(params: tuple[Param, ...], dtype: torch.dtype, *, every: int = 1) -> tuple[Param, ...]:
    return tuple(replace(param, dtype=dtype) if k % every == 0 else param for k, param in enumerate(params))


def with_fields(params: tuple[Param, ...], fields: Mapping[str, Mapping[str, Any]]) -> tuple[Param, ...]:
    assert set(fields) <= {param.name for param in params}
    return tuple(replace(param, **fields.get(param.name, {})) for param in params)


COMING_AND_GOING = with_fields(
    MIXED,
    {
        "layers.0.wo": {"idle": (0,)},
        "layers.1.odd": {"idle": (1, 2)},
        "embed": {"idle": (2,)},
        "norm": {"idle": (0, 1)},
    },
)
FROZEN = with_fields(
    MIXED, {"layers.0.wq": {"frozen": (0, 1)}, "layers.1.wide": {"frozen": (2,)}, "head": {"frozen": (0, 1, 2)}}
)
LACKING = with_fields(
    MIXED,
    {
        "layers.0.wq": {"lacking": ((1, 0), (2, 2))},
        "layers.1.few": {"lacking": ((2, 1),)},
        "embed": {"lacking": ((1, 2),)},
    },
)
SIZES = with_fields(
    MIXED, {"layers.0.wq": {"scale": 1e-30}, "layers.1.odd": {"scale": 1e30}, "layers.1.wide": {"scale": 0.0}}
)
DTYPES = tuple(
    replace(param, dtype=(DOUBLE, HALF, torch.float32)[k % 3], group="" if k % 3 else "double")
    for k, param in enumerate(MIXED)
)
GROUPED = tuple(replace(param, group="b" if k % 3 == 0 else "") for k, param in enumerate(MIXED))

PRECISE = {"compute_dtype": torch.float32}
KELLER = {"scheme": "keller", **PRECISE}
LARGE = {**KELLER, "adjust_lr_fn": "original", "lr": 0.05}  # steps beside which the rounding of 16 bits is small

FEATURES: dict[str, Case] = {
    "defaults": Case(MIXED),  # whatever scheme and dtype of products this machine takes
    "even": Case(EVEN, options=KELLER),
    "odd": Case(MIXED, options=KELLER),
    "published coefficients": Case(MIXED, options={"scheme": PUBLISHED, **PRECISE, "adjust_lr_fn": "spectral"}),
    "rational": Case(MIXED, options={"scheme": "hybrid", **PRECISE}),
    "experts": Case(EXPERTS, options={**KELLER, "adjust_lr_fn": "original"}),
    "experts, defaults": Case(EXPERTS, options={"rule": "normuon"}),
    "fused": Case(FUSED, options={**KELLER, "adjust_lr_fn": "original"}),
    "float64": Case(in_dtype((*MIXED, *EXPERTS[:1]), DOUBLE), options={"scheme": "keller"}),
    "three dtypes": Case(DTYPES, options=LARGE, groups={"double": {"compute_dtype": DOUBLE}}),
    "bfloat16, nearest": Case(in_dtype(MIXED, HALF), options={**LARGE, "momentum_dtype": torch.float32}),
    "bfloat16, random bits": Case(in_dtype((*MIXED, *EXPERTS[:2]), HALF), options={**LARGE, "rounding": "stochastic"}),
    "momentum in bfloat16": Case(MIXED, options={**KELLER, "momentum_dtype": HALF}),
    "NorMuon": Case((*MIXED, *EXPERTS[:3]), options={**KELLER, "rule": "normuon"}),
    "NorMuon, longer": Case(MIXED, options={**KELLER, "rule": NorMuon(beta2=0.9, axis="longer")}),
    "chained": Case((*MIXED, *FUSED[:2]), options={**KELLER, "rule": ["muoneq", "muon_plus", "normuon"]}),
    "rules per group": Case(
        GROUPED, options=KELLER, groups={"b": {"rule": [MuonEq(), NorMuon(axis="columns")], "lr": 0.01}}
    ),
    "cautious": Case((*MIXED, *EXPERTS[:2]), options={**KELLER, "cautious_weight_decay": True, "weight_decay": 0.5}),
    "cautious, random bits": Case(
        in_dtype(MIXED, HALF, every=2),
        options={**LARGE, "cautious_weight_decay": True, "rounding": "stochastic", "rule": "normuon"},
    ),
    "offload": Case(
        in_dtype((*MIXED, *EXPERTS[:2]), HALF, every=3), options={**LARGE, "rule": "normuon"}, offloads=(0, 2, 3)
    ),
    "QK-clip": Case(
        ATTENTION,
        options={**KELLER, "clip_config": {"head_dim": 4, "threshold": 2.0}},
        logits={1: (1.0, 3.0, 2.0, 8.0), 3: (5.0, -1.0, 0.0, 2.5)},
    ),
    "coming and going": Case(COMING_AND_GOING, options={**KELLER, "rule": "normuon"}),
    "lacking": Case(LACKING, options=KELLER, ranks=3),
    "experts lacking": Case(
        with_fields(
            (*EXPERTS[:4], *MIXED[-2:]),
            {
                "layers.0.experts.odd": {"lacking": ((0, 2), (2, 0))},
                "layers.1.experts.few": {"lacking": ((1, 0), (1, 1))},
            },
        ),
        options={**KELLER, "rule": "normuon"},
        ranks=3,
    ),
    "frozen": Case(FROZEN, options=KELLER),
    "GradScaler": Case(MIXED, options=KELLER, loss_scale=1024.0, spoilt=((1, "layers.0.wo", torch.inf),)),
    "skip": Case(
        MIXED,
        options={**KELLER, "nonfinite": "skip", "rule": "normuon"},
        spoilt=((0, "head", torch.nan), (2, "layers.1.odd", -torch.inf)),
    ),
    "metrics": Case((*MIXED, *EXPERTS[:2]), options={**KELLER, "metrics": 1, "rule": "normuon"}),
    "propagate": Case(EVEN, options=KELLER, spoilt=((3, "layers.0.wq", torch.nan), (3, "head", torch.nan))),
    "sizes": Case(SIZES, options=KELLER),
    "schedule": Case(
        MIXED, options={**KELLER, "nesterov": False, "momentum": 0.8, "maximize": True}, lrs=(0.001, 0.01, 0.015, 0.0)
    ),
    "tensor lr": Case(GROUPED, options={**KELLER, "lr": torch.tensor(0.015)}, groups={"b": {"lr": torch.tensor(0.01)}}),
    "no decay": Case(MIXED, options={**KELLER, "weight_decay": 0.0, "momentum": 0.0}),
    "small waves": Case((*EVEN, *EXPERTS), options={**KELLER, "chunk_size": 1, "warmup_step": 0}),
    "small memory": Case((*EVEN, *EXPERTS), options={**KELLER, "memory_budget": 1000, "rule": "normuon"}),
    "prepared": Case((*MIXED, *EXPERTS), options={**KELLER, "rule": "normuon"}, prepares=True),
    "reloaded": Case(
        in_dtype(MIXED, HALF, every=2), options={**LARGE, "rule": "normuon", "rounding": "stochastic"}, reloads=2
    ),
    "threads": Case((*EVEN, *EXPERTS), options={**KELLER, "deterministic": True}, threads=2),
    "replicas repeat": Case(MIXED, options={**KELLER, "replicas": "repeat"}),
    "replicas share": Case(MIXED, options={**KELLER, "replicas": "share", "rule": "normuon"}),
    "reference path": Case((*MIXED, *EXPERTS[:2]), options={**KELLER, "use_distributed_muon": True}),
    "own gradients": Case((*MIXED, *FUSED[:3], *EXPERTS[:2]), options={**KELLER, "rule": "normuon"}, ranks=3),
    "own gradients, defaults": Case(COMING_AND_GOING, ranks=3, reloads=3, offloads=(1,)),
}

FSDP = {n: Layout(n, {"fsdp": (n,)}, ("fsdp", (S0,)), adamw=("fsdp", (S0,))) for n in (2, 3, 4)}
_PLANE = {"plane": (2, 2)}
LAYOUTS: dict[str, Layout] = {
    **{f"FSDP × {n}": layout for n, layout in FSDP.items()},
    "fully_shard × 2": Layout(2, {"fsdp": (2,)}, wrapped=True),
    "fully_shard × 4": Layout(4, {"fsdp": (4,)}, wrapped=True),
    "fully_shard, HSDP": Layout(4, _PLANE, wrapped=True),
    "HSDP": Layout(4, _PLANE, ("plane", (R, S0)), adamw=("plane", (R, S0))),
    "TP by rows": Layout(2, {"tp": (2,)}, ("tp", (S0,)), adamw=("tp", (R,))),
    "TP by columns": Layout(3, {"tp": (3,)}, ("tp", (S1,)), adamw=("tp", (S0,))),
    "TP by rows × FSDP": Layout(
        4, _PLANE, ("plane", (STRIDED, S0)), ("plane", (STRIDED_ROWS, S1)), adamw=("plane", (S0, R))
    ),
    "TP by columns × FSDP": Layout(4, _PLANE, ("plane", (S0, S1)), adamw=("plane", (S0, R))),
    "2 TP × 2 replicate × 2 shard": Layout(8, {"cube": (2, 2, 2)}, ("cube", (R, S0, S1)), adamw=("cube", (R, S0, R))),
    "EP": Layout(4, {"ep": (4,)}, ("ep", (S0,)), ("ep", (S0,)), adamw=("ep", (S0,))),
    "EP × 3": Layout(3, {"ep": (3,)}, ("ep", (S0,)), ("ep", (S0,)), adamw=("ep", (S0,))),
    "EP, replicated rest": Layout(2, {"ep": (2,)}, ("ep", (R,)), ("ep", (S0,)), adamw=("ep", (R,))),
    "EP × FSDP": Layout(
        4, {"flat": (4,), "plane": (2, 2)}, ("flat", (S0,)), ("plane", (STRIDED, S0)), adamw=("flat", (S0,))
    ),
    "EP × FSDP by rows": Layout(
        4, {"flat": (4,), "plane": (2, 2)}, ("flat", (S0,)), ("plane", (S1, S0)), adamw=("flat", (S0,))
    ),
    "EP × TP": Layout(4, _PLANE, ("plane", (R, S0)), ("plane", (S0, S1)), adamw=("plane", (R, R))),
    "EP × TP by columns": Layout(4, _PLANE, ("plane", (S0, S1)), ("plane", (S0, S2)), adamw=("plane", (S0, R))),
    "slices": Layout(
        4,
        {"plane": (2, 2), "plane/a": (), "plane/b": ()},
        ("plane/a", (S0,)),
        ("plane/b", (S0,)),
        adamw=("plane", (S0, R)),
    ),
    "plain beside shards": Layout(3, {"fsdp": (3,)}, ("fsdp", (S0,))),
    "DDP": Layout(3, divided=True),
    "DDP × 2": Layout(2, divided=True),
    "DistMuon": Layout(3, averages=True),
    "NCCL-like FSDP": replace(FSDP[2], backend="nccl_like"),
    "NCCL-like HSDP": Layout(4, _PLANE, ("plane", (R, S0)), adamw=("plane", (R, S0)), backend="nccl_like"),
}

_RUNS: Mapping[str, tuple[str, ...]] = {
    "defaults": ("FSDP × 2", "TP by rows × FSDP", "DDP × 2"),
    "even": ("FSDP × 2", "FSDP × 4", "fully_shard × 2", "TP by columns × FSDP"),
    "odd": ("FSDP × 3", "fully_shard × 4", "HSDP", "TP by columns", "plain beside shards", "NCCL-like FSDP", "DDP"),
    "published coefficients": ("FSDP × 2", "TP by columns × FSDP"),
    "rational": ("FSDP × 4", "HSDP"),
    "experts": (
        "EP",
        "EP × 3",
        "EP, replicated rest",
        "EP × FSDP",
        "EP × FSDP by rows",
        "EP × TP",
        "EP × TP by columns",
        "slices",
    ),
    "experts, defaults": ("EP × FSDP", "fully_shard × 4"),
    "fused": ("FSDP × 3", "TP by rows × FSDP", "TP by columns × FSDP", "HSDP", "DDP"),
    "float64": ("FSDP × 3", "EP × TP"),
    "three dtypes": ("HSDP", "TP by rows"),
    "bfloat16, nearest": ("fully_shard × 2", "TP by rows × FSDP"),
    "bfloat16, random bits": ("FSDP × 3", "TP by columns × FSDP", "DDP × 2", "EP × FSDP"),
    "momentum in bfloat16": ("FSDP × 2",),
    "NorMuon": ("FSDP × 4", "TP by columns", "EP × TP", "HSDP"),
    "NorMuon, longer": ("TP by columns × FSDP",),
    "chained": ("FSDP × 2", "TP by rows × FSDP"),
    "rules per group": ("FSDP × 3", "TP by columns × FSDP"),
    "cautious": ("FSDP × 2", "EP × TP by columns"),
    "cautious, random bits": ("TP by rows × FSDP", "HSDP"),
    "offload": ("FSDP × 2", "EP × FSDP", "HSDP"),
    "QK-clip": ("FSDP × 3", "TP by columns", "TP by rows × FSDP"),
    "coming and going": ("FSDP × 2", "HSDP", "TP by columns × FSDP", "NCCL-like HSDP"),
    "lacking": ("FSDP × 3",),
    "experts lacking": ("EP × 3",),
    "frozen": ("FSDP × 3", "TP by rows"),
    "GradScaler": ("FSDP × 2", "HSDP"),
    "skip": ("FSDP × 4", "TP by columns × FSDP", "DDP"),
    "metrics": ("EP × FSDP", "TP by columns"),
    "propagate": ("FSDP × 2",),
    "sizes": ("FSDP × 3", "TP by columns"),
    "schedule": ("fully_shard, HSDP", "TP by rows × FSDP"),
    "tensor lr": ("FSDP × 3",),
    "no decay": ("FSDP × 2",),
    "small waves": ("EP × FSDP", "2 TP × 2 replicate × 2 shard"),
    "small memory": ("EP × TP", "FSDP × 3"),
    "prepared": ("EP", "HSDP"),
    "reloaded": ("FSDP × 3", "TP by columns × FSDP"),
    "threads": ("FSDP × 2",),
    "replicas repeat": ("HSDP", "DDP × 2"),
    "replicas share": ("HSDP", "EP, replicated rest"),
    "reference path": ("FSDP × 2", "EP × TP"),
    "own gradients": ("DistMuon",),
    "own gradients, defaults": ("DistMuon",),
}

CASES: dict[str, Case] = {
    f"{feature} | {layout}": replace(FEATURES[feature], layout=LAYOUTS[layout])
    for feature, layouts in _RUNS.items()
    for layout in layouts
}
