"""The metrics of an optimizer: which steps are measured, what is kept between them, and when the host gets to see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..agree.step_decision import PlanInput, StepDecision
from ..device import Transfers, copy_to, is_staged, known_to_host, stopwatch_for, transfers_for
from ..errors import ConfigError, UnsupportedError
from ..execute import MatrixKey, StepParam
from ..layout import Layout
from ..ortho import scheme_for
from ..params.lr import lr_factor
from ..params.metrics_option import Metrics
from ..params.named_params import NamedParam
from ..plan import NO_WAVE, Plan
from ..torch_compat import local_part
from .packing import PHASES, MatrixColumns, MeasuredMatrices, MeasuredParam, Packing
from .recorder import Indices, StepRecorder
from .report import Measurement, report
from .shards import LocalMatrices, counts_here
from .sums import SquareSums, row_norms
from .weight_vectors import WeightVectors

_DTYPE = torch.float32  # of what is packed


@dataclass(frozen=True, slots=True)
class Clipped:
    """What QK-clip was given in a step."""

    logits: Mapping[Any, Tensor]  # layer → the largest logit of each head; empty without QK-clip
    threshold: float


@dataclass(frozen=True)
class Prepared:
    """What is made when a plan is new."""

    plan: Plan
    packing: Packing
    packed: Tensor
    indices: Indices
    local: tuple[LocalMatrices | None, ...]  # of each parameter of the plan, what this rank counts
    squares: SquareSums  # of the weights and then of the gradients of all ``local``
    adamw_starts: Mapping[int, int]  # index of a parameter → where its numbers begin; −1 if another rank counts it
    vectors: WeightVectors | None


class Meter:
    """Measures every k-th step of an optimizer; one without ``options`` measures nothing.

    At every step the optimizer calls ``begin_step``. It calls ``prepare`` when the plan is new and, if ``is_due``, ``begin``
    before the executor runs and ``finish`` after it. All ranks measure the same steps.

    With ``by_owners`` the owners of matrices see them whole; without, all ranks of their meshes do.
    """

    def __init__(self, options: Metrics | None, *, by_owners: bool = True) -> None:
        self.options = options
        self._by_owners = by_owners
        self._prepared: Prepared | None = None
        self._steps = 0
        self._pending: list[Measurement] = []  # those whose numbers are on their way to the host
        self._latest: dict[str, Any] = {}
        self._transfers: Transfers | None = None
        self._seconds_before: dict[str, float] | None = None  # of the last measured step whose device was done

    def begin_step(self) -> None:
        """Counts a call of ``step()``."""
        self._steps += 1

    def is_due(self, agreed_steps: int) -> bool:
        """Whether this step is measured; ``agreed_steps`` is the same on all ranks."""
        return self.options is not None and agreed_steps % self.options.every == 0

    def refusal(self, params: Sequence[NamedParam]) -> Exception | None:
        """Why these parameters cannot be measured; None if they can, or if nothing is measured."""
        if self.options is None or not params:
            return None
        device = params[0].param.device
        for named in params:
            if is_staged(named.param):
                return UnsupportedError(
                    f"{named.name} is in host memory on a mesh of devices (FSDP2's CPUOffloadPolicy), and metrics would make the "
                    "host wait for the device. Leave out metrics=; or leave out the policy and call "
                    "optimizer.turn_on_cpu_offload(), which keeps the optimizer's state in host memory and measures."
                )
            if named.param.device != device:
                return UnsupportedError(
                    f"{named.name} is on {named.param.device} and {params[0].name} on {device}: metrics are measured on one "
                    "device, without making it wait for another. Leave out metrics=, or put all weights on one device."
                )
        return None

    def prepare(
        self,
        decision: StepDecision,
        params: Sequence[NamedParam],
        plan_inputs: Sequence[PlanInput],
        layouts: Sequence[tuple[Layout, ...]],
    ) -> None:
        """Makes room for the numbers of a plan. The vectors of the weights begin anew.

        All ranks call it at the same steps, also those whose own plan is as it was.
        """
        if self.options is None or not params:
            return
        if self._prepared is not None and self._prepared.plan is decision.plan:
            if self._prepared.vectors is not None:
                self._prepared.vectors.restart()
            return
        plan, rank = decision.plan, decision.rank
        several = decision.exchange is not None
        matrices = []
        for planned, (k, part) in zip(plan.params, decision.planned_parts, strict=True):
            parts = plan_inputs[k].matrix_sets or ()
            name = planned.name if len(parts) == 1 else f"{planned.name}[part {part}]"
            matrix_set, named, scheme = parts[part], params[k], plan_inputs[k].scheme
            assert scheme is not None
            matrices.append(
                MeasuredMatrices(
                    name,
                    named.group_index,
                    planned.count,
                    matrix_set.rows,
                    matrix_set.cols,
                    matrix_set.lr_shape,
                    stacked=bool(planned.stack_dims),
                    shared=several and not planned.private,
                    scheme=scheme_for(scheme, matrix_set.rows, matrix_set.cols, plan_inputs[k].compute_dtype),
                    dtype=str(named.param.dtype).removeprefix("torch."),
                    rounding=named.param_group["rounding"],
                )
            )
        adamw = [
            MeasuredParam(named.name, named.group_index, k, named.param.numel(), shared=several and bool(layouts[k]))
            for k, named in enumerate(params)
            if not named.param_group["use_muon"]
        ]
        ranks = tuple(decision.exchange.ranks) if decision.exchange is not None else (rank,)
        groups = 1 + max(named.group_index for named in params)
        columns = MatrixColumns(self.options.iterations)
        packing = Packing(tuple(matrices), tuple(adamw), ranks, groups, columns, self.options.weight_spectra)
        device = params[0].param.device
        with torch.inference_mode(False), torch.no_grad():
            packed = torch.zeros(packing.size, dtype=_DTYPE, device=device)
            local = tuple(LocalMatrices.of(planned, rank, device) for planned in plan.params)
            vectors = WeightVectors(packing, local, packed[:0]) if packing.vectors else None
        counted = {
            param.index: start if counts_here(layouts[param.index], rank) else -1
            for param, start in zip(packing.adamw, packing.adamw_starts, strict=True)
        }
        indices = Indices(packing, _Reporter(plan, rank, by_owners=self._by_owners), device)
        squares = _squares(packing, local, device)
        self._prepared = Prepared(plan, packing, packed, indices, local, squares, counted, vectors)
        if self._transfers is None:
            self._transfers = transfers_for(device)

    def begin(self, step_params: Sequence[StepParam], decision: StepDecision, *, gradients_here: bool) -> StepRecorder:
        """Measures gradients and weights before the step changes them. Returns what sees the rest of the step.

        ``gradients_here`` is false if the gradients are still to be averaged.
        """
        prepared = self._prepared
        assert prepared is not None
        packing, packed = prepared.packing, prepared.packed
        recorder = StepRecorder(packing, packed, prepared.indices, stopwatch_for(packed.device))
        with torch.inference_mode(False), torch.no_grad(), recorder.phase("metrics"):
            packed.zero_()
            weights: dict[int, Tensor] = {}
            try:
                held = [(k, local) for k, local in enumerate(prepared.local) if local is not None]
                weights = {k: local.cut(local_part(step_params[k].param)) for k, local in held}
                norms = [row_norms(weight) for weight in weights.values()]
                for (k, local), of_weight in zip(held, tuple(norms), strict=True):
                    known = gradients_here and k not in decision.idle
                    gradient = row_norms(local.cut(local_part(step_params[k].grad))) if known else torch.zeros_like(of_weight)
                    norms.append(gradient)
                prepared.squares.write(packed, norms)
            except Exception as error:  # the other ranks wait for the reduction
                recorder.failures.append(error)
            if prepared.vectors is not None:
                prepared.vectors.begin(weights, packed, decision.exchange, recorder.failures.append)
        return recorder

    def adamw_starts(self, indices: Sequence[int]) -> list[int]:
        """Where the numbers of AdamW's parameters begin; −1 for those that another rank counts."""
        assert self._prepared is not None
        return [self._prepared.adamw_starts[k] for k in indices]

    def finish(
        self,
        recorder: StepRecorder,
        decision: StepDecision,
        groups: Sequence[Mapping[str, Any]],
        stepped: AbstractSet[int],
        *,
        skipped: int | Tensor,
        skip_mask: Tensor | None,
        clipped: Clipped,
    ) -> Exception | None:
        """Reduces the numbers over the ranks and sends them to the host, which need not wait. Returns this rank's first error.

        ``stepped`` are the indices of the parameters that had a gradient on some rank.
        """
        prepared, transfers = self._prepared, self._transfers
        assert prepared is not None
        assert transfers is not None
        packing, packed = prepared.packing, prepared.packed
        with torch.inference_mode(False), torch.no_grad(), recorder.phase("metrics"):
            self._write_seconds(recorder, packing, packed, decision.rank)
            if decision.exchange is not None:
                decision.exchange.add_up(packed[packing.reduced])
            try:
                if prepared.vectors is not None:
                    prepared.vectors.finish(packed)
                told = self._told(packing, packed, groups, skipped, skip_mask, clipped.logits)
                host = transfers.host_buffer(told.numel(), _DTYPE)
                transfers.store(host, told)
                stored = transfers.stored()
            except Exception as error:
                recorder.failures.append(error)
                return recorder.failures[0]
        # At most two: one that the host knows before the device is done with the other, if nobody reads.
        self._pending = [
            *self._pending[-1:],
            Measurement(
                step=self._steps,
                packing=packing,
                host=host,
                plan=decision.plan,
                rank=decision.rank,
                idle=frozenset(decision.idle),
                stepped=frozenset(stepped),
                half_iterations=0 if prepared.vectors is None else prepared.vectors.half_iterations,
                factors=_factors(packing, groups),
                rates=[_host_number(group["lr"]) for group in groups[: packing.groups]],
                bytes_sent=recorder.bytes_sent,
                logits={layer: values.numel() for layer, values in clipped.logits.items()},
                threshold=clipped.threshold,
                recorder=recorder,
                stored=stored,
            ),
        ]
        return recorder.failures[0] if recorder.failures else None

    def _write_seconds(self, recorder: StepRecorder, packing: Packing, packed: Tensor, rank: int) -> None:
        """Tells the other ranks the seconds of this one: of this step or, where the device is not done with it, of an earlier."""
        known = (one.seconds() for one in (recorder, *(measurement.recorder for measurement in reversed(self._pending))))
        seconds = next((one for one in known if one is not None), self._seconds_before)
        if seconds is not None:
            first = packing.seconds + packing.ranks.index(rank) * len(PHASES)
            for k, name in enumerate(PHASES):
                packed[first + k].fill_(seconds[name])

    def _told(
        self,
        packing: Packing,
        packed: Tensor,
        groups: Sequence[Mapping[str, Any]],
        skipped: int | Tensor,
        skip_mask: Tensor | None,
        logits: Mapping[Any, Tensor],
    ) -> Tensor:
        """What the host gets to see, in memory of its own."""
        values = [skipped, 0.0 if skip_mask is None else skip_mask, *(group["lr"] for group in groups[: packing.groups])]
        for k, value in enumerate(values):
            place = packed[packing.extras + k]
            if isinstance(value, Tensor) and not known_to_host(value):
                place.copy_(value.reshape(()))
            else:
                place.fill_(float(value))
        told = packed[packing.told]
        return torch.cat([told, *(copy_to(layer, told.device).to(_DTYPE) for layer in logits.values())])

    @torch.no_grad()
    def read(self, *, wait: bool) -> dict[str, Any]:
        """The latest measurement that the host knows; with ``wait``, the latest that was begun. Empty before the first."""
        if self.options is None:
            raise ConfigError("this optimizer measures nothing: build it with metrics=10, to measure every 10th step.")
        if self._transfers is not None and self._pending and wait:
            self._transfers.settle()
        for k in reversed(range(len(self._pending))):
            measurement = self._pending[k]
            if wait or (self._transfers is not None and self._transfers.done(measurement.stored)):
                self._seconds_before = measurement.recorder.seconds() or self._seconds_before
                self._latest = report(measurement)
                del self._pending[: k + 1]
                break
        return self._latest


