"""A step on a mesh beside the same step on one device: the same parameters, gradients and options on both sides."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from meshmuon import Muon
from tests.support.hostile import misplaced
from tests.support.tensors import local, same

STEPS = 5


@dataclass(frozen=True)
class Param:
    """A parameter of a case: its global shape, where it lies, and in which steps it has a gradient."""

    shape: tuple[int, ...]
    mesh: int | None = 0  # index into the case's meshes; None is a plain tensor
    placements: tuple[Any, ...] = ()
    dtype: torch.dtype = torch.float32
    muon: bool = True
    unused: tuple[int, ...] = ()
    frozen: bool = False
    split: Any = None  # as the option
    flipped: bool = False  # experts of shape (experts, in, out)


@dataclass(frozen=True)
class Case:
    """Parameters, options of the optimizer, and what happens to them. One device steps as all ranks of a mesh do."""

    params: tuple[Param, ...]
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    threads: int = 1
    misplaced: bool = False  # parameters and gradients at addresses that no allocator would choose
    spoilt: tuple[tuple[int, int], ...] = ()  # (step, parameter): its gradient has a NaN then
    offload: int | None = None  # seeds when each rank turns offload on and off; one device never does


def initial(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [_put(case, k, torch.randn(param.shape, generator=generator).to(param.dtype)) for k, param in enumerate(case.params)]


def gradient(case: Case, step: int, k: int) -> Tensor | None:
    param = case.params[k]
    if param.frozen or step in param.unused:
        return None
    generator = torch.Generator().manual_seed(1000 * (step + 1) + k)
    value = torch.randn(param.shape, generator=generator).to(param.dtype)
    if (step, k) in case.spoilt:
        value.view(-1)[(7 * step + k) % value.numel()] = torch.nan
    return _put(case, k + step, value)


def _put(case: Case, k: int, value: Tensor) -> Tensor:
    return misplaced(value, 1 + k % 15) if case.misplaced else value


def build(case: Case, params: Sequence[nn.Parameter], **options: Any) -> Muon:
    groups: list[dict[str, Any]] = []
    names = [
        f"layers.{k}.experts.weight" if len(param.shape) == 3 else f"layers.{k}.weight" for k, param in enumerate(case.params)
    ]
    splits = {name: param.split for name, param in zip(names, case.params, strict=True)}
    for use_muon, flipped in ((True, False), (True, True), (False, False)):
        chosen = [k for k, param in enumerate(case.params) if (param.muon, param.flipped) == (use_muon, flipped)]
        if chosen:
            group = {"params": [params[k] for k in chosen], "names": [names[k] for k in chosen], "use_muon": use_muon}
            if use_muon:
                group |= {"split": lambda name, shape: splits[name]} if any(splits.values()) else {}
                group |= {"expert_dims": "in_out"} if flipped else {}
            groups.append(group)
    # Cases are drawn at random, and some have no matrix or no gradient for one.
    return Muon(groups, lr=0.01, allow_inactive=True, **{"expert_keys": ["experts"], **case.options, **options})


COUNTERS = ("step", "rounding_counter")  # state that every rank has whole
States = list[dict[str, Tensor]]


def run(
    case: Case, params: Sequence[nn.Parameter], grads: Any, *, watch: Callable[[Muon], None] | None = None, **options: Any
) -> tuple[list[Tensor], States, Muon]:
    """This rank's part of the parameters and of their state after all steps; ``watch`` sees the optimizer after each."""
    optimizer = build(case, params, **options)
    for step in range(case.steps):
        for k, param in enumerate(params):
            param.grad = grads(step, k)
        optimizer.step()
        if watch is not None:
            watch(optimizer)
    optimizer.turn_off_cpu_offload()
    states = [{key: local(value) for key, value in optimizer.state.get(param, {}).items()} for param in params]
    return [local(param) for param in params], states, optimizer


def _trainable(case: Case, values: Sequence[Tensor]) -> list[nn.Parameter]:
    return [as_parameter(value, not param.frozen) for value, param in zip(values, case.params, strict=True)]


def as_parameter(value: Tensor, requires_grad: bool) -> nn.Parameter:
    """``nn.Parameter(value)``, which for a DTensor begins with ``detach()``; this leaves that out.

    Before that operation torch 2.15 lists all combinations of placements over the axes of the mesh, in each of the threads that
    are ranks here: half a minute for one case on 12 ranks.
    """
    if not isinstance(value, DTensor):
        return nn.Parameter(value, requires_grad=requires_grad)
    value._is_param = True
    return value.requires_grad_(requires_grad)  # type: ignore[return-value]


