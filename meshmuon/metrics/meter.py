"""The metrics of an optimizer: which steps are measured, what is kept between them, and when the host gets to see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..agree.step_decision import StepDecision
from ..device import Transfers, copy_to, is_staged, known_to_host, stopwatch_for, transfers_for
from ..errors import ConfigError, UnsupportedError
from ..execute import MatrixKey, StepParam
from ..layout import Layout
from ..ortho import scheme_for
from ..params.lr import lr_factor
from ..params.metrics_option import Metrics
from ..params.param_record import ParamRecord
from ..plan import NO_WAVE, Plan
from ..torch_compat import local_part
from .numbers import DTYPE, PHASES, Column, Measured, Numbers
from .recorder import StepRecorder
from .report import Measurement, report
from .shards import LocalMatrices, counts_here
from .spectra import squares
from .weight_vectors import WeightVectors


@dataclass(frozen=True, slots=True)
class Clipped:
    """What QK-clip was given in a step."""

    logits: Mapping[Any, Tensor]  # layer → the largest logit of each head; empty without QK-clip
    threshold: float


@dataclass(frozen=True)
class Prepared:
    """What is made when a plan is new."""

    plan: Plan
    numbers: Numbers
    local: Mapping[int, LocalMatrices]  # index of a parameter of the plan → what this rank counts of it
    local_rows: Tensor  # the rows of all ``local``
    adamw_rows: Mapping[int, int | None]  # index of a parameter → its row; None if another rank counts it
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

    def refusal(self, params: Sequence[ParamRecord]) -> Exception | None:
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
        params: Sequence[ParamRecord],
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
        measured = []
        for index, (planned, (k, part)) in enumerate(zip(plan.params, decision.planned_parts, strict=True)):
            named, parts = params[k], params[k].matrix_sets or ()
            matrix_set = parts[part]
            assert named.scheme is not None
            measured.append(
                Measured(
                    planned.name if len(parts) == 1 else f"{planned.name}[part {part}]",
                    named.group_index,
                    index,
                    shared=several and not planned.private,
                    elements=matrix_set.rows * matrix_set.cols,
                    muon=True,
                    matrices=matrix_set,
                    scheme=scheme_for(named.scheme, matrix_set.rows, matrix_set.cols, named.compute_dtype),
                    dtype=str(named.param.dtype).removeprefix("torch."),
                    rounding=named.param_group["rounding"],
                )
            )
        adamw = {k: named for k, named in enumerate(params) if not named.param_group["use_muon"]}
        for index, named in adamw.items():
            shared = several and bool(layouts[index])
            measured.append(Measured(named.name, named.group_index, index, shared=shared, elements=named.param.numel()))
        ranks = decision.exchange.ranks if decision.exchange is not None else (rank,)
        device = params[0].param.device
        with torch.inference_mode(False), torch.no_grad():
            numbers = Numbers(measured, ranks, self.options, self._reported(plan, rank), device)
            of_params = {k: LocalMatrices.of(planned, rank, device) for k, planned in enumerate(plan.params)}
            local = {k: matrices for k, matrices in of_params.items() if matrices is not None}
            local_rows = numbers.indices([numbers.first_rows[k] + n for k, matrices in local.items() for n in matrices.numbers])
            vectors = WeightVectors(numbers, local) if self.options.weight_spectra else None
        adamw_rows = dict(zip(adamw, numbers.first_rows[len(plan.params) :], strict=True))
        counted = {k: row if counts_here(layouts[k], rank) else None for k, row in adamw_rows.items()}
        self._prepared = Prepared(plan, numbers, local, local_rows, counted, vectors)
        if self._transfers is None:
            self._transfers = transfers_for(device)

    def _reported(self, plan: Plan, rank: int) -> dict[MatrixKey, bool]:
        """Whether this rank reports what it finds out about a whole matrix: the first of all that compute it does."""
        reported: dict[MatrixKey, bool] = {}
        for task in plan.tasks:
            if (task.param, task.matrix) not in reported:
                first = task.owner if self._by_owners and task.wave != NO_WAVE else min(task.sharded.holdings)
                reported[task.param, task.matrix] = plan.params[task.param].private or rank == first
        return reported

    def discard(self) -> None:
        """Gives up what was made for a plan; what was measured stays."""
        self._prepared = None

    def begin(self, step_params: Sequence[StepParam], decision: StepDecision, *, gradients_here: bool) -> StepRecorder:
        """Measures gradients and weights before the step changes them. Returns what sees the rest of the step.

        ``gradients_here`` is false if the gradients are still to be averaged.
        """
        prepared = self._prepared
        assert prepared is not None
        numbers = prepared.numbers
        recorder = StepRecorder(numbers, prepared.adamw_rows, stopwatch_for(numbers.packed.device))
        weights: dict[int, Tensor] = {}
        with torch.inference_mode(False), torch.no_grad(), recorder.phase("metrics"):
            numbers.packed.zero_()
            with recorder.failure:
                weights = {k: local.cut(local_part(step_params[k].param)) for k, local in prepared.local.items()}
                of_weights = [squares(weight) for weight in weights.values()]
                of_gradients = [
                    squares(local.cut(local_part(step_params[k].grad)))
                    if gradients_here and k not in decision.idle
                    else torch.zeros_like(of_weight)
                    for (k, local), of_weight in zip(prepared.local.items(), of_weights, strict=True)
                ]
                if weights:
                    both = torch.stack([torch.cat(of_gradients), torch.cat(of_weights)], dim=1)
                    numbers.write(prepared.local_rows, Column.GRADIENT, both)
            if prepared.vectors is not None:
                prepared.vectors.begin(weights, decision.exchange, recorder.failure)
        return recorder

    def finish(
        self,
        recorder: StepRecorder,
        decision: StepDecision,
        groups: Sequence[Mapping[str, Any]],
        *,
        skipped: int | Tensor,
        skip_mask: Tensor | None,
        clipped: Clipped,
    ) -> Exception | None:
        """Reduces the numbers over the ranks and sends them to the host, which need not wait. Returns this rank's first error."""
        prepared, transfers = self._prepared, self._transfers
        assert prepared is not None
        assert transfers is not None
        numbers = prepared.numbers
        scalars = {"skipped steps": skipped, "skipped": 0.0 if skip_mask is None else skip_mask}
        scalars |= {f"lr {k}": group["lr"] for k, group in enumerate(groups)}
        on_device = {name: value for name, value in scalars.items() if isinstance(value, Tensor) and not known_to_host(value)}
        with recorder.phase("metrics"), torch.inference_mode(False), torch.no_grad():
            self._write_seconds(recorder, numbers, decision.rank)
            if decision.exchange is not None:
                decision.exchange.add_up(numbers.reduced)
            with recorder.failure:
                if prepared.vectors is not None:
                    prepared.vectors.finish()
                told = {"table": numbers.table, "seconds": numbers.seconds, **on_device}
                told |= {
                    f"logits {k}": copy_to(logits, numbers.packed.device) for k, logits in enumerate(clipped.logits.values())
                }
                packed = torch.cat([value.reshape(-1).to(DTYPE) for value in told.values()])  # in memory of its own
                host = transfers.host_buffer(packed.numel(), DTYPE)
                transfers.store(host, packed)
                stored = transfers.stored()
                parts = torch.split(host, [value.numel() for value in told.values()])
                # At most two: one that the host knows before the device is done with the other, if nobody reads.
                self._pending = [
                    *self._pending[-1:],
                    Measurement(
                        step=self._steps,
                        numbers=numbers,
                        told={name: part.view(value.shape) for (name, value), part in zip(told.items(), parts, strict=True)},
                        known={name: float(value) for name, value in scalars.items() if name not in on_device},
                        layers=[str(layer) for layer in clipped.logits],
                        threshold=clipped.threshold,
                        plan=decision.plan,
                        idle=frozenset(decision.idle),
                        half_iterations=0 if prepared.vectors is None else prepared.vectors.half_iterations,
                        factors=[
                            lr_factor(groups[one.group_index]["adjust_lr_fn"], *one.matrices.lr_shape) if one.muon else 1.0
                            for one in numbers.measured
                        ],
                        recorder=recorder,
                        stored=stored,
                    ),
                ]
        return recorder.failure.take()

    def _write_seconds(self, recorder: StepRecorder, numbers: Numbers, rank: int) -> None:
        """Tells the other ranks the seconds of this one: of this step or, where the device is not done with it, of an earlier."""
        known = (one.seconds() for one in (recorder, *(measurement.recorder for measurement in reversed(self._pending))))
        seconds = next((one for one in known if one is not None), self._seconds_before)
        if seconds is not None:
            for place, name in zip(numbers.seconds[numbers.ranks.index(rank)], PHASES, strict=True):
                place.fill_(seconds[name])

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