class _Reporter:
    """Tells whether a rank reports what it finds out about a whole matrix: the first of all that compute it does."""

    def __init__(self, plan: Plan, rank: int, *, by_owners: bool) -> None:
        self._reports: dict[MatrixKey, bool] = {}
        for task in plan.tasks:
            if (task.param, task.matrix) not in self._reports:
                first = task.owner if by_owners and task.wave != NO_WAVE else min(task.sharded.holdings)
                self._reports[task.param, task.matrix] = plan.params[task.param].private or rank == first

    def __call__(self, key: MatrixKey) -> bool:
        return self._reports[key]


def _factors(packing: Packing, groups: Sequence[Mapping[str, Any]]) -> list[float]:
    return [lr_factor(groups[m.group_index]["adjust_lr_fn"], *m.lr_shape) for m in packing.matrices]


def _host_number(value: float | Tensor) -> float | None:
    """A number; None if only a device knows it."""
    return None if isinstance(value, Tensor) and not known_to_host(value) else float(value)


def _squares(packing: Packing, local: Sequence[LocalMatrices | None], device: torch.device) -> SquareSums:
    """Where the squares of the weights and then of the gradients of what this rank counts belong."""
    places, rows = [], []
    for column in (packing.columns.weight, packing.columns.gradient):
        for k, counted in enumerate(local):
            if counted is not None:
                places += [packing.matrix_start((k, number)) + column for number in counted.numbers]
                rows += [counted.row_count] * len(counted.numbers)
    return SquareSums(places, rows, device)
