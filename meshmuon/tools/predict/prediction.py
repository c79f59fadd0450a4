"""Predicted time of a step: a plan and the measured rates of a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import add

from ...plan import EVERY_HOLDER, PlanData, Task, add_local_costs
from ...plan.traffic import ExchangeBytes
from .calibration import Calibration, LinkRate
from .counts import WavePeers, count_peers
from .launches import Launches, launches_of
from .timeline import StepSeconds, Timeline, WaveSeconds, timeline_of

SECONDS_PER_LAUNCH = 7e-6
"""Host time where the machine gives none: Python, torch's dispatcher and the driver."""
_NO_ADAMW: Mapping[int, int] = {}


def predict(
    plan: PlanData,
    machine: Calibration,
    *,
    averages: bool = False,
    adamw_elements: Mapping[int, int] = _NO_ADAMW,
    launches: Mapping[int, Launches] | None = None,
    peers: WavePeers | None = None,
) -> Timeline:
    """The timeline of a step of ``Muon`` or, with ``averages``, of ``DistMuon``, by the rates of ``machine``.

    ``adamw_elements`` has, by rank, the elements that AdamW steps. ``launches`` has the kernels that each rank's host
    issues for its device, or they follow from the plan. ``peers`` is what ``count_peers`` returned, if it was called.
    """
    on_device = {} if machine.device == "cpu" else launches or launches_of(plan, averages=averages)
    per_element = machine.seconds_per_element("adamw")
    adamw = [per_element * adamw_elements.get(rank, 0) for rank in plan.ranks]
    issued = [of_rank.total for of_rank in on_device.values()]
    return timeline_of(_Seconds(plan, machine, peers, averages=averages).step(adamw, issued))


