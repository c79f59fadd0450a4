"""The plan with which a step is predicted to be fastest, among those that differ in what the options leave open."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from .calibration import Calibration
from .owners import heavy_tasks
from .plan import Plan, checked, exchange_in_waves, make_plan, own_matrices
from .plan_data import PlanData
from .prediction import step_timeline
from .tasks import PlannedParam, PlanOptions
from .timeline import Timeline

_MOST_COMPARED = 40  # plans; fewer for large models, where each takes a second
_MOST_TASKS_COMPARED = 200_000  # over all plans
_MOST_IN_FLIGHT = 16
_MANY_PEERS = 256  # with which relays may be faster
_FEW = 8  # ranks for each that may have a matrix in the wave that scatters last
_WORTH_ALL_MEMORY = 0.02  # of a step: what the exchange buffers must gain if they take as much as they may
_FASTER = 0.995  # of the seconds so far: what gains less is no reason for another plan


def choose_plan(
    params: Sequence[PlannedParam],
    options: PlanOptions,
    rates: Calibration,
    *,
    most_buffer_bytes: int | None = None,
    averages: bool = False,
) -> Plan:
    """The fastest plan by the rates of a machine; a pure function of its arguments.

    It starts from the plan of ``make_plan`` and changes one thing at a time, keeping what makes the predicted step shorter:
    which matrices replicas share (if ``replicas`` is "auto"), the memory of a wave, the waves in flight, the number of waves,
    when heavy matrices have their turn, whether exchanges between nodes go through relays. ``most_buffer_bytes`` limits the
    exchange buffers of a rank where the user has set no memory for them; None if ``options.budget`` and ``options.in_flight``
    are the user's. ``averages`` is for ``DistMuon``.
    """
    if options.chunk_size > 0:  # which decides alone
        return make_plan(params, options)
    search = _Search(params, options, partial(step_timeline, rates=rates, averages=averages), most_buffer_bytes)
    if len(search.plan.ranks) > 1:
        search.run()
    return checked(search.plan)


class _Search:
    """The best plan so far, and what it was made from."""

    def __init__(
        self,
        params: Sequence[PlannedParam],
        options: PlanOptions,
        predict: Callable[[PlanData], Timeline],
        most_buffer_bytes: int | None,
    ) -> None:
        self._predict, self._most_buffer_bytes = predict, most_buffer_bytes
        self._owned, self._options = own_matrices(params, options), options
        self.plan = exchange_in_waves(self._owned, options)
        self._score = self._score_of(self.plan)
        self._left = min(_MOST_COMPARED, _MOST_TASKS_COMPARED // (1 + len(self.plan.tasks) + len(self.plan.ranks)))

    def run(self) -> None:
        """Goes over all that is open until nothing gains any more, or as many plans were compared as the model's size allows."""
        if self.plan.relayed:
            self._try(max_peers=None)
        if self._left < _MOST_COMPARED:  # of few plans, this gains most
            self._try_heavy()
        if self._most_buffer_bytes is not None:  # all memory, before it is decided what travels
            self._try(in_flight=self._most_in_flight(self._options.budget))
        self._try_replicas()
        before = None
        while before != self._score:
            before = self._score
            self._try_memory()
            self._try_waves()
            if before == self._score:
                self._try_heavy()
        if self._options.max_peers is not None and not self.plan.relayed and self.plan.most_peers > _MANY_PEERS:
            self._try(max_peers=_MANY_PEERS)

    def _score_of(self, plan: PlanData) -> tuple[int, float]:
        """Bytes above the limit, then seconds; all of the memory that is allowed counts as much as 2 % of them."""
        seconds = self._predict(plan).seconds
        if self._most_buffer_bytes is None:
            return 0, seconds
        needed = max(plan.buffers(plan.options.in_flight).values(), default=0)
        return max(0, needed - self._most_buffer_bytes), seconds * (1 + _WORTH_ALL_MEMORY * needed / self._most_buffer_bytes)

    def _try(self, share: Mapping[int, bool] | None = None, **changes: int | str | None) -> tuple[float, float]:
        """The score of a plan with some options changed, or with other matrices shared by replicas. The best plan is kept."""
        if self._left < 1:
            return math.inf, math.inf
        self._left -= 1
        owned, options = self._owned, replace(self._options, **changes)  # type: ignore[arg-type]
        if share is not None or options.heavy != self._options.heavy:
            params = [replace(param, share=(share or {}).get(k, param.share)) for k, param in enumerate(owned.params)]
            owned = own_matrices(params, options)
        plan = exchange_in_waves(owned, options)
        score = self._score_of(plan)
        if score < (self._score[0], _FASTER * self._score[1]):
            self._owned, self._options, self.plan, self._score = owned, options, plan, score
        return score

    def _try_replicas(self) -> None:
        """All replicas share one owner, or each computes for itself; from both, one kind of matrix after the other is changed."""
        kinds: dict[object, list[int]] = {}
        for k in self._open:
            param = self._owned.params[k]
            kinds.setdefault((param.flops, param.layouts[0].shape, param.layouts[0].placements), []).append(k)
        heaviest_first = sorted(kinds.values(), key=lambda members: -len(members) * self._owned.params[members[0]].flops)
        starts = [dict.fromkeys(self._open, share) for share in (True, False)] if kinds else []
        shared = {task.param for task in self._owned.travelling if task.sharded.replicas > 1}
        now = {k: k in shared for k in self._open}
        scores = [self._score if start == now else self._try(start) for start in starts]
        for score, pattern in sorted(zip(scores, starts, strict=True), key=lambda pair: pair[0]):
            for members in 2 * heaviest_first if len(kinds) > 1 else ():
                changed = pattern | dict.fromkeys(members, not pattern[members[0]])
                if (other := self._try(changed)) < score:
                    score, pattern = other, changed

    @cached_property
    def _open(self) -> list[int]:
        """The parameters for which it is open whether replicas share an owner."""
        return [
            k
            for k, param in enumerate(self._owned.params if self._options.replicas == "auto" else ())
            if param.share is None and any(matrix.replicas > 1 for matrix in param.sharded_matrices(param.layouts[0])[:1])
        ]

    def _try_heavy(self) -> None:
        """Few matrices that take a rank most of a step are best aside; otherwise expensive ones may have to come first."""
        heavy = heavy_tasks(self._owned.travelling, len(self.plan.ranks))
        few = 0 < len(heavy) <= len(self.plan.ranks) // _FEW
        self._try(heavy=None if self._options.heavy else "aside" if few else "first")

    def _try_memory(self) -> None:
        budget, in_flight = self._options.budget, self._options.in_flight
        self._try(in_flight=(in_flight + 1) // 2)
        if self._most_buffer_bytes is not None:
            for other in (2 * budget, budget // 2):
                self._try(budget=other, in_flight=self._most_in_flight(other))

    def _most_in_flight(self, budget: int) -> int:
        """The waves of which the buffers, each of twice the budget, fill the memory."""
        return max(2, min(_MOST_IN_FLIGHT, (self._most_buffer_bytes or 0) // (2 * budget)))

    def _try_waves(self) -> None:
        count = len(self.plan.wave_lanes)
        for waves in (3 * count // 2, 2 * count, count // 2):
            if waves:
                self._try(waves=waves)
