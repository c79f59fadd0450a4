"""A case: a model, where it lies, what the optimizer is told, and what happens to it step by step. Plain data.

``Param``, ``Layout`` and ``Case`` are all that a run depends on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

STEPS = 4
Place = tuple[str, tuple[Any, ...]]
"""A mesh by the name that ``Layout.meshes`` gives it, and torch's placements."""

Kind = Literal["matrix", "experts", "filter", "adamw"]


@dataclass(frozen=True)
class Param:
    """A parameter: its whole shape, what is in it, and in which steps it has a gradient."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = "matrix"
    dtype: torch.dtype = torch.float32
    entry: Mapping[str, Any] = field(default_factory=dict)  # of the option ``matrices``: experts, dims, split, flatten
    group: str = ""  # the name of its param group, whose options ``Case.groups`` has
    idle: tuple[int, ...] = ()  # steps in which no rank has a gradient for it
    frozen: tuple[int, ...] = ()  # steps in which it does not train
    lacking: tuple[tuple[int, int], ...] = ()  # (step, rank): this rank's rows have no gradient; zeros on one device
    scale: float = 1.0  # of its gradients


@dataclass(frozen=True)
class Layout:
    """Where parameters lie. A kind without a place of its own lies as ``matrix`` says; None is a plain tensor."""

    world: int = 1
    # name → shape over all ranks in order, or "name/axis" → () for the slice of an axis ("a", "b", …) of another mesh
    meshes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    matrix: Place | None = None
    experts: Place | None = None
    filters: Place | None = None
    adamw: Place | None = None
    wrapped: bool = False  # by torch's fully_shard on the first mesh; there are no places then
    divided: bool = False  # plain tensors, whose work ``replica_group`` divides
    averages: bool = False  # DistMuon, each rank with gradients of its own
    backend: str = "gloo"

    def build_meshes(self) -> dict[str, DeviceMesh]:
        built: dict[str, DeviceMesh] = {}
        for name, shape in self.meshes.items():
            if "/" in name:
                of, axis = name.split("/")
                built[name] = built[of][axis]
            else:
                axes = tuple("abc"[: len(shape)])
                built[name] = DeviceMesh("cpu", torch.arange(self.world).reshape(shape), mesh_dim_names=axes)
        return built

    def place(self, param: Param) -> Place | None:
        if param.kind == "adamw":
            return self.adamw
        if param.kind == "filter" and self.filters is not None:
            return self.filters
        if param.kind == "experts" and self.experts is not None:
            return self.experts
        if param.kind == "experts" and self.matrix is not None:  # every expert is cut as a matrix is
            return self.matrix[0], tuple(
                Shard(p.dim + 1) if isinstance(p, Shard) else Replicate() for p in self.matrix[1]
            )
        return self.matrix


ONE_DEVICE = Layout()


@dataclass(frozen=True)
class Case:
    """What one run is."""

    params: tuple[Param, ...]
    layout: Layout = ONE_DEVICE
    options: Mapping[str, Any] = field(default_factory=dict)  # of the optimizer
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name → options of that param group
    lrs: tuple[float, ...] = ()  # of each step, for all groups: a scheduler's
    steps: int = STEPS
    ranks: int = 1  # that have gradients of their own to be averaged, or lack them where they hold rows of a parameter
    spoilt: tuple[tuple[int, str, float], ...] = ()  # (step, parameter, number): an element of its gradient
    loss_scale: float | None = None  # of a GradScaler; a step that it skips halves it
    offloads: tuple[int, ...] = ()  # steps before which offload is turned on, or off if it is on
    # step → largest logits of layer 0, for QK-clip
    logits: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    prepares: bool = False  # calls ``prepare()`` before the first gradient
    reloads: int | None = None  # before this step a new optimizer loads the ``state_dict`` of the old one
    threads: int = 1

    @property
    def on_one_device(self) -> Case:
        """Without what must change no bit: a layout, offload, ``prepare()``, loading its own state, threads."""
        return replace(self, layout=ONE_DEVICE, offloads=(), prepares=False, reloads=None, threads=1)

    @property
    def averaged(self) -> bool:
        """Whether each of its ranks has gradients of its own."""
        return self.ranks > 1 and not any(param.lacking for param in self.params)


def _seeded(shape: tuple[int, ...], *seed: int) -> Tensor:
    number = 0
    for part in seed:
        number = 1009 * number + part + 1
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def initial(case: Case, k: int) -> Tensor:
    """The whole parameter ``k`` before the first step."""
    return (0.1 * _seeded(case.params[k].shape, k)).to(case.params[k].dtype)


def gradient(case: Case, step: int, k: int) -> Tensor | None:
    """The whole gradient of parameter ``k`` on one device: the mean where ranks average, zeros where one lacks it."""
    value = of_rank(case, step, k, 0)
    if value is None:
        return None
    if case.averaged:  # the sum in the order of ranks, divided once
        for rank in range(1, case.ranks):
            own = of_rank(case, step, k, rank)
            assert own is not None
            value += own
        value /= case.ranks
    for at, rank in case.params[k].lacking:
        rows = value.chunk(case.ranks)  # as torch's Shard(0) cuts them
        if at == step and rank < len(rows):
            rows[rank].zero_()
    return value


def of_rank(case: Case, step: int, k: int, rank: int) -> Tensor | None:
    """The whole gradient that a rank has, before it is cut. What it lacks is taken from it in ``run``."""
    param = case.params[k]
    if step in (*param.idle, *param.frozen):
        return None
    value = _seeded(param.shape, k, step, 1000 + rank if case.averaged else 1000)
    if case.averaged and param.kind == "adamw":
        value = case.ranks * value.mul(4).round()  # one reduction averages it, in an order that must not matter
    value = (param.scale * value).to(param.dtype)
    for at, name, number in case.spoilt:
        if (at, name) == (step, param.name):
            value.view(-1)[value.numel() // 2] = number
    return value
