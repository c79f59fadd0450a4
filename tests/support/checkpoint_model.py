"""A model of every kind of state, the layouts that cut it, and the run that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import Muon
from tests.support.tensors import like, local, same

SAVED, STEPS = 5, 10
R, S0, S1, ES = Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2)
HALF = torch.bfloat16


@dataclass(frozen=True)
class Spec:
    """A parameter: ``first`` is the step of its first gradient, ``plane`` its placements on a 2×2 mesh (TP × FSDP)."""

    shape: tuple[int, ...]
    group: str = "muon"
    first: int = 0
    plane: tuple[Any, ...] = (S0, S1)
    dtype: torch.dtype = torch.float32
    frozen: bool = False


SPECS = {
    "embed": Spec((11, 6), "adamw", plane=(S0, R)),
    "wq": Spec((8, 6), plane=(ES, S0)),
    "wo": Spec((7, 9)),
    "few": Spec((2, 5)),  # empty shards from three ranks on
    "experts": Spec((5, 4, 6), plane=(S1, S0)),
    "norm": Spec((6,), "adamw", plane=(R, S0)),
    "late": Spec((6, 5), first=SAVED + 2),  # no gradient yet when it is saved
    "late_bias": Spec((3,), "adamw", first=SAVED + 1, plane=(S0, R)),
    "frozen": Spec((4, 4), frozen=True),
    "ruled": Spec((9, 7), "rule"),
    "narrow": Spec((6, 8), "float32 momentum", dtype=HALF),
    "rough": Spec((8, 4), "bfloat16 momentum"),
    "narrow_bias": Spec((9,), "adamw", dtype=HALF, plane=(S0, R)),
}
GROUPS: dict[str, dict[str, Any]] = {
    "muon": {"use_muon": True, "expert_keys": ["experts"]},
    "float32 momentum": {"use_muon": True, "momentum_dtype": torch.float32, "lr": 0.004, "rounding": "stochastic"},
    "bfloat16 momentum": {
        "use_muon": True,
        "momentum_dtype": HALF,
        "scheme": [(3.0, -3.2, 1.3), (1.9, -1.3, 0.4)],
        "ns_steps": 2,
    },
    "rule": {"use_muon": True, "rule": "normuon"},
    "adamw": {"use_muon": False, "lr": torch.tensor(0.002), "rounding": "stochastic"},
}


class Leaf(nn.Module):
    def __init__(self, value: Tensor, frozen: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(value, requires_grad=not frozen)


class Model(nn.Module):
    """A module of its own for every parameter, as wrappers want one dtype per module."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        for k, (name, spec) in enumerate(SPECS.items()):
            value = torch.randn(spec.shape, generator=torch.Generator().manual_seed(100 * seed + k)).to(spec.dtype)
            self.add_module(name, Leaf(value, spec.frozen))

    def weight(self, name: str) -> nn.Parameter:
        return self.leaf(name).weight

    def leaf(self, name: str) -> Leaf:
        leaf = self.get_submodule(name)
        assert isinstance(leaf, Leaf)
        return leaf


# Layouts: each cuts a whole model.


def whole(model: Model) -> None:
    """Leaves the model as it is."""


def fsdp(model: Model) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for leaf in model.children():
        fully_shard(leaf, mesh=mesh)


def hsdp(model: Model) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for leaf in model.children():
        fully_shard(leaf, mesh=mesh)


def place(model: Model, name: str, mesh: Any, placements: tuple[Any, ...]) -> None:
    leaf = model.leaf(name)
    weight = leaf.weight.detach()
    cut = distribute_tensor(weight.clone(), mesh, list(placements), src_data_rank=None)
    leaf.weight = nn.Parameter(cut, requires_grad=leaf.weight.requires_grad)


def tp_fsdp(model: Model) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, spec in SPECS.items():
        place(model, name, mesh, spec.plane)


