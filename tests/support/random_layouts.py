"""Hypothesis strategies for cases: random meshes, placements, parameters and options."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import Interleaved, NorMuon

from .cases import Case, Param
from .rules import Drag

AXES = ("a", "b", "c")


@dataclass(frozen=True)
class Layouts:
    """The meshes of a case: the first has ``shape``, the others are named."""

    shape: tuple[int, ...]
    others: tuple[str, ...] = ()  # "flat" and "turned" are meshes of their own over the same ranks; "a", "b" are slices

    @property
    def world(self) -> int:
        return math.prod(self.shape)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        known = {"flat": (self.world,), "turned": self.shape[::-1]}
        return [
            self.shape,
            *(known[name] if name in known else (self.shape[AXES.index(name)],) for name in self.others),
        ]

    def build(self) -> list[DeviceMesh]:
        ranks = torch.arange(self.world)
        first = DeviceMesh("cpu", ranks.reshape(self.shape), mesh_dim_names=AXES[: len(self.shape)])
        made = {
            "flat": lambda: DeviceMesh("cpu", ranks, mesh_dim_names=("flat",)),
            "turned": lambda: DeviceMesh("cpu", ranks.reshape(self.shape[::-1])),
        }
        return [first, *(made[name]() if name in made else first[name] for name in self.others)]


ONE_AXIS = [(1,), (2,), (3,), (4,), (5,), (7,), (8,), (16,)]
MORE_AXES = [(2, 2), (2, 3), (3, 2), (1, 4), (2, 4), (4, 2), (2, 8), (4, 4), (2, 2, 2), (2, 1, 3), (3, 2, 2), (2, 2, 4)]


@st.composite
def mesh_layouts(draw: Any) -> Layouts:
    shape = draw(st.sampled_from(ONE_AXIS + 2 * MORE_AXES[:6] + MORE_AXES[6:]))
    more = ["flat"] if len(shape) == 1 else ["flat", "turned", *AXES[: len(shape)]]
    return Layouts(shape, tuple(draw(st.lists(st.sampled_from(more), max_size=2, unique=True))))


def placements(dims: int, axes: int) -> st.SearchStrategy[tuple[Any, ...]]:
    shard = st.builds(Shard, st.integers(0, dims - 1))
    strided = st.builds(
        lambda dim, factor: _StridedShard(dim, split_factor=factor), st.integers(0, dims - 1), st.integers(2, 4)
    )
    return st.tuples(*[st.one_of(shard, shard, st.just(Replicate()), strided)] * axes)


SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 16, 17])
DTYPES = st.sampled_from([torch.float32] * 4 + [torch.bfloat16, torch.float64])


@st.composite
def splits(draw: Any, outputs: int) -> tuple[int, ...] | Interleaved:
    """Any split of ``outputs``: consecutive parts, or parts that take turns."""
    repeats = draw(st.sampled_from([count for count in range(1, outputs + 1) if outputs % count == 0]))
    period = outputs // repeats
    edges = sorted(draw(st.sets(st.integers(1, period - 1), max_size=3))) if period > 1 else []
    sizes = tuple(stop - start for start, stop in pairwise([0, *edges, period]))
    return sizes if repeats == 1 else Interleaved(sizes, repeats)


@st.composite
def case_params(draw: Any, layouts: Layouts, steps: int) -> Param:
    """Matrices, experts, filters, fused weights of any of them, and what AdamW steps; some idle for some steps,
    some frozen.
    """
    muon = draw(st.sampled_from([True, True, True, False]))
    dims = draw(st.sampled_from([2, 2, 2, 3, 3, 4])) if muon else draw(st.sampled_from([1, 1, 2]))
    mesh = draw(st.sampled_from([*range(len(layouts.shapes)), *range(len(layouts.shapes)), None]))
    shape = tuple(draw(SIZES) for _ in range(min(dims, 3))) + tuple(draw(st.integers(1, 3)) for _ in range(dims - 3))
    flipped = muon and dims == 3 and draw(st.booleans())
    outputs = shape[-1] if flipped else shape[0 if dims == 4 else -2] if muon else 0
    return Param(
        shape=shape,
        mesh=mesh,
        placements=() if mesh is None else draw(placements(dims, len(layouts.shapes[mesh]))),
        dtype=draw(DTYPES),
        muon=muon,
        unused=tuple(draw(st.sets(st.integers(0, steps - 1)))) if draw(st.integers(0, 2)) == 0 else (),
        frozen=draw(st.integers(0, 9)) == 0,
        split=draw(splits(outputs)) if muon and draw(st.integers(0, 2)) == 0 else None,
        flipped=flipped,
    )


PER_COLUMN = ((NorMuon(axis="columns"), Drag("columns")), (NorMuon(axis="longer"),))
RULES = ["plain", "plain", "muon_plus", "muoneq", ("muoneq", "normuon", "muon_plus"), ("normuon", Drag()), *PER_COLUMN]
OPTIONS = st.fixed_dictionaries(
    {
        "replicas": st.sampled_from(["auto", "share", "repeat"]),
        "chunk_size": st.sampled_from([-1, -1, 1, 3]),
        "warmup_step": st.sampled_from([0, 1, 5]),
        "memory_budget": st.one_of(st.just(64 * 2**20), st.integers(1, 2000)),
        "nesterov": st.booleans(),
        "scheme": st.sampled_from(["keller", "polar_express", "zolotarev", "hybrid", "halley"]),
        "momentum_dtype": st.sampled_from([None, None, None, torch.float32, torch.bfloat16, torch.float64]),
        "none_grad": st.booleans(),
        "rule": st.sampled_from(RULES),
        "adjust_lr_fn": st.sampled_from(["match_rms_adamw", "spectral"]),
        "cautious_weight_decay": st.booleans(),
        "weight_decay": st.sampled_from([0.1, 0.5]),
    }
)


@st.composite
def cases(draw: Any, *, steps: int = 4, events: bool = False, averages: bool = False) -> tuple[Case, Layouts, bool]:
    """A case, its meshes, and whether plain tensors are divided; with ``events`` ranks may lack gradients."""
    layouts = Layouts((draw(st.integers(2, 5)),)) if averages else draw(mesh_layouts())
    params = tuple(draw(st.lists(case_params(layouts, steps), min_size=1, max_size=5)))
    params *= draw(st.sampled_from([1, 1, 1, 4]))  # batches are larger then, and different on every rank
    options = draw(OPTIONS)
    if options["rule"] in PER_COLUMN and any(param.split is not None for param in params):  # whose parts share columns
        options["rule"] = ("normuon", Drag())
    threads = draw(st.sampled_from([1, 1, 1, 1, 2, 3]))
    options["deterministic"] = threads > 1 or draw(st.integers(0, 5)) == 0
    if any(len(param.shape) == 4 for param in params):
        options["conv"] = "flatten"
    if draw(st.booleans()) and not any(param.dtype == torch.float64 for param in params):
        options["comm_dtype"] = torch.float32  # the default, said aloud
    if any(param.dtype == torch.bfloat16 for param in params):  # for others alone stochastic rounding warns
        options["rounding"] = draw(st.sampled_from(["nearest", "stochastic"]))
    spoilt: tuple[tuple[int, int], ...] = ()
    places = st.integers(0, steps - 1), st.integers(0, len(params) - 1)
    if draw(st.integers(0, 2)) == 0:
        options["nonfinite"] = "skip"
        spoilt = tuple(draw(st.sets(st.tuples(*places), max_size=2)))
    offload = draw(st.sampled_from([None, None, *range(4)]))
    case = Case(params, options, steps, threads, spoilt=spoilt, offload=offload, prepares=draw(st.booleans()))
    if averages:
        params = tuple(replace(param, mesh=None, placements=()) for param in params)
        options = {key: value for key, value in options.items() if key not in ("replicas", "comm_dtype")}
        case = replace(case, params=params, options=options, averages=True)
    if events and draw(st.booleans()):
        missing = draw(st.sets(st.tuples(*places, st.integers(0, layouts.world - 1)), max_size=8))
        # What only one rank knows comes and goes without the others.
        missing = tuple(sorted(event for event in missing if averages or params[event[1]].mesh is not None))
        case = replace(case, missing=missing)
    return case, layouts, not averages and draw(st.booleans())
