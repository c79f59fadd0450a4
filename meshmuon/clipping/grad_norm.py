"""The norm of all gradients of a model, on whatever meshes they lie, and clipping by it.

Each rank measures its own parts. Of the ranks that hold the same elements one counts them; the others only report what is not
finite. One all-reduce of five numbers over the ranks that the parameters' meshes connect makes the norm.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .. import errors
from ..agree.differences import Note, raise_failures, raise_mismatch, raise_torn_replicas
from ..errors import ConfigError, GradientError, MeshmuonError, PlanMismatchError
from ..layout import Layout, Mesh, Replicated
from ..params.dtensors import (
    ReplicaGroup,
    as_dtensor,
    check_gradient_placement,
    connected_ranks,
    groups_of,
    known_placements,
    replicated_layout,
    siblings,
)
from ..torch_compat import mark_overwritten
from ..transport import NormWord, everyone, host_group, norm_device, reduce_norm, shared_group
from .norms import local_norms, scale_all

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["clip_grad_norm_", "total_grad_norm"]

_DOUBLE = (torch.float64, torch.complex128)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_group: ReplicaGroup | None = None,
) -> Tensor:
    """Scales all gradients in place by ``max_norm / (norm + 1e-6)`` if that is below 1, ``norm`` being that of all together.

    As ``torch.nn.utils.clip_grad_norm_``, for parameters on any mixture of meshes and placements.

    Args:
        parameters: a tensor, or tensors, whose ``.grad`` is to be scaled. All ranks that the parameters' meshes connect must call
            this with the same parameters; which of them have a gradient may differ.
        max_norm: largest norm to allow, a number or a tensor of one element.
        norm_type: p of the p-norm, a positive number or ``inf``.
        error_if_nonfinite: raise GradientError, on all ranks and before anything is written, if the norm is not finite. It makes
            the host wait for the device.
        foreach: whether to use batched kernels; None means where they exist.
        pp_group: process group, or mesh of one axis, over which the other pipeline stages are; norms add up over it.

    Returns:
        The norm before clipping: a plain tensor without dims, the same on all ranks.
    """
    return _Clipping(parameters, norm_type, foreach, pp_group, max_norm).run(raises=error_if_nonfinite)


@torch.no_grad()
def total_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_group: ReplicaGroup | None = None,
) -> Tensor:
    """The norm of all gradients together, as ``clip_grad_norm_`` finds it; nothing is scaled.

    Args:
        parameters: a tensor, or tensors, whose ``.grad`` is measured; the same on all ranks that their meshes connect.
        norm_type: p of the p-norm, a positive number or ``inf``.
        error_if_nonfinite: raise GradientError on all ranks if the norm is not finite.
        foreach: whether to use batched kernels; None means where they exist.
        pp_group: process group, or mesh of one axis, over which the other pipeline stages are; norms add up over it.

    Returns:
        A plain tensor without dims, the same on all ranks.
    """
    return _Clipping(parameters, norm_type, foreach, pp_group, None).run(raises=error_if_nonfinite)


@dataclass(frozen=True, slots=True)
class _Seat:
    """A rank's place among the holders of a parameter.

    Attributes:
        counts: whether it is the one that counts its elements.
        replicas: how many ranks hold the same elements.
        cell: which elements they are, by coordinates on the axes that cut the parameter.
    """

    counts: bool
    replicas: int
    cell: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """What this rank holds of a gradient."""

    local: Tensor
    counts: bool


class _Clipping:
    """One call: who takes part follows from the parameters alone, so that no fact of one rank keeps the others waiting."""

    def __init__(
        self,
        parameters: Tensor | Iterable[Tensor],
        norm_type: float,
        foreach: bool | None,
        pp_group: ReplicaGroup | None,
        max_norm: float | Tensor | None,
    ) -> None:
        self._params = _tensors(parameters)
        self._foreach = foreach
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        meshes = dict.fromkeys(one.device_mesh for param in self._params if (one := as_dtensor(param)) is not None)
        self._meshes: dict[DeviceMesh, tuple[Mesh, ...]] = {mesh: siblings(mesh) for mesh in meshes}
        self._ranks = connected_ranks(self._rank, (mesh.ranks for alike in self._meshes.values() for mesh in alike))
        self._stage: dist.ProcessGroup | None = None
        if len(self._ranks) > 1:
            self._stage = shared_group(self._ranks, [group for mesh in meshes for group in groups_of(mesh)])
        usable = isinstance(pp_group, dist.ProcessGroup) or hasattr(pp_group, "get_all_groups")
        self._pipeline = groups_of(pp_group) if usable else []
        self._seats: dict[tuple[DeviceMesh | None, tuple[Any, ...]], _Seat] = {}
        self._max_norm, self._order = max_norm, 2.0
        self._failure: Exception | None = None
        self._parts: list[_Part] = []
        try:
            self._order = _checked_order(norm_type)
            self._max_norm = None if max_norm is None else _checked_limit(max_norm)
            self._check_pipeline(pp_group)
            self._parts = self._own_parts()
        except Exception as error:  # heard of by all ranks, once they meet
            self._failure = error

    def run(self, *, raises: bool) -> Tensor:
        """The norm; gradients are scaled by it if there is a largest one. With ``raises`` it must be finite."""
        try:
            return self._run(raises)
        finally:
            self._failure = None  # which knows the frames that know this object

    def _run(self, raises: bool) -> Tensor:
        groups = [*([] if self._stage is None else [self._stage]), *self._pipeline]
        device = norm_device([param.device for param in self._params], groups)
        found = reduce_norm(self._word(device), groups, largest=math.isinf(self._order))
        if device.type == "cpu" or raises:
            if bool(found.unusable):
                self._raise_together()
        elif self._failure is not None:
            raise self._failure  # the other ranks, which do not wait for their device, find NaN
        double = any(param.dtype in _DOUBLE for param in self._params)
        value = found.value if math.isinf(self._order) else found.value.pow(1 / self._order)
        total = value.masked_fill(found.nan | found.unusable, math.nan).to(torch.float64 if double else torch.float32)
        if raises and not bool(total.isfinite()):
            raise GradientError(
                f"the norm of order {self._order} of all gradients is {float(total)}; nothing was changed. Skip the step, or "
                "pass error_if_nonfinite=False to scale by it nevertheless."
            )
        if self._max_norm is not None:
            self._scale(self._max_norm, total)
        return total

    def _check_pipeline(self, pp_group: ReplicaGroup | None) -> None:
        if pp_group is not None and len(self._pipeline) != 1:
            raise ConfigError(f"pp_group={pp_group} must be a process group, or a mesh of one axis, that this rank is on.")
        for group in self._pipeline:
            both = sorted(set(self._ranks) & set(dist.get_process_group_ranks(group)))
            if both != [self._rank]:
                raise ConfigError(
                    f"pp_group holds ranks {both}, which the parameters' meshes connect already and would count more than once. "
                    'Pass the group along which pipeline stages differ: pp_group=mesh["pp"].get_group().'
                )

    def _own_parts(self) -> list[_Part]:
        parts = []
        for k, param in enumerate(self._params):
            name, grad = _name(k, param), param.grad
            if (sharded := as_dtensor(param)) is not None:
                known_placements(name, sharded.placements, param.dim())  # refuses what it does not know
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise GradientError(
                    f"{name} has a gradient of layout {grad.layout}, which is not supported: build the embedding with "
                    "sparse=False, or call p.grad = p.grad.to_dense()."
                )
            check_gradient_placement(name, param, grad)
            gradient = as_dtensor(grad)
            local = grad if gradient is None else gradient.to_local()
            if local.numel():
                parts.append(_Part(local, self._seat(param).counts))
        return parts

    def _seat(self, param: Tensor) -> _Seat:
        sharded = as_dtensor(param)
        key = (None, ()) if sharded is None else (sharded.device_mesh, sharded.placements)
        if key not in self._seats:
            self._seats[key] = self._new_seat(*key)
        return self._seats[key]

    def _new_seat(self, mesh: DeviceMesh | None, placements: tuple[Any, ...]) -> _Seat:
        if mesh is None:
            return _Seat(self._rank == self._ranks[0], len(self._ranks), ())
        where = mesh.get_coordinate()
        if where is None:
            return _Seat(False, 1, ())
        alike = self._connected(mesh)
        same = [axis for axis, one in enumerate(placements) if one.is_replicate()]
        return _Seat(
            counts=self._rank in alike[0].ranks and not any(where[axis] for axis in same),
            replicas=len(alike) * math.prod(mesh.shape[axis] for axis in same),
            cell=tuple(place for axis, place in enumerate(where) if axis not in same),
        )

    def _connected(self, mesh: DeviceMesh) -> list[Mesh]:
        """The mesh and the slices like it, which hold the same; those of other pipeline stages are not connected."""
        return [one for one in self._meshes[mesh] if one.ranks[0] in self._ranks]

    def _word(self, device: torch.device) -> NormWord:
        """What this rank contributes."""
        largest = math.isinf(self._order)
        value = nan = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        if self._failure is None:
            try:
                value, nan = (self._largest if largest else self._sum)(value)
            except Exception as error:
                self._failure = error
        return NormWord(value, nan, self._failure is not None, *self._differences(largest))

    def _sum(self, zero: Tensor) -> tuple[Tensor, Tensor]:
        value = zero
        for counts in (True, False):
            mine = [part.local for part in self._parts if part.counts is counts]
            for norms in local_norms(mine, self._order, self._foreach):
                powers = norms.to(zero.device, zero.dtype).pow(self._order)
                # Who does not count reports what is not finite: all ranks must then do the same.
                value = value + (powers if counts else powers.masked_fill(powers.isfinite(), 0.0)).sum()
        return value, zero

    def _largest(self, zero: Tensor) -> tuple[Tensor, Tensor]:
        found = local_norms([part.local for part in self._parts], math.inf, self._foreach)
        norms = torch.cat([zero.reshape(1), *(one.to(zero.device, zero.dtype) for one in found)])
        nan = norms.isnan()
        return norms.masked_fill(nan, 0.0).amax(), nan.any().to(zero.dtype)

    def _differences(self, largest: bool) -> tuple[float, float]:
        """Two numbers that show, once reduced, whether ranks were given the same, and replicas all a gradient or none."""
        if self._stage is None:
            return 0.0, 0.0
        signature = self._signature()
        if largest:  # looks at every replica, so that nothing is missed if one has no gradient
            return float(signature), -float(signature)
        difference = (len(self._ranks) - 1) * signature if self._rank == self._ranks[0] else -signature
        for k, param in enumerate(self._params):
            if param.grad is not None and self._failure is None:
                seat = self._seat(param)
                token = _hash(f"{k} {seat.cell}")
                difference += (seat.replicas - 1) * token if seat.counts else -token if seat.replicas > 1 else 0
        return float(difference), 0.0

    def _signature(self) -> int:
        meshes = {mesh: _hash(str([one.ranks for one in alike])) for mesh, alike in self._meshes.items()}
        places = (
            None if (one := as_dtensor(param)) is None else (one.placements, meshes[one.device_mesh]) for param in self._params
        )
        return _hash(f"{self._options()} {[(tuple(p.shape), place) for p, place in zip(self._params, places, strict=True)]}")

    def _options(self) -> str:
        limit = "" if isinstance(self._max_norm, Tensor) else f", max_norm={self._max_norm}"
        return f"norm_type={self._order}{limit}"

    def _raise_together(self) -> NoReturn:
        """Ranks differ or one has failed, and all of them know: the same error on each."""
        if self._stage is None and not self._pipeline and self._failure is not None:
            raise self._failure
        found: Exception | None = None
        try:
            self._compare_notes()
        except Exception as error:
            found = error
        for group in self._pipeline:
            shown = everyone(None if found is None else (type(found).__name__, str(found)), host_group(group))
            for kind, text in [said for _, said in sorted(shown.items()) if said is not None][:1]:
                found = getattr(errors, kind, MeshmuonError)(text)
        try:
            raise found or PlanMismatchError(
                "ranks differ in what they clip: give all the same parameters and the same meshmuon."
            )
        finally:
            del found  # the error knows this frame: knowing each other, they would keep process groups alive past their end

    def _compare_notes(self) -> None:
        """Raises what is wrong with the ranks of this stage, if anything is."""
        failure = None if self._failure is None else (type(self._failure).__name__, str(self._failure))
        if self._stage is None:
            raise_failures({self._rank: Note(failure)}, self._failure)
            return
        layouts = [] if failure else [self._merged(k, param) for k, param in enumerate(self._params)]
        note = Note(
            failure=failure,
            options=self._options(),
            parameters=tuple((name, " ".join(map(str, found))) for name, found in layouts),
            active=tuple(param.grad is not None for param in self._params),
        )
        notes = everyone(note, host_group(self._stage))
        raise_failures(notes, self._failure)
        raise_mismatch(notes)
        raise_torn_replicas({rank: one.active for rank, one in notes.items()}, layouts)

    def _merged(self, k: int, param: Tensor) -> tuple[str, tuple[Layout, ...]]:
        """A parameter's name and its layout, slices of one mesh being one more axis along which it is replicated."""
        name, shape, sharded = _name(k, param), tuple(param.shape), as_dtensor(param)
        if sharded is None:
            return name, (replicated_layout(shape, self._ranks),)
        alike = self._connected(sharded.device_mesh)
        if not alike:
            return name, ()
        mesh = Mesh((len(alike), *alike[0].shape), tuple(rank for one in alike for rank in one.ranks))
        return name, (Layout(shape, mesh, (Replicated(), *known_placements(name, sharded.placements, len(shape)))),)

    def _scale(self, max_norm: float | Tensor, total: Tensor) -> None:
        limit = max_norm.to(total.device, total.dtype) if isinstance(max_norm, Tensor) else max_norm
        # Always multiplied, also by 1: to ask first would make the host wait for the device.
        scale_all([part.local for part in self._parts], torch.clamp(limit / (total + 1e-6), max=1.0), self._foreach)
        gradients = (as_dtensor(param.grad) for param in self._params if param.grad is not None)
        mark_overwritten([grad for grad in gradients if grad is not None and not grad.is_inference()])


