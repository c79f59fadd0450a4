"""What a step looks at before anything is written: the records of all parameters, options, gradients and state."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..agree.state_presence import has_all_state
from ..device import known_to_host
from ..errors import ConfigError, GradientError, KeptError
from ..execute import CommDtypeLike
from ..params.dtensors import check_cuts, check_gradient_placement, check_memory
from ..params.groups import check_options, check_overflow, check_rounding, largest_number
from ..params.option_table import ParamGroup
from ..params.param_record import GroupRecipe, ParamIndex, ParamRecord
from ..state import param_state
from ..torch_compat import SHARD_METADATA, has_local_part, local_part, zeros_like

_METADATA = operator.attrgetter("shape", "dtype", "device")
_ACTIVITY, _ASLEEP = operator.attrgetter("requires_grad", "grad"), (False, None)

States = Mapping[Tensor, dict[str, Any]]
"""``optimizer.state``."""


class Collector:
    """Looks at parameters, options, gradients and state. What has not changed since the last step is not looked at
    again.

    A step calls ``inspect`` and then ``check``. Parameters travel in ``comm_dtype``, None for the default, or in their
    own dtype.

    A parameter that is frozen and has neither a gradient nor state sleeps: plans and other ranks know nothing of it.
    Once awake it stays so: alternating ``requires_grad`` would else make new plans all the time.

    Attributes:
        records: all parameters that are awake, param group by param group.
        all_records: behind them those that sleep, without matrices: QK-clip looks for pairs, of which one may be
            frozen.
        gpu: on which matrices of this rank are orthogonalised; None if that is no GPU.
        has_grad: which of them have a gradient; the same object for as long as they are equal.
        lacking_state: parameters that lack state, or a part of it, since the state last changed.
        without_state: those of them that had a gradient at the last check.
    """

    def __init__(self, comm_dtype: CommDtypeLike, *, in_own_dtype: bool = False) -> None:
        self.records: tuple[ParamRecord, ...] = ()
        self.all_records: tuple[ParamRecord, ...] = ()
        self.gpu: torch.device | None = None
        self.has_grad: tuple[bool, ...] = ()
        self.lacking_state: list[ParamIndex] = []
        self.without_state: tuple[ParamIndex, ...] = ()
        self._comm_dtype, self._in_own_dtype = comm_dtype, in_own_dtype
        self._recipes: list[GroupRecipe] = []
        self._snapshot: Snapshot | None = None
        # For ``check_overflow``: group index, outputs and inputs of a matrix (None for AdamW), largest number of its
        # dtype.
        self._shapes: dict[tuple[int, tuple[int, int] | None, float], None] = {}
        self._unchecked_state: set[int] = set()  # parameters that had no gradient since their state changed
        self._checked_has_grad: tuple[bool, ...] = ()  # ``has_grad`` at the last check

    def inspect(
        self, groups: Sequence[ParamGroup], states: States, failure: KeptError, *, prepares: bool = False
    ) -> None:
        """Brings records and gradients up to date, and keeps the first error that prevents planning in ``failure``.

        With ``prepares``, every parameter that trains counts as one with a gradient.

        A param group with invalid options still yields records, from metadata alone: this rank needs them to find the
        other ranks, which must learn of its failure.
        """
        recipes = [GroupRecipe()] * len(groups)
        for index, group in enumerate(groups):
            with failure:
                check_options(group, index)
                recipes[index] = GroupRecipe.of(group)
        if recipes != self._recipes:
            self._recipes = recipes
            self._snapshot = None
        if failure or self._snapshot is None or not self._snapshot.still_holds(groups):
            with failure:  # a param group may have lost its parameters
                self._make_records(groups, states, failure)
            params = [record.param for record in self.all_records]
            self._snapshot = None if failure else Snapshot(groups, params, len(self.records))
        params = [record.param for record in self.records]
        has_grad = tuple([param.grad is not None or (prepares and param.requires_grad) for param in params])
        if has_grad != self.has_grad:
            self.has_grad = has_grad

    def _make_records(self, groups: Sequence[ParamGroup], states: States, failure: KeptError) -> None:
        records, awake = list[ParamRecord](), {id(record.param) for record in self.records}
        asleep: list[ParamRecord] = []
        for index, (group, recipe) in enumerate(zip(groups, self._recipes, strict=True)):
            if len(group["param_names"]) != len(group["params"]):
                failure.keep(
                    ConfigError(
                        f"group {index} has {len(group['params'])} params but {len(group['param_names'])} names: give "
                        "each parameter its own name. If a wrapper has replaced the parameters by flat buffers "
                        "(DeepSpeed ZeRO, FSDP1), shard the model with FSDP2 instead "
                        "(torch.distributed.fsdp.fully_shard)."
                    )
                )
            for name, param in zip(group["param_names"], group["params"], strict=False):
                if not (param.requires_grad or param.grad is not None or id(param) in awake or states.get(param)):
                    asleep.append(ParamRecord.of(name, param, index, group, GroupRecipe()))
                    continue
                comm_dtype = param.dtype if self._in_own_dtype else self._comm_dtype
                record = ParamRecord.of(name, param, index, group, GroupRecipe(), comm_dtype)
                with failure:
                    check_cuts(name, param)
                    check_memory(name, param)
                    check_rounding(name, param, recipe.rounding)
                    record = ParamRecord.of(name, param, index, group, recipe, comm_dtype)
                records.append(record)
        self.records, self.all_records = tuple(records), (*records, *asleep)
        self.gpu = next((record.work_device for record in records if record.work_device.type == "cuda"), None)
        self._shapes = dict.fromkeys(
            (record.group_index, shape, largest_number(record.update_dtype))
            for record in records
            for shape in ([None] if record.matrix_sets is None else [part.lr_shape for part in record.matrix_sets])
        )

    def check(self, groups: Sequence[ParamGroup], states: States) -> bool:
        """Refuses options, gradients and state that a step cannot use. Writes nothing.

        Returns whether the state consists of the very tensors of the last step, and is complete.
        """
        for index, shape, largest in self._shapes:
            check_overflow(groups[index], f"group {index}", shape, largest)  # calls the user's adjust_lr_fn
        for record in self.records:
            if (grad := record.param.grad) is not None:
                _check_gradient(record.name, record.param, grad)
        snapshot = self._snapshot
        assert snapshot is not None
        same_state = snapshot.same_state(states)
        if not same_state:
            self._unchecked_state = set(range(len(self.records)))
            lacking = (
                k for k, record in enumerate(self.records) if not has_all_state(states.get(record.param), record)
            )
            self.lacking_state = list(map(ParamIndex, lacking))
        if not same_state or self.has_grad is not self._checked_has_grad:
            for k in sorted(k for k in self._unchecked_state if self.has_grad[k]):
                record = self.records[k]
                if (entry := states.get(record.param)) is not None:
                    param_state.check_current(record.name, record.param, entry, record.param_group)
                self._unchecked_state.remove(k)
            if not same_state:
                snapshot.accept_state(states)
            self.without_state = tuple(k for k in self.lacking_state if self.has_grad[k])
            self._checked_has_grad = self.has_grad
        return same_state and not self.without_state

    def forget(self) -> None:
        """Makes the next step look at everything again: a state was loaded, and parameters that have one are awake."""
        self.records, self._snapshot = (), None

    def invalidate_state(self) -> None:
        if self._snapshot is not None:
            self._snapshot.forget_state()


class Snapshot:
    """Param groups, their parameters and state as a step found them. Comparing tells cheaply whether anything has
    changed.

    A comparison takes a fraction of a microsecond per parameter. The metadata of each parameter are read, compared and
    dropped before those of the next one: lists of a hundred thousand tuples would trigger Python's garbage collector,
    which takes as long as the rest of the step. Tensors of the state are not kept alive. Of parameters that sleep, it
    asks only whether they still do, without a call in Python for each.
    """

    def __init__(self, groups: Sequence[ParamGroup], params: Sequence[Tensor], awake: int) -> None:
        self._groups = [(group, list(group["params"]), list(group["param_names"])) for group in groups]
        self._params, self._asleep = params[:awake], params[awake:]
        self._metadata_getters = [SHARD_METADATA if has_local_part(param) else _METADATA for param in self._params]
        self._metadata = list(self._metadata_now())
        self._state_keys: list[tuple[str, ...]] | None = None  # of the state that was accepted
        self._state_tensors: list[weakref.ref[Tensor]] = []

    def still_holds(self, groups: Sequence[ParamGroup]) -> bool:
        return (
            len(groups) == len(self._groups)
            and all(
                now is group
                and len(now["params"]) == len(params)
                and all(map(operator.is_, now["params"], params))
                and now["param_names"] == names
                for now, (group, params, names) in zip(groups, self._groups, strict=True)
            )
            and all(map(operator.eq, self._metadata_now(), self._metadata))
            and all(map(_ASLEEP.__eq__, map(_ACTIVITY, self._asleep)))
        )

    def same_state(self, states: States) -> bool:
        """Whether the state consists of the very tensors that were accepted."""
        if self._state_keys is None:
            return False
        entries, tensors = self._state_now(states)
        return (
            all(map(operator.eq, map(tuple, entries), self._state_keys))
            and len(tensors) == len(self._state_tensors)
            and all(tensor is accepted() for tensor, accepted in zip(tensors, self._state_tensors, strict=True))
        )

    def accept_state(self, states: States) -> None:
        """Keeps which tensors the present state has. The caller has checked them."""
        entries, tensors = self._state_now(states)
        self._state_keys, self._state_tensors = list(map(tuple, entries)), list(map(weakref.ref, tensors))

    def forget_state(self) -> None:
        self._state_keys, self._state_tensors = None, []

    def _state_now(self, states: States) -> tuple[list[dict[str, Any]], list[Tensor]]:
        entries = [states.get(param, {}) for param in self._params]
        return entries, [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]

    def _metadata_now(self) -> Iterator[Any]:
        return (metadata(param) for metadata, param in zip(self._metadata_getters, self._params, strict=True))


def gradient_of(param: Tensor) -> Tensor:
    """The parameter's gradient, or zeros where only other ranks have one."""
    return zeros_like(param) if param.grad is None else param.grad


def _check_gradient(name: str, param: Tensor, grad: Tensor) -> None:
    if grad.shape != param.shape:
        raise GradientError(
            f"{name} has shape {tuple(param.shape)}, its gradient {tuple(grad.shape)}: call zero_grad() after resizing."
        )
    check_gradient_placement(name, param, grad)
    if grad.layout != torch.strided:
        raise GradientError(
            f"{name} has a sparse gradient ({grad.layout}). Neither Muon nor fused AdamW supports one: "
            "build the embedding with sparse=False, or call param.grad = param.grad.to_dense() before step()."
        )
    if grad.is_complex():
        raise GradientError(
            f"{name} has a complex gradient ({grad.dtype}). Optimize the real view: torch.view_as_real(param)."
        )


def only_creates_state(groups: Sequence[ParamGroup]) -> bool:
    """Whether a first step has nothing to do but create state: every lr is 0, and so is every gradient."""
    rates = [group["lr"] for group in groups]
    if any((isinstance(lr, Tensor) and not known_to_host(lr)) or lr != 0 for lr in rates):
        return False
    gradients = [param.grad for group in groups for param in group["params"] if param.grad is not None]
    return not any(bool(local_part(grad).count_nonzero()) for grad in gradients)