class _Seconds:
    """Seconds of all work of a step, on every rank."""

    def __init__(self, plan: PlanData, machine: Calibration, peers: WavePeers | None, *, averages: bool) -> None:
        self._plan, self._machine, self._averages = plan, machine, averages
        self._on_cores = machine.device == "cpu"
        self._peers_of_waves = peers or (count_peers(plan) if machine.seconds_per_peer else [])
        momentum, update, copy = map(machine.seconds_per_element, ("momentum", "update", "copy"))
        replicas = len(plan.ranks)
        if averages:
            # Holders copy gradients into the buffer and weights out of it. Owners add up the gradients of all ranks,
            # step, and copy the new weights for every other rank.
            self._per_held = copy, copy
            self._per_owned = momentum + update + 2 * replicas * copy
        else:
            self._per_held = momentum, update
            self._per_owned = 2 * copy  # pieces to matrices, and back
        self._of_kind: dict[tuple[int, int, int], tuple[float, float]] = {}  # hundreds of parameters are of a few kinds
        self._of_matrix = [self._matrix(k) for k in range(len(plan.params))]
        self._work = [dict.fromkeys(plan.ranks, 0.0) for _ in plan.wave_lanes]
        self._copying = [0.0] * len(plan.wave_lanes)  # seconds per element in each direction; a wave is of one lane
        batches: set[tuple[int, int, int, int]] = set()  # wave, owner and shape
        for task in plan.tasks:
            if task.owner != EVERY_HOLDER:
                self._copying[task.wave] = self._copied(task)
                seconds, first = self._of_matrix[task.param]
                batch = task.wave, task.owner, task.sharded.rows, task.sharded.cols
                if batch not in batches:
                    batches.add(batch)
                    seconds += first
                self._work[task.wave][task.owner] += seconds + self._per_owned * task.sharded.size

    def _matrix(self, param: int) -> tuple[float, float]:
        """Seconds per matrix of a parameter in a batch, and the additional seconds of the first one."""
        planned = self._plan.params[param]
        for one in planned.sharded_matrices(planned.layouts[0])[:1]:
            short, long = sorted((one.rows, one.cols))
            kind = planned.flops, short, long
            if kind not in self._of_kind:
                in_batch = planned.flops / self._machine.orthogonalisation_rate(short, long)
                self._of_kind[kind] = in_batch, planned.flops / self._machine.rate_alone(short, long) - in_batch
            return self._of_kind[kind]
        return 0.0, 0.0

    def _copied(self, task: Task) -> float:
        """Seconds per element between host memory and the device; 0 for weights that are on the device."""
        param, copies = self._plan.params[task.param], self._machine.copies
        return param.wire.itemsize / copies.bytes_per_second if param.staged and copies is not None else 0.0

    def step(self, adamw: list[float], launches: Sequence[int]) -> StepSeconds:
        plan, machine = self._plan, self._machine
        waves = tuple(map(self._wave, range(len(plan.wave_lanes))))
        local = dict.fromkeys(plan.ranks, 0.0)
        elementwise = machine.seconds_per_element("momentum") + machine.seconds_per_element("update")
        staying = [task for task in plan.tasks if task.owner == EVERY_HOLDER]
        issued = machine.host_seconds_per_matrix if self._on_cores else 0.0
        per_element = [elementwise + 2 * self._copied(task) for task in staying]
        costs = (
            (task.sharded, self._of_matrix[task.param][0] + seconds * task.sharded.size + issued)
            for task, seconds in zip(staying, per_element, strict=True)
        )
        add_local_costs(local, costs)
        batches = {
            (rank, task.sharded.rows, task.sharded.cols): self._of_matrix[task.param][1]
            for task in {task.sharded: task for task in staying}.values()
            for rank in task.sharded.holdings
        }
        for (rank, _, _), first in batches.items():
            local[rank] += first
        all_at_once = max(1, len(waves)) if self._averages else None
        per_launch = machine.host_seconds_per_launch or SECONDS_PER_LAUNCH
        nothing = [0.0] * len(plan.ranks)
        return StepSeconds(
            ranks=plan.ranks,
            waves=waves,
            local=list(local.values()),
            adamw=adamw,
            host=[machine.host_seconds_per_step] * len(plan.ranks) if self._on_cores else nothing,
            busy=machine.exchange_busy,
            in_flight=all_at_once or plan.options.in_flight,
            gathered_ahead=all_at_once,
            host_ahead=[machine.host_seconds_per_step + per_launch * count for count in launches] or nothing,
            launches=launches,
            slower_beside_exchange=machine.slower_beside_exchange,
        )

    def _wave(self, wave: int) -> WaveSeconds:
        traffic, copying = self._plan.traffic[wave], self._copying[wave]
        per_piece = self._machine.host_seconds_per_matrix / 2 if self._on_cores else 0.0

        def held(per_element: float) -> list[float]:
            pairs = zip(traffic.pieces, traffic.elements, strict=True)
            return [per_piece * pieces + per_element * elements for pieces, elements in pairs]

        peers = self._peers(wave)
        return WaveSeconds(
            momentum=held(self._per_held[0] + copying),
            gather=self._exchange(traffic.scatter.reversed() if self._averages else traffic.gather, peers[0]),
            orthogonalise=list(self._work[wave].values()),
            scatter=self._exchange(traffic.scatter, peers[1]),
            update=held(self._per_held[1] + copying),
        )

    def _peers(self, wave: int) -> tuple[Sequence[int], Sequence[int]]:
        """Of every rank in the gather and in the scatter, if they take time."""
        if not self._machine.seconds_per_peer:
            return (), ()
        gather, scatter = self._peers_of_waves[wave]
        return scatter.peers if self._averages else gather.peers, scatter.peers

    def _exchange(self, exchange: ExchangeBytes, peers: Sequence[int]) -> list[float]:
        """Each rank's own time in an exchange."""
        whole = self._machine.exchange
        if whole is None:
            return [0.0] * len(self._plan.ranks)
        inside, between = self._machine.inside or whole, self._machine.between or whole
        if self._plan.options.nodes is None:
            # Rates of several nodes have an exchange between nodes, and this plan is on one.
            whole = inside = between = whole if self._machine.between is None else inside
        inward = self._moved(exchange.sent_inside, exchange.received_inside, inside)
        outward = self._moved(exchange.sent_between, exchange.received_between, between)
        moved = map(add if self._on_cores else max, inward, outward)
        connecting = [self._machine.seconds_per_peer * count for count in peers] or [0.0] * len(self._plan.ranks)
        return [whole.seconds + seconds + more for seconds, more in zip(connecting, moved, strict=True)]

    def _moved(self, sent: Sequence[int], received: Sequence[int], link: LinkRate) -> list[float]:
        """Seconds on a link, as it was measured, sending and receiving equally much: cores do both in turn, links
        at once.
        """
        rate = link.bytes_per_second
        if self._on_cores:
            return [both / 2 / rate for both in map(add, sent, received)]
        return [more / rate for more in map(max, sent, received)]