def _tensors(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """The parameters, each once."""
    found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for one in found:
        if not isinstance(one, Tensor):
            raise ConfigError(
                f"parameters must be tensors, got {type(one).__name__}. Pass model.parameters(), or those of an optimizer: "
                '(p for group in optimizer.param_groups for p in group["params"]).'
            )
    return list(dict.fromkeys(found))


def _checked_order(norm_type: float) -> float:
    order = _number(norm_type)
    if not order > 0:
        raise ConfigError(f"norm_type={norm_type!r} must be a positive number or inf.")
    return order


def _checked_limit(max_norm: float | Tensor) -> float | Tensor:
    if isinstance(max_norm, Tensor):
        if max_norm.numel() != 1 or as_dtensor(max_norm) is not None:
            kind = "plain tensor" if as_dtensor(max_norm) is None else "DTensor"
            raise ConfigError(
                f"max_norm must be a number or a plain tensor of one element, got a {kind} of shape {tuple(max_norm.shape)}."
            )
        if max_norm.device.type != "cpu":  # not looked into: the host would wait for the device
            return max_norm.reshape(())
    limit = _number(max_norm)
    if not limit >= 0:
        raise ConfigError(f"max_norm={max_norm!r} must be a number that is not negative.")
    return limit


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _name(k: int, param: Tensor) -> str:
    return f"parameter {k} of shape {tuple(param.shape)}"


def _hash(text: str) -> int:
    """A number from 1 on, small enough for the sum of many to be exact in float64."""
    return zlib.crc32(text.encode()) % 1048573 + 1
