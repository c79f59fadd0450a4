"""The norm of all gradients of a model, on any mixture of meshes, and clipping by it.

Each rank measures its own parts. Of the ranks that hold the same elements one counts them; the others only report
values that are not finite. One all-reduce of five numbers over the ranks that the parameters' meshes connect then gives
the norm.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .. import errors
from ..agree.differences import Note, raise_failures, raise_mismatch, raise_unequal_replicas
from ..errors import ConfigError, GradientError, KeptError, MeshmuonError, PlanMismatchError
from ..layout import Layout
from ..params.checks import refuse_uninitialised, shown
from ..params.dtensors import ReplicaGroup, as_dtensor, check_gradient_placement, groups_of
from ..torch_compat import mark_overwritten, never_traced
from ..transport import all_gather_objects, norm_device, shared_group, turns_of
from .norms import local_norms, reduce_norm, scale_all
from .replicas import Replicas

_DOUBLE = (torch.float64, torch.complex128)
_WHICH = ("all", "adamw")
_WHAT_TO_CLIP = "Pass model.parameters(), or the optimizer for those that it steps."


@never_traced
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor] | torch.optim.Optimizer,
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_group: ReplicaGroup | None = None,
    which: str = "all",
) -> Tensor:
    """Scales all gradients in place by ``max_norm / (norm + 1e-6)`` if that is below 1; ``norm`` is that of all
    gradients.

    As ``torch.nn.utils.clip_grad_norm_``, for parameters on any mixture of meshes and placements.

    Args:
        parameters: a tensor or tensors whose ``.grad`` is scaled, or an optimizer, which stands for its parameters. All
            ranks that the parameters' meshes connect must call this with the same parameters. Ranks may differ in which
            of them have a gradient.
        max_norm: largest norm that is allowed, a number or a tensor of one element.
        norm_type: p of the p-norm, a positive number or ``inf``.
        error_if_nonfinite: raise GradientError, on all ranks and before anything is written, if the norm is not finite.
            The host then waits for the device.
        foreach: whether to use batched kernels; None uses them where they exist.
        pp_group: process group, or mesh of one axis, of the pipeline stages; the norm is taken over all of them.
        which: ``"all"`` parameters, or those that ``"adamw"`` steps: the norm is then theirs alone, and Muon's
            gradients stay as they are. Only an optimizer knows which these are, so pass the optimizer.

    Returns:
        The norm before clipping: a plain tensor without dims, the same on all ranks.
    """
    if max_norm is None:
        raise ConfigError(
            "max_norm is None; it must be a number of at least 0. total_grad_norm measures without clipping."
        )
    return _GradNorm(_chosen_tensors(parameters, which), norm_type, foreach, pp_group, max_norm).run(
        raises=error_if_nonfinite
    )


@never_traced
@torch.no_grad()
def total_grad_norm(
    parameters: Tensor | Iterable[Tensor] | torch.optim.Optimizer,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_group: ReplicaGroup | None = None,
    which: str = "all",
) -> Tensor:
    """The norm of all gradients together; nothing is scaled. Arguments and result are those of ``clip_grad_norm_``."""
    return _GradNorm(_chosen_tensors(parameters, which), norm_type, foreach, pp_group, None).run(
        raises=error_if_nonfinite
    )


class _GradNorm:
    """One call of ``clip_grad_norm_`` or ``total_grad_norm``.

    Which ranks take part follows from the parameters alone. A rank that fails takes part anyway, so the others do not
    wait for it; they learn of the failure from the all-reduce.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        norm_type: float,
        foreach: bool | None,
        pp_group: ReplicaGroup | None,
        max_norm: float | Tensor | None,
    ) -> None:
        self._params = params
        self._foreach = foreach
        self._replicas = Replicas(self._params)
        self._stage: dist.ProcessGroup | None = None  # of the ranks that the meshes connect
        if len(self._replicas.ranks) > 1:
            existing = (process_group for mesh in self._replicas.slices for process_group in groups_of(mesh))
            self._stage = shared_group(self._replicas.ranks, existing)
        usable = isinstance(pp_group, dist.ProcessGroup) or hasattr(pp_group, "get_all_groups")
        self._pipeline = groups_of(pp_group) if usable else []
        self._max_norm, self._order = max_norm, 2.0
        self._failure = KeptError()  # all ranks learn of it from the all-reduce
        # this rank's part of a gradient, and whether this rank counts its elements
        self._grads: list[tuple[Tensor, bool]] = []
        with self._failure:
            order = _number(norm_type)
            if not order > 0:
                raise ConfigError(f"norm_type={shown(norm_type)} must be a positive number or inf.")
            self._order = order
            self._max_norm = None if max_norm is None else _checked_limit(max_norm)
            self._check_pipeline(pp_group)
            self._grads = self._local_grads()

    def run(self, *, raises: bool) -> Tensor:
        """Returns the norm, and scales the gradients if there is a ``max_norm``. ``raises`` refuses a norm that is
        not finite.
        """
        process_groups = [*([] if self._stage is None else [self._stage]), *self._pipeline]
        try:
            with turns_of(process_groups):
                return self._run(process_groups, raises)
        finally:
            self._failure.take()  # its traceback holds frames that hold this object

    def _run(self, process_groups: Sequence[dist.ProcessGroup], raises: bool) -> Tensor:
        device = norm_device([param.device for param in self._params], process_groups)
        largest = math.isinf(self._order)
        value = nan = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        if not self._failure:
            with self._failure:
                value, nan = (self._largest if largest else self._sum_of_powers)(value)
        flags = float(bool(self._failure)), *self._differences(largest)
        value, nan, unusable = reduce_norm(value, nan, flags, process_groups, largest=largest)
        if device.type == "cpu" or raises:
            if bool(unusable):
                self._raise_together()
        else:
            self._failure.raise_it()  # the other ranks do not wait for their device: their norm is NaN
        double = any(param.dtype in _DOUBLE for param in self._params)
        value = value if largest else value.pow(1 / self._order)
        total = value.masked_fill(nan | unusable, math.nan).to(torch.float64 if double else torch.float32)
        if raises and not bool(total.isfinite()):
            raise GradientError(
                f"the norm of order {self._order} of all gradients is {float(total)}; nothing was changed. Skip the "
                "step, or pass error_if_nonfinite=False to scale by it anyway."
            )
        if self._max_norm is not None:
            self._scale(self._max_norm, total)
        return total

    def _check_pipeline(self, pp_group: ReplicaGroup | None) -> None:
        if pp_group is not None and len(self._pipeline) != 1:
            raise ConfigError(
                f"pp_group={pp_group} must be a process group, or a mesh of one axis, that this rank is on."
            )
        for process_group in self._pipeline:
            both = sorted(set(self._replicas.ranks) & set(dist.get_process_group_ranks(process_group)))
            if both != [self._replicas.rank]:
                raise ConfigError(
                    f"pp_group holds ranks {both}, which the parameters' meshes already connect, so they would be "
                    "counted more "
                    'than once. Pass the group along which pipeline stages differ: pp_group=mesh["pp"].get_group().'
                )

    def _local_grads(self) -> list[tuple[Tensor, bool]]:
        grads = []
        for k, param in enumerate(self._params):
            name, grad = _name(k, param), param.grad
            role = self._replicas.role(name, param)  # raises for unknown placements
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
                grads.append((local, role.counts))
        return grads

    def _sum_of_powers(self, zero: Tensor) -> tuple[Tensor, Tensor]:
        value = zero
        for counts in (True, False):
            parts = [local for local, counts_here in self._grads if counts_here is counts]
            for norms in local_norms(parts, self._order, self._foreach):
                powers = norms.to(zero.device, zero.dtype).pow(self._order)
                # A rank that does not count still reports values that are not finite, so that all ranks do the same.
                value = value + (powers if counts else powers.masked_fill(powers.isfinite(), 0.0)).sum()
        return value, zero

    def _largest(self, zero: Tensor) -> tuple[Tensor, Tensor]:
        batches = local_norms([local for local, _ in self._grads], math.inf, self._foreach)
        norms = torch.cat([zero.reshape(1), *(batch.to(zero.device, zero.dtype) for batch in batches)])
        nan = norms.isnan()
        return norms.masked_fill(nan, 0.0).amax(), nan.any().to(zero.dtype)

    def _differences(self, largest: bool) -> tuple[float, float]:
        """Two numbers whose reduction shows whether ranks were given different parameters, or replicas lack a gradient.

        For a sum, the contributions of all ranks add up to zero if nothing differs: the first rank adds the signature
        as often as the others subtract it, and so does the rank that counts a gradient for its replicas. For a maximum,
        the largest signature must equal the smallest.
        """
        if self._stage is None:
            return 0.0, 0.0
        signature = self._signature()
        if largest:  # every replica is measured, so a missing gradient changes nothing
            return float(signature), -float(signature)
        replicas = self._replicas
        difference = (len(replicas.ranks) - 1) * signature if replicas.rank == replicas.ranks[0] else -signature
        for k, param in enumerate(self._params):
            if param.grad is not None and not self._failure:
                role = replicas.role(_name(k, param), param)
                token = _hash(f"{k} {role.cell}")
                difference += (role.replicas - 1) * token if role.counts else -token if role.replicas > 1 else 0
        return float(difference), 0.0

    def _signature(self) -> int:
        meshes = {mesh: _hash(str([part.ranks for part in slices])) for mesh, slices in self._replicas.slices.items()}
        shapes_and_places: list[tuple[tuple[int, ...], Any]] = []
        for param in self._params:
            sharded = as_dtensor(param)
            place = None if sharded is None else (sharded.placements, meshes[sharded.device_mesh])
            shapes_and_places.append((tuple(param.shape), place))
        return _hash(f"{self._options()} {shapes_and_places}")

    def _options(self) -> str:
        limit = "" if isinstance(self._max_norm, Tensor) else f", max_norm={self._max_norm}"
        return f"norm_type={self._order}{limit}"

    def _raise_together(self) -> NoReturn:
        """Raises the same error on all ranks, which all know that they differ or that one has failed."""
        if self._stage is None and not self._pipeline:
            self._failure.raise_it()
        difference = KeptError()
        with difference:
            self._compare_notes()
        for process_group in self._pipeline:
            texts = all_gather_objects(difference.text, process_group)
            for kind, text in [told for _, told in sorted(texts.items()) if told is not None][:1]:
                difference.error = getattr(errors, kind, MeshmuonError)(text)
        difference.raise_it()
        raise PlanMismatchError(
            "ranks differ in what they clip: pass the same parameters on all ranks, and use one version of meshmuon."
        )

    def _compare_notes(self) -> None:
        """Raises if the ranks of this stage differ, or if one of them has failed."""
        failure = self._failure.text
        if self._stage is None:
            raise_failures({self._replicas.rank: Note(failure)}, self._failure.take())
            return
        params: list[tuple[str, tuple[Layout, ...]]] = []
        if failure is None:
            named = [(_name(k, param), param) for k, param in enumerate(self._params)]
            params = [(name, self._replicas.layouts(name, param)) for name, param in named]
        note = Note(
            failure=failure,
            options=self._options(),
            parameters=tuple((name, " ".join(map(str, layouts))) for name, layouts in params),
            has_grad=tuple(param.grad is not None for param in self._params),
        )
        notes = all_gather_objects(note, self._stage)
        raise_failures(notes, self._failure.take())
        raise_mismatch(notes)
        raise_unequal_replicas({rank: note.has_grad for rank, note in notes.items()}, params)

    def _scale(self, max_norm: float | Tensor, total: Tensor) -> None:
        limit = max_norm.to(total.device, total.dtype) if isinstance(max_norm, Tensor) else max_norm
        # Multiplies even by 1: asking first would make the host wait for the device.
        scale_all([local for local, _ in self._grads], torch.clamp(limit / (total + 1e-6), max=1.0), self._foreach)
        gradients = (as_dtensor(param.grad) for param in self._params if param.grad is not None)
        mark_overwritten([grad for grad in gradients if grad is not None and not grad.is_inference()])