def ep_fsdp(model: Model) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    flat = init_device_mesh("cpu", (4,))
    for name in SPECS:
        expert = name == "experts"
        place(model, name, mesh if expert else flat, (ES, S0) if expert else (S0,))


LAYOUTS: dict[str, tuple[int, Callable[[Model], None]]] = {
    "1 rank": (1, whole),
    "FSDP2 × 2": (2, fsdp),
    "FSDP2 × 3": (3, fsdp),
    "FSDP2 × 4": (4, fsdp),
    "HSDP 2×2": (4, hsdp),
    "TP×FSDP 2×2": (4, tp_fsdp),
    "EP×FSDP 2×2": (4, ep_fsdp),
}


# Runs.


def optimizer_of(model: Model, **options: Any) -> Muon:
    groups = []
    for kind, own in GROUPS.items():
        named = [(f"{name}.weight", model.weight(name)) for name, spec in SPECS.items() if spec.group == kind]
        own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in own.items()}
        groups.append({"params": named, **own})
    return Muon(groups, lr=0.01, weight_decay=0.1, **options)


def train(model: Model, optimizer: Muon, steps: range) -> None:
    for step in steps:
        for k, (name, spec) in enumerate(SPECS.items()):
            param = model.weight(name)
            if spec.frozen or step < spec.first:
                param.grad = None
                continue
            value = torch.randn(spec.shape, generator=torch.Generator().manual_seed(1000 * (step + 1) + k)).to(
                spec.dtype
            )
            param.grad = like(param, value)
        optimizer.step()


def content(model: Model, optimizer: Muon) -> dict[str, Tensor]:
    """Every parameter and every tensor of its state, by name."""
    tensors = {}
    for name in SPECS:
        param = model.weight(name)
        tensors[name] = param.detach().clone()
        for key, value in optimizer.state.get(param, {}).items():
            tensors[f"{name}.{key}"] = value.detach().clone()
    return tensors


@cache
def uninterrupted(steps: int) -> dict[str, Tensor]:
    """The run that never stopped, on one device."""
    model = Model(seed=1)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(steps))
    if steps == SAVED:
        optimizer.state_dict()  # gives zeros to what had no gradient yet
    return content(model, optimizer)


def compare(model: Model, optimizer: Muon, steps: int) -> None:
    """Bits, dtypes and keys are those of the run that never stopped."""
    actual, expected = content(model, optimizer), uninterrupted(steps)
    assert set(actual) == set(expected), set(actual) ^ set(expected)
    for name, value in expected.items():
        tensor = actual[name]
        assert tensor.dtype == value.dtype, f"{name}: {tensor.dtype} is not {value.dtype}"
        assert tensor.shape == value.shape
        same(local(tensor), local(like(tensor, value)), f"{name} after {steps} steps")


def agree(text: Any) -> None:
    """All ranks have the same."""
    shown: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shown, text)
    assert all(other == shown[0] for other in shown), shown


def keys_and_shapes(state_dict: dict[str, Any]) -> list[tuple[str, str, tuple[int, ...], str]]:
    return [
        (name, key, tuple(value.shape), str(value.dtype))
        for name, entry in sorted(state_dict["state"].items())
        for key, value in sorted(entry.items())
    ]


def trained(layout: str) -> tuple[Model, Muon]:
    model = Model(seed=1)
    LAYOUTS[layout][1](model)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(SAVED))
    return model, optimizer


def fresh(layout: str, **options: Any) -> tuple[Model, Muon]:
    """Other weights, other options where the checkpoint must bring its own."""
    model = Model(seed=2)
    LAYOUTS[layout][1](model)
    return model, optimizer_of(model, **options)


def whole_state(model: nn.Module, optimizer: Muon, options: StateDictOptions | None = None) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def load_whole(
    model: nn.Module, optimizer: Muon, state: dict[str, Any], options: StateDictOptions | None = None
) -> None:
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
