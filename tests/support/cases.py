"""A step on a mesh beside the same step on one device: the same parameters, gradients and options on both sides."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from meshmuon import DistMuon, Muon
from tests.support.hostile import misplaced
from tests.support.reference import engine_muon
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
    spoilt: tuple[tuple[int, int], ...] = ()  # (step, parameter): a holder's gradient has a NaN or an infinity then
    # (step, parameter, rank): this rank and its replicas have no gradient then
    missing: tuple[tuple[int, int, int], ...] = ()
    offload: int | None = None  # seeds when each rank turns offload on and off; one device never does
    averages: bool = False  # DistMuon, each rank with gradients of its own
    divided: bool = False  # plain tensors are replicas; else each rank knows only its own
    prepares: bool = False  # ranks call ``prepare()`` before the first step; one device never does


Held = list[list[Tensor]]  # rank → parameter → the flat indices of the elements that torch puts there


def initial(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        _put(case, k, torch.randn(param.shape, generator=generator).to(param.dtype))
        for k, param in enumerate(case.params)
    ]


def gradient(case: Case, step: int, k: int) -> Tensor | None:
    """The whole gradient; all holders have what is not finite in it."""
    value = _finite(case, step, k)
    if value is not None and (step, k) in case.spoilt:
        value.view(-1)[_spoilt_element(case, step, k)] = torch.nan
    return value


def _finite(case: Case, step: int, k: int, rank: int = 0) -> Tensor | None:
    param = case.params[k]
    if param.frozen or step in param.unused:
        return None
    generator = torch.Generator().manual_seed(1000 * (step + 1) + k + 100_000 * rank)
    value = torch.randn(param.shape, generator=generator)
    if case.averages and not param.muon:
        value.round_()  # one reduction averages what AdamW steps: its order must not matter
    return _put(case, k + step, value.to(param.dtype))


def _spoilt_element(case: Case, step: int, k: int) -> int:
    return (7 * step + k) % math.prod(case.params[k].shape)


class Gradients:
    """Gradients that ranks lack, spoil or have of their own, and the whole ones with which one device steps instead."""

    def __init__(self, case: Case, held: Held) -> None:
        self._case, self._held = case, held

    def _lacking(self, step: int, k: int) -> set[int]:
        """Ranks without a gradient; of replicas all or none, unless each has a gradient of its own."""
        lacking = {rank % len(self._held) for at, param, rank in self._case.missing if (at, param) == (step, k)}
        if self._case.averages:
            return lacking
        shards = [tuple(held[k][:1].tolist()) for held in self._held]  # the first element tells which shard it is
        return lacking | {
            rank for rank, shard in enumerate(shards) if shard and shard in {shards[other] for other in lacking}
        }

    def _culprits(self, step: int, k: int) -> list[int]:
        """The last rank whose gradient has the element that is spoilt; all of them unless it is known that they
        hear of it.
        """
        if (step, k) not in self._case.spoilt or _finite(self._case, step, k) is None:
            return []
        element, lacking = _spoilt_element(self._case, step, k), self._lacking(step, k)
        ranks = [rank for rank, held in enumerate(self._held) if rank not in lacking and element in held[k]]
        connected = self._case.params[k].mesh == 0 or self._case.averages or self._case.divided
        return ranks[-1:] if connected else ranks

    def of_rank(self, rank: int, step: int, k: int) -> Tensor | None:
        """What torch cuts for this rank."""
        value = _finite(self._case, step, k, rank if self._case.averages else 0)
        if value is None or rank in self._lacking(step, k):
            return None
        if rank in self._culprits(step, k):
            value.view(-1)[_spoilt_element(self._case, step, k)] = torch.nan if k % 2 else -torch.inf
        return value

    def whole(self, step: int, k: int) -> Tensor | None:
        """Zeros stand for what is missing; None if it is missing on all ranks."""
        lacking, value = self._lacking(step, k), _finite(self._case, step, k)
        if value is None or len(lacking) == len(self._held):
            return None
        if self._case.averages:
            grads = [self.of_rank(rank, step, k) for rank in range(len(self._held))]
            first, *others = [torch.zeros_like(value) if grad is None else grad for grad in grads]
            for grad in others:
                first += grad
            return first.div_(len(grads))
        for rank in lacking:
            value.view(-1)[self._held[rank][k]] = 0
        if self._culprits(step, k):
            value.view(-1)[_spoilt_element(self._case, step, k)] = torch.nan
        return value

    def active(self, step: int) -> set[int]:
        """Matrices with a gradient on some rank."""
        with_gradient = {
            k for k, param in enumerate(self._case.params) if not param.frozen and step not in param.unused
        }
        return {k for k in with_gradient if self._case.params[k].muon and len(self._lacking(step, k)) < len(self._held)}

    def skipped_steps(self) -> int:
        steps, params = range(self._case.steps), range(len(self._case.params))
        return sum(any(self._culprits(step, k) for k in params) for step in steps)


def held_by(case: Case, meshes: Sequence[DeviceMesh]) -> list[Tensor]:
    """For each parameter the flat indices of the elements that torch puts on this rank."""
    indices = [torch.arange(math.prod(param.shape)).reshape(param.shape) for param in case.params]
    return [local(place(case, meshes, k, value)).flatten() for k, value in enumerate(indices)]


def _put(case: Case, k: int, value: Tensor) -> Tensor:
    return misplaced(value, 1 + k % 15) if case.misplaced else value


def build(case: Case, params: Sequence[nn.Parameter], kind: type[Muon] = Muon, **options: Any) -> Muon:
    groups: list[dict[str, Any]] = []
    names = [
        f"layers.{k}.experts.weight" if len(param.shape) == 3 else f"layers.{k}.weight"
        for k, param in enumerate(case.params)
    ]
    splits = {name: param.split for name, param in zip(names, case.params, strict=True)}
    for use_muon, flipped in ((True, False), (True, True), (False, False)):
        chosen = [k for k, param in enumerate(case.params) if (param.muon, param.flipped) == (use_muon, flipped)]
        if chosen:
            group = {"params": [params[k] for k in chosen], "names": [names[k] for k in chosen], "use_muon": use_muon}
            if use_muon:
                group |= {"split": lambda name, shape: splits[name]} if any(splits.values()) else {}
                group |= {"matrices": {names[k]: {"dims": "in_out"} for k in chosen}} if flipped else {}
            groups.append(group)
    defaults = {"adjust_lr_fn": "original", "weight_decay": 0.0} if case.averages else {}
    options = {"expert_keys": ["experts"], **defaults, **case.options, **options}
    # Cases are drawn at random, and some have no matrix or no gradient for one.
    return engine_muon(groups, kind, lr=0.01, allow_inactive=True, **options)


COUNTERS = ("step", "rounding_counter")  # state that every rank has whole
States = list[dict[str, Tensor]]


def run(
    case: Case,
    params: Sequence[nn.Parameter],
    grads: Any,
    *,
    watch: Callable[[Muon], object] | None = None,
    prepares: bool = False,
    **options: Any,
) -> tuple[list[Tensor], States, Muon]:
    """This rank's part of the parameters and of their state after all steps; ``watch`` sees the optimizer after
    each.
    """
    optimizer = build(case, params, **options)
    if prepares:
        optimizer.prepare()
    for step in range(case.steps):
        for k, param in enumerate(params):
            param.grad = grads(step, k)
        optimizer.step()
        if watch is not None:
            watch(optimizer)
    if isinstance(optimizer, DistMuon):
        optimizer.consolidate()
    optimizer.turn_off_cpu_offload()
    states = [{key: local(value) for key, value in optimizer.state.get(param, {}).items()} for param in params]
    return [local(param) for param in params], states, optimizer


def _trainable(case: Case, values: Sequence[Tensor]) -> list[nn.Parameter]:
    return [as_parameter(value, not param.frozen) for value, param in zip(values, case.params, strict=True)]


def as_parameter(value: Tensor, requires_grad: bool) -> nn.Parameter:
    """``nn.Parameter(value)``, which for a DTensor begins with ``detach()``; this leaves that out.

    Before that operation torch 2.15 lists all combinations of placements over the axes of the mesh, in each of the
    threads that are ranks here: half a minute for one case on 12 ranks.
    """
    if not isinstance(value, DTensor):
        return nn.Parameter(value, requires_grad=requires_grad)
    value._is_param = True
    return value.requires_grad_(requires_grad)  # type: ignore[return-value]


def single(case: Case, held: Held | None = None) -> tuple[list[Tensor], States]:
    """The same on one device, with whole tensors; ``held`` is needed where ranks lack or spoil gradients, or
    average them.
    """
    params = _trainable(case, initial(case))
    grads = partial(gradient, case) if held is None else Gradients(case, held).whole
    return run(case, params, grads)[:2]


def place(case: Case, meshes: Sequence[DeviceMesh], k: int, value: Tensor) -> Tensor:
    """Torch itself cuts a whole tensor as parameter ``k`` is cut."""
    param = case.params[k]
    if param.mesh is None:
        return _put(case, k + 5, value.clone())
    cut = distribute_tensor(value.clone(), meshes[param.mesh], list(param.placements), src_data_rank=None)
    if not case.misplaced:
        return cut
    shard = _put(case, k + dist.get_rank(), cut.to_local())
    return DTensor.from_local(
        shard, cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
    )


def sharded(
    case: Case,
    meshes: Sequence[DeviceMesh],
    held: Held | None = None,
    *,
    watch: Callable[[Muon], object] | None = None,
    **options: Any,
) -> tuple[list[Tensor], States, Muon]:
    """The case on this rank of a process group."""
    choices, rank = random.Random(f"{case.offload}, {dist.get_rank()}"), dist.get_rank()

    def grad(step: int, k: int) -> Tensor | None:
        value = gradient(case, step, k) if held is None else Gradients(case, held).of_rank(rank, step, k)
        return None if value is None else place(case, meshes, k, value)

    def after_step(optimizer: Muon) -> None:
        if watch is not None:
            watch(optimizer)
        if case.offload is not None:
            choices.choice([optimizer.turn_off_cpu_offload, *[optimizer.turn_on_cpu_offload] * 2])()
            if isinstance(optimizer, DistMuon) and case.offload % 2:
                optimizer.consolidate()
                optimizer.load_state_dict(optimizer.state_dict())
            elif not isinstance(optimizer, DistMuon) and choices.random() < 0.3:
                optimizer.state_dict()

    params = _trainable(case, [place(case, meshes, k, value) for k, value in enumerate(initial(case))])
    more = {"kind": DistMuon} if case.averages else {"replica_group": dist.group.WORLD} if case.divided else {}
    return run(case, params, grad, watch=after_step, prepares=case.prepares, **more, **options)


def check(
    case: Case,
    meshes: Sequence[DeviceMesh],
    expected: tuple[list[Tensor], States],
    held: Held | None = None,
    **options: Any,
) -> Muon:
    """Runs the case on this rank and demands the bits that one device found, cut by torch."""
    values, states, optimizer = sharded(case, meshes, held, **options)
    check_shards(case, meshes, (values, states), expected)
    skipped = {step for step, k in case.spoilt if step < case.steps and gradient(case, step, k) is not None}
    assert optimizer.skipped_steps == (len(skipped) if held is None else Gradients(case, held).skipped_steps())
    return optimizer


def check_shards(
    case: Case, meshes: Sequence[DeviceMesh], actual: tuple[list[Tensor], States], expected: tuple[list[Tensor], States]
) -> None:
    """Demands of this rank's parameters and their state the bits of whole ones, cut by torch."""
    for k in range(len(case.params)):
        same(actual[0][k], local(place(case, meshes, k, expected[0][k])), f"parameter {k}")
        state, whole = actual[1][k], expected[1][k]
        for key in {**state, **whole}:
            if key in state and key not in whole:  # ``state_dict`` or ``prepare`` makes it before the first gradient
                assert case.offload is not None or case.prepares, f"{key} of parameter {k}"
                assert key in COUNTERS or not state[key].any(), f"{key} of parameter {k}"
            else:
                cut = whole[key] if key in COUNTERS else place(case, meshes, k, whole[key])
                same(local(state[key]), local(cut), f"{key} of parameter {k}")


def check_missing(case: Case, mesh: DeviceMesh, without_gradient: dict[tuple[int, int], set[int]]) -> None:
    """Runs a case on a mesh of one axis in which, at (step, parameter), some ranks lack the gradient: zeros on one
    device.
    """
    missing = tuple((step, k, rank) for (step, k), ranks in without_gradient.items() for rank in sorted(ranks))
    case, held = replace(case, missing=missing), Held([] for _ in range(mesh.size()))
    for param in case.params:
        indices = torch.arange(math.prod(param.shape)).reshape(param.shape)
        parts = indices.chunk(mesh.size(), param.placements[0].dim)
        for rank, shards in enumerate(held):
            shards.append(parts[rank].flatten() if rank < len(parts) else indices.flatten()[:0])
    check(case, [mesh], single(case, held), held)
