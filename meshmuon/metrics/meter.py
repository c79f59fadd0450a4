"""The metrics of an optimizer: which steps are measured, what is kept between them, and when the host gets to see
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..agree.step_decision import StepDecision
from ..device import Transfers, is_staged, known_to_host, transfers_for
from ..errors import ConfigError, UnsupportedError
from ..execute import StepParam
from ..layout import Layout
from ..params.param_record import ParamRecord
from ..torch_compat import local_part
from .numbers import DTYPE, Column, Numbers
from .recorder import StepRecorder
from .report import Measurement, report
from .spectra import squares


class Meter:
    """Measures every k-th step of an optimizer; nothing where ``every`` is None.

    At every step the optimizer calls ``begin_step``. It calls ``prepare`` when the plan is new and, if ``is_due``,
    ``begin`` before the executor runs and ``finish`` after it. All ranks measure the same steps.

    With ``by_owners`` the owners of matrices see them whole; without, all ranks of their meshes do.
    """

    def __init__(self, every: int | None, *, by_owners: bool) -> None:
        self._every, self._by_owners = every, by_owners
        self._numbers: Numbers | None = None
        self._steps = 0
        self._pending: list[Measurement] = []  # those whose numbers are on their way to the host
        self._latest: dict[str, Any] = {}
        self._transfers: Transfers | None = None

    def begin_step(self) -> None:
        """Counts a call of ``step()``."""
        self._steps += 1

    def is_due(self, agreed_steps: int) -> bool:
        """Whether this step is measured; ``agreed_steps`` is the same on all ranks."""
        return self._every is not None and self._numbers is not None and agreed_steps % self._every == 0

    def refusal(self, params: Sequence[ParamRecord]) -> Exception | None:
        """Why these parameters cannot be measured; None if they can, or if nothing is measured."""
        if self._every is None or not params:
            return None
        device = params[0].param.device
        for named in params:
            if is_staged(named.param):
                return UnsupportedError(
                    f"{named.name} is in host memory on a mesh of devices (FSDP2's CPUOffloadPolicy), and metrics "
                    "would make the host wait for the device. Leave out metrics=; or leave out the policy and call "
                    "optimizer.turn_on_cpu_offload(), which keeps the optimizer's state in host memory and measures."
                )
            if named.param.device != device:
                return UnsupportedError(
                    f"{named.name} is on {named.param.device} and {params[0].name} on {device}: metrics are measured "
                    "on one device, without making it wait for another. Leave out metrics=, or put all weights on one "
                    "device."
                )
        return None

    def prepare(
        self, decision: StepDecision, params: Sequence[ParamRecord], layouts: Sequence[tuple[Layout, ...]]
    ) -> None:
        """Makes room for the numbers of a plan."""
        if self._every is None or not params:  # nothing is measured, or all is frozen
            self._numbers = None
            return
        if self._numbers is None or self._numbers.plan is not decision.plan:
            with torch.inference_mode(False), torch.no_grad():
                self._numbers = Numbers(decision, params, layouts, by_owners=self._by_owners)
            self._transfers = self._transfers or transfers_for(params[0].param.device)

    def discard(self) -> None:
        """Gives up what was made for a plan; what was measured stays."""
        self._numbers = None

    def begin(self, step_params: Sequence[StepParam], decision: StepDecision, *, gradients_here: bool) -> StepRecorder:
        """Measures gradients and weights before the step changes them. Returns what sees the rest of the step.

        ``gradients_here`` is false if the gradients are still to be averaged.
        """
        numbers = self._numbers
        assert numbers is not None
        recorder = StepRecorder(numbers)
        with torch.inference_mode(False), torch.no_grad(), recorder.phase("metrics"):
            numbers.table.zero_()
            with recorder.failure:
                weights = {k: local.cut(local_part(step_params[k].param)) for k, local in numbers.local.items()}
                of_weights = {k: squares(weight) for k, weight in weights.items()}
                of_gradients = [
                    squares(numbers.local[k].cut(local_part(step_params[k].grad)))
                    if gradients_here and k not in decision.idle
                    else torch.zeros_like(of_weight)
                    for k, of_weight in of_weights.items()
                ]
                if weights:
                    both = torch.stack([torch.cat(of_gradients), torch.cat([*of_weights.values()])], dim=1)
                    numbers.write(numbers.local_rows, Column.GRADIENT, both)
        return recorder

    def finish(
        self,
        recorder: StepRecorder,
        decision: StepDecision,
        groups: Sequence[Mapping[str, Any]],
        *,
        skipped: int | Tensor,
        skip_mask: Tensor | None,
    ) -> Exception | None:
        """Reduces the numbers over the ranks and sends them to the host, which need not wait. Returns this rank's
        first error.
        """
        numbers = self._numbers
        assert numbers is not None
        scalars: dict[str, Any] = {"skipped steps": skipped, "skipped": 0.0 if skip_mask is None else skip_mask}
        scalars |= {f"lr {k}": group["lr"] for k, group in enumerate(groups)}
        on_device = {
            name: value for name, value in scalars.items() if isinstance(value, Tensor) and not known_to_host(value)
        }
        known = {name: float(value) for name, value in scalars.items() if name not in on_device}
        with recorder.phase("metrics"), torch.inference_mode(False), torch.no_grad():
            if decision.exchange is not None:
                decision.exchange.add_up(numbers.reduced)
            with recorder.failure:
                in_host_memory, stored = self._send({"table": numbers.table, **on_device})
                measurement = Measurement(
                    step=self._steps,
                    numbers=numbers,
                    told={**known, **in_host_memory},
                    idle=frozenset(decision.idle),
                    groups=tuple(groups),
                    adamw_stepped=recorder.adamw_stepped,
                    stored=stored,
                )
                # At most two if they are never read: one that has arrived on the host, and one that the device still
                # computes.
                self._pending = [*self._pending[-1:], measurement]
        return recorder.failure.take()

    def _send(self, told: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        """Starts copying tensors to the host. Returns where they will be, and the mark of their arrival."""
        assert self._transfers is not None
        packed = torch.cat([value.reshape(-1).to(DTYPE) for value in told.values()])  # in separate memory
        host = self._transfers.host_buffer(packed.numel(), DTYPE)
        self._transfers.store(host, packed)
        parts = torch.split(host, [value.numel() for value in told.values()])
        views = {name: part.view(value.shape) for (name, value), part in zip(told.items(), parts, strict=True)}
        return views, self._transfers.stored()

    @torch.no_grad()
    def read(self, *, wait: bool) -> dict[str, Any]:
        """The latest measurement that the host knows; with ``wait``, the latest that was begun. Empty before the
        first.
        """
        if self._every is None:
            raise ConfigError("this optimizer measures nothing: build it with metrics=10, to measure every 10th step.")
        if self._transfers is not None and self._pending and wait:
            self._transfers.settle()
        for k in reversed(range(len(self._pending))):
            measurement = self._pending[k]
            if wait or (self._transfers is not None and self._transfers.done(measurement.stored)):
                self._latest = report(measurement)
                del self._pending[: k + 1]
                break
        return self._latest
