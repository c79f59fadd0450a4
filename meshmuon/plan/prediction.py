"""How long a step with a plan takes on machines that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .plan_data import PlanData, add_local_costs
from .rates import Link
from .tasks import EVERY_HOLDER, Task
from .timeline import StepSeconds, Timeline, WaveSeconds, timeline_of
from .traffic import ExchangeBytes, WaveTraffic, traffic_of

_NO_ADAMW: Mapping[int, int] = {}


class Machine(Protocol):
    """What a prediction must know of machines; a ``Calibration`` has it."""

    @property
    def device(self) -> str:
        """Type of the device."""
        ...

    @property
    def inside(self) -> Link | None:
        """The link between two ranks of a node."""
        ...

    @property
    def between(self) -> Link | None:
        """The link between ranks of different nodes."""
        ...

    @property
    def exchange(self) -> Link | None:
        """An exchange of all ranks with all ranks."""
        ...

    @property
    def exchange_busy(self) -> float:
        """The share of an exchange that takes the device's time."""
        ...

    @property
    def copies(self) -> Link | None:
        """Copies between a device and its host, for weights in host memory; None if they were not measured."""
        ...

    @property
    def host_seconds_per_matrix(self) -> float:
        """What each matrix adds to a step."""
        ...

    @property
    def host_seconds_per_step(self) -> float:
        """What a step takes beside its matrices and exchanges."""
        ...

    def orthogonalisation_rate(self, size: int) -> float:
        """FLOPs per second on matrices whose shorter side is ``size``."""
        ...

    def seconds_per_element(self, kind: str) -> float:
        """Of a kind of elementwise work."""
        ...


@dataclass(frozen=True)
class Prediction:
    """A step as it should run."""

    timeline: Timeline

    @property
    def total(self) -> float:
        """Seconds of the step on its slowest rank."""
        return self.timeline.seconds

    @property
    def parts(self) -> dict[str, float]:
        """Kind of span → its seconds on the slowest rank. Where exchanges overlap with work, the sum exceeds ``total``."""
        return self.timeline.totals(self.timeline.slowest)


def predict(plan: PlanData, machine: Machine, *, averages: bool, adamw_elements: Mapping[int, int] = _NO_ADAMW) -> Prediction:
    """The prediction of a step of ``Muon`` or, with ``averages``, of ``DistMuon``.

    ``adamw_elements`` has, by rank, the elements that AdamW steps.
    """
    seconds = _Seconds(plan, machine, averages=averages)
    per_element = machine.seconds_per_element("adamw")
    return Prediction(timeline_of(seconds.step([per_element * adamw_elements.get(rank, 0) for rank in plan.ranks])))


class _Seconds:
    """The seconds of every part of a step, on every rank."""

    def __init__(self, plan: PlanData, machine: Machine, *, averages: bool) -> None:
        self._plan, self._machine, self._averages = plan, machine, averages
        self._on_cores = machine.device == "cpu"
        momentum, update, copy = map(machine.seconds_per_element, ("momentum", "update", "copy"))
        replicas = len(plan.ranks)
        if averages:
            # Holders copy gradients into the buffer and weights out of it. Owners add up the gradients of all ranks, step, and
            # copy the new weights for every other rank.
            self._per_held = copy, copy
            self._per_owned = momentum + update + 2 * replicas * copy
        else:
            self._per_held = momentum, update
            self._per_owned = 2 * copy  # pieces to matrices, and back
        self._work = [dict.fromkeys(plan.ranks, 0.0) for _ in plan.wave_lanes]
        self._copying = [0.0] * len(plan.wave_lanes)  # seconds per element in each direction; a wave is of one lane
        for task in plan.tasks:
            if task.owner != EVERY_HOLDER:
                self._copying[task.wave] = self._copied(task)
                self._work[task.wave][task.owner] += self._matrix(task) + self._per_owned * task.sharded.size

    def _matrix(self, task: Task) -> float:
        size = min(task.sharded.rows, task.sharded.cols)
        return self._plan.params[task.param].flops / self._machine.orthogonalisation_rate(size)

    def _copied(self, task: Task) -> float:
        """Seconds in which one element gets from host memory to the device, or back; 0 where it is on the device already."""
        param, copies = self._plan.params[task.param], self._machine.copies
        return param.itemsize / copies.bytes_per_second if param.staged and copies is not None else 0.0

    def step(self, adamw: list[float]) -> StepSeconds:
        plan, machine = self._plan, self._machine
        waves = tuple(map(self._wave, traffic_of(plan), self._work, self._copying))
        local = dict.fromkeys(plan.ranks, 0.0)
        elementwise = machine.seconds_per_element("momentum") + machine.seconds_per_element("update")
        staying = [task for task in plan.tasks if task.owner == EVERY_HOLDER]
        per_element = [elementwise + 2 * self._copied(task) for task in staying]
        costs = (
            (task.sharded, self._matrix(task) + seconds * task.sharded.size + machine.host_seconds_per_matrix)
            for task, seconds in zip(staying, per_element, strict=True)
        )
        add_local_costs(local, costs)
        all_at_once = max(1, len(waves)) if self._averages else None
        return StepSeconds(
            ranks=plan.ranks,
            waves=waves,
            local=list(local.values()),
            adamw=adamw,
            host=[machine.host_seconds_per_step] * len(plan.ranks),
            busy=machine.exchange_busy,
            in_flight=all_at_once or plan.options.in_flight,
            gathered_ahead=all_at_once,
        )

    def _wave(self, traffic: WaveTraffic, work: dict[int, float], copying: float) -> WaveSeconds:
        ranks, per_piece = self._plan.ranks, self._machine.host_seconds_per_matrix / 2

        def held(per_element: float) -> list[float]:
            return [per_piece * traffic.pieces.get(rank, 0) + per_element * traffic.elements.get(rank, 0) for rank in ranks]

        gather = traffic.scatter.reversed() if self._averages else traffic.gather
        return WaveSeconds(
            momentum=held(self._per_held[0] + copying),
            gather=[self._exchange(gather, rank) for rank in ranks],
            orthogonalise=list(work.values()),
            scatter=[self._exchange(traffic.scatter, rank) for rank in ranks],
            update=held(self._per_held[1] + copying),
        )

    def _exchange(self, exchange: ExchangeBytes, rank: int) -> float:
        """A rank's own time in an exchange."""
        whole = self._machine.exchange
        if whole is None:
            return 0.0
        inside, between = self._machine.inside or whole, self._machine.between or whole
        if self._plan.options.nodes is None:
            inside = between = whole
        inward = self._moved(exchange.sent_inside.get(rank, 0), exchange.received_inside.get(rank, 0))
        outward = self._moved(exchange.sent_between.get(rank, 0), exchange.received_between.get(rank, 0))
        seconds = inward / inside.bytes_per_second, outward / between.bytes_per_second
        return whole.seconds + (sum(seconds) if self._on_cores else max(seconds))

    def _moved(self, sent: int, received: int) -> float:
        """Bytes as links were measured, sending and receiving equally much: cores do one after the other, links both at once."""
        return (sent + received) / 2 if self._on_cores else max(sent, received)
