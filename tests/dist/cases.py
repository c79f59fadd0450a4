"""A step on a mesh beside the same step on one device: the same parameters, gradients and options on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from meshmuon import Muon
from tests.hostile import misplaced

from ..clear_cuts import clearly_cut

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


@dataclass(frozen=True)
class Case:
    params: tuple[Param, ...]
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    threads: int = 1
    misplaced: bool = False  # parameters and gradients at addresses that no allocator would choose


def initial(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [_put(case, k, torch.randn(one.shape, generator=generator).to(one.dtype)) for k, one in enumerate(case.params)]


def gradient(case: Case, step: int, k: int) -> Tensor | None:
    one = case.params[k]
    if one.frozen or step in one.unused:
        return None
    generator = torch.Generator().manual_seed(1000 * (step + 1) + k)
    return _put(case, k + step, torch.randn(one.shape, generator=generator).to(one.dtype))


def _put(case: Case, k: int, value: Tensor) -> Tensor:
    return misplaced(value, 1 + k % 15) if case.misplaced else value


def build(case: Case, params: Sequence[nn.Parameter], **options: Any) -> Muon:
    groups: list[dict[str, Any]] = []
    for use_muon in (True, False):
        chosen = [k for k, one in enumerate(case.params) if one.muon is use_muon]
        if chosen:
            names = [f"layers.{k}.experts.weight" if len(case.params[k].shape) == 3 else f"layers.{k}.weight" for k in chosen]
            groups.append({"params": [params[k] for k in chosen], "names": names, "use_muon": use_muon})
    return Muon(groups, lr=0.01, **{"expert_keys": ["experts"], **case.options, **options})


def run(
    case: Case, params: Sequence[nn.Parameter], grads: Any, *, watch: Callable[[Muon], None] | None = None, **options: Any
) -> tuple[list[Tensor], list[Tensor | None], Muon]:
    """This rank's part of the parameters and of their momentum (AdamW: first moment) after all steps; ``watch`` sees each."""
    optimizer = build(case, params, **options)
    for step in range(case.steps):
        for k, param in enumerate(params):
            param.grad = grads(step, k)
        optimizer.step()
        if watch is not None:
            watch(optimizer)
    momentum = [optimizer.state[p].get("momentum_buffer", optimizer.state[p].get("exp_avg")) for p in params]
    return [local(p) for p in params], [None if m is None else local(m) for m in momentum], optimizer


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def single(case: Case) -> tuple[list[Tensor], list[Tensor | None]]:
    """The same on one device, with whole tensors."""
    params = [nn.Parameter(value, requires_grad=not one.frozen) for value, one in zip(initial(case), case.params, strict=True)]
    values, momentum, _ = run(case, params, lambda step, k: gradient(case, step, k))
    return values, momentum


def place(case: Case, meshes: Sequence[DeviceMesh], k: int, value: Tensor) -> Tensor:
    """Torch itself cuts a whole tensor as parameter ``k`` is cut."""
    one = case.params[k]
    if one.mesh is None:
        return _put(case, k + 5, value.clone())
    placements = clearly_cut(one.shape, meshes[one.mesh].shape, one.placements)
    cut = distribute_tensor(value.clone(), meshes[one.mesh], list(placements), src_data_rank=None)  # torch 2.9 gives views
    if not case.misplaced:
        return cut
    mine = _put(case, k + dist.get_rank(), cut.to_local())
    whole = {"shape": cut.shape, "stride": cut.stride()}
    return DTensor.from_local(mine, cut.device_mesh, cut.placements, run_check=False, **whole)


def sharded(case: Case, meshes: Sequence[DeviceMesh], **options: Any) -> tuple[list[Tensor], list[Tensor | None], Muon]:
    """The case on this rank of a process group."""

    def grad(step: int, k: int) -> Tensor | None:
        value = gradient(case, step, k)
        return None if value is None else place(case, meshes, k, value)

    values = [place(case, meshes, k, value) for k, value in enumerate(initial(case))]
    params = [as_parameter(value, not one.frozen) for value, one in zip(values, case.params, strict=True)]
    return run(case, params, grad, **options)


def as_parameter(value: Tensor, requires_grad: bool) -> nn.Parameter:
    """``nn.Parameter(value)``, which for a DTensor begins with ``detach()``; this leaves that out.

    Before that operation torch 2.15 lists all combinations of placements over the axes of the mesh, in each of the threads that
    are ranks here: half a minute for one case on 12 ranks.
    """
    if not isinstance(value, DTensor):
        return nn.Parameter(value, requires_grad=requires_grad)
    value._is_param = True  # type: ignore[attr-defined]
    return value.requires_grad_(requires_grad)  # type: ignore[return-value]


def same(mine: Tensor, wanted: Tensor, what: str) -> None:
    if mine.numel() == wanted.numel() == 0:  # wrappers give empty shards other shapes than torch's own cut
        return
    torch.testing.assert_close(mine, wanted, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def check(case: Case, meshes: Sequence[DeviceMesh], expected: tuple[list[Tensor], list[Tensor | None]], **options: Any) -> Muon:
    """Runs the case on this rank and demands the bits that one device found, cut by torch."""
    found = sharded(case, meshes, **options)
    for k in range(len(case.params)):
        same(found[0][k], local(place(case, meshes, k, expected[0][k])), f"parameter {k}")
        mine, wanted = found[1][k], expected[1][k]
        assert (mine is None) == (wanted is None), f"momentum {k}"
        if mine is not None and wanted is not None:
            same(mine, local(place(case, meshes, k, wanted)), f"momentum {k}")
    return found[2]