def _chosen_tensors(parameters: Tensor | Iterable[Tensor] | torch.optim.Optimizer, which: str) -> list[Tensor]:
    """The parameters to clip, each once."""
    if which not in _WHICH:
        raise ConfigError(f"which={shown(which)} is unknown; write one of {_WHICH}.")
    # Also of a trainer's wrapper around an optimizer.
    groups = None if isinstance(parameters, type) else getattr(parameters, "param_groups", None)
    if which == "adamw" and (groups is None or not all("use_muon" in group for group in groups)):
        what = "bare parameters do" if groups is None else f"the groups of {type(parameters).__name__} do"
        raise ConfigError(
            f'which="adamw": {what} not say which of them AdamW steps. Pass the optimizer, clip_grad_norm_(optimizer, '
            "max_norm, "
            'which="adamw") with a meshmuon.Muon, or pass just the parameters to clip and leave out which.'
        )
    if groups is not None:
        parameters = [param for group in groups if which == "all" or not group["use_muon"] for param in group["params"]]
    if not isinstance(parameters, Iterable):
        raise ConfigError(f"parameters={shown(parameters)} must be tensors. {_WHAT_TO_CLIP}")
    tensors = [parameters] if isinstance(parameters, Tensor) else list(cast("Iterable[Tensor]", parameters))
    for k, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"parameters must be tensors, got {type(tensor).__name__}. {_WHAT_TO_CLIP}")
        refuse_uninitialised(f"parameter {k}", tensor)
    return list(dict.fromkeys(tensors))


def _checked_limit(max_norm: float | Tensor) -> float | Tensor:
    if isinstance(max_norm, Tensor):
        if max_norm.numel() != 1 or as_dtensor(max_norm) is not None:
            kind = "plain tensor" if as_dtensor(max_norm) is None else "DTensor"
            raise ConfigError(
                f"max_norm must be a number or a plain tensor of one element, got a {kind} of shape "
                f"{tuple(max_norm.shape)}."
            )
        if max_norm.device.type != "cpu":  # not checked: the host would wait for the device
            return max_norm.reshape(())
    limit = _number(max_norm)
    if not limit >= 0:
        raise ConfigError(f"max_norm={shown(max_norm)} must be a number of at least 0.")
    return limit


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _name(k: int, param: Tensor) -> str:
    return f"parameter {k} of shape {tuple(param.shape)}"


def _hash(text: str) -> int:
    """A positive number that is small enough for the sum of many to be exact in float64."""
    return zlib.crc32(text.encode()) % 1048573 + 1