def single(case: Case) -> tuple[list[Tensor], States]:
    """The same on one device, with whole tensors."""
    params = _trainable(case, initial(case))
    return run(case, params, lambda step, k: gradient(case, step, k))[:2]


def place(case: Case, meshes: Sequence[DeviceMesh], k: int, value: Tensor) -> Tensor:
    """Torch itself cuts a whole tensor as parameter ``k`` is cut."""
    param = case.params[k]
    if param.mesh is None:
        return _put(case, k + 5, value.clone())
    cut = distribute_tensor(value.clone(), meshes[param.mesh], list(param.placements), src_data_rank=None)
    if not case.misplaced:
        return cut
    shard = _put(case, k + dist.get_rank(), cut.to_local())
    return DTensor.from_local(shard, cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride())


def sharded(
    case: Case, meshes: Sequence[DeviceMesh], *, watch: Callable[[Muon], None] | None = None, **options: Any
) -> tuple[list[Tensor], States, Muon]:
    """The case on this rank of a process group."""
    choices = random.Random(f"{case.offload}, {dist.get_rank()}")

    def grad(step: int, k: int) -> Tensor | None:
        value = gradient(case, step, k)
        return None if value is None else place(case, meshes, k, value)

    def after_step(optimizer: Muon) -> None:
        if watch is not None:
            watch(optimizer)
        if case.offload is not None:
            choices.choice([optimizer.turn_off_cpu_offload, *[optimizer.turn_on_cpu_offload] * 2, optimizer.state_dict])()

    params = _trainable(case, [place(case, meshes, k, value) for k, value in enumerate(initial(case))])
    return run(case, params, grad, watch=after_step, **options)


def check(case: Case, meshes: Sequence[DeviceMesh], expected: tuple[list[Tensor], States], **options: Any) -> Muon:
    """Runs the case on this rank and demands the bits that one device found, cut by torch."""
    values, states, optimizer = sharded(case, meshes, **options)
    _check_shards(case, meshes, (values, states), expected)
    skipped = {step for step, k in case.spoilt if gradient(case, step, k) is not None}
    assert optimizer.skipped_steps == len(skipped)
    return optimizer


def _check_shards(
    case: Case, meshes: Sequence[DeviceMesh], actual: tuple[list[Tensor], States], expected: tuple[list[Tensor], States]
) -> None:
    """Demands of this rank's parameters and their state the bits of whole ones, cut by torch."""
    for k in range(len(case.params)):
        same(actual[0][k], local(place(case, meshes, k, expected[0][k])), f"parameter {k}")
        state, whole = actual[1][k], expected[1][k]
        for key in {**state, **whole}:
            if key in state and key not in whole:  # ``state_dict`` makes it for parameters without a gradient so far
                assert case.offload is not None, f"{key} of parameter {k}"
                assert key in COUNTERS or not state[key].any(), f"{key} of parameter {k}"
            else:
                cut = whole[key] if key in COUNTERS else local(place(case, meshes, k, whole[key]))
                same(state[key], cut, f"{key} of parameter {k}")


def check_missing(case: Case, mesh: DeviceMesh, without_gradient: dict[tuple[int, int], set[int]]) -> None:
    """Runs a case in which, at (step, parameter), some ranks lack the gradient, against zeros on one device."""
    rank = dist.get_rank()

    def shard(step: int, k: int) -> Tensor | None:
        value = gradient(case, step, k)
        if value is None or rank in without_gradient.get((step, k), set()):
            return None
        return place(case, [mesh], k, value)

    def zeroed(step: int, k: int) -> Tensor | None:
        value = gradient(case, step, k)
        for other in sorted(without_gradient.get((step, k), set())):
            assert value is not None
            value = without_shard(value, other, dist.get_world_size(), case.params[k].placements[0].dim)
        return value

    actual = run(case, [nn.Parameter(place(case, [mesh], k, value)) for k, value in enumerate(initial(case))], shard)
    expected = run(case, [nn.Parameter(value) for value in initial(case)], zeroed)
    _check_shards(case, [mesh], actual[:2], expected[:2])


def without_shard(value: Tensor, rank: int, world: int, dim: int) -> Tensor:
    """Zeros where torch's Shard(dim) puts the part of ``rank``."""
    chunks = list(value.chunk(world, dim))
    if rank < len(chunks):
        chunks[rank] = torch.zeros_like(chunks[rank])
    return torch.cat(chunks, dim)
