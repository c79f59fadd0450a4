"""The plan with which a step is predicted to be fastest, among those that differ in what the options leave open."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from .calibration import Calibration
from .plan import OwnedMatrices, Plan, checked, exchange_in_waves, make_plan, own_matrices
from .plan_data import PlanData
from .prediction import step_timeline
from .tasks import PlannedParam, PlanOptions
from .timeline import Timeline

_MOST_COMPARED = 40  # plans; fewer for large models, where each takes a second
_MOST_TASKS_COMPARED = 200_000  # over all plans
_MOST_IN_FLIGHT = 16
_WORTH_ALL_MEMORY = 0.02  # of a step: what the exchange buffers must gain if they take as much as they may
_WORTH_A_START = 1.5  # times the seconds of the best plan so far: what is slower does not catch up by its waves
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

    It starts from the plan of ``make_plan`` and changes one thing at a time, keeping what makes the predicted step
    shorter: which matrices replicas share (if ``replicas`` is "auto"), the memory of a wave, the waves in flight, the
    number of waves. ``most_buffer_bytes`` limits the exchange buffers of a rank where the user has set no memory for
    them; None if ``options.budget`` and ``options.in_flight`` are the user's. ``averages`` is for ``DistMuon``.
    """
    if options.chunk_size > 0:  # which decides alone
        return make_plan(params, options)
    predict = partial(step_timeline, rates=rates, averages=averages)
    return checked(_Search(params, options, predict, most_buffer_bytes).best())


class _Candidate(NamedTuple):
    """A plan, and what it was made from."""

    owned: OwnedMatrices
    shared: frozenset[int]  # parameters of which replicas share an owner, of those for which that is open
    options: PlanOptions
    plan: PlanData
    score: tuple[int, float]  # bytes above the limit, then seconds


class _Search:
    """The plan from which the search goes on, and all that were made."""

    def __init__(
        self,
        params: Sequence[PlannedParam],
        options: PlanOptions,
        predict: Callable[[PlanData], Timeline],
        most_buffer_bytes: int | None,
    ) -> None:
        self._predict, self._most_buffer_bytes = predict, most_buffer_bytes
        self._open = [  # parameters for which it is open whether replicas share an owner
            k
            for k, param in enumerate(params if options.replicas == "auto" else ())
            if param.share is None
            and any(matrix.replicas > 1 for matrix in param.sharded_matrices(param.layouts[0])[:1])
        ]
        self._made: dict[Hashable, _Candidate] = {}
        owned = own_matrices(params, options)
        shared = {task.param for task in owned.travelling if task.sharded.replicas > 1}
        self._now = self._make(owned, shared.intersection(self._open), options)
        self._left = min(
            _MOST_COMPARED, _MOST_TASKS_COMPARED // (1 + len(self._now.plan.tasks) + len(self._now.plan.ranks))
        )

    def best(self) -> PlanData:
        """Goes over all that is open until nothing gains any more, or as many plans were compared as the model's
        size allows.
        """
        if len(self._now.plan.ranks) < 2:
            return self._now.plan
        if self._most_buffer_bytes is not None:  # all memory, before it is decided what travels
            self._try(in_flight=self._most_in_flight(self._now.options.budget))
        starts = self._try_replicas()
        ends = [self._try_exchanges()]
        for start in starts:  # with other waves they may be faster
            if start.score < (start.score[0], _WORTH_A_START * ends[0].score[1]):
                self._now = start
                ends.append(self._try_exchanges())
        self._now = min(ends, key=lambda end: end.score)
        return self._now.plan

    def _make(self, owned: OwnedMatrices, shared: Iterable[int], options: PlanOptions) -> _Candidate:
        plan = exchange_in_waves(owned, options)
        candidate = _Candidate(owned, frozenset(shared), options, plan, self._score_of(plan))
        self._made[candidate.shared, options] = candidate
        return candidate

    def _score_of(self, plan: PlanData) -> tuple[int, float]:
        """Bytes above the limit, then seconds; all of the memory that is allowed counts as much as 2 % of them."""
        seconds = self._predict(plan).seconds
        if self._most_buffer_bytes is None:
            return 0, seconds
        needed = max(plan.buffers(plan.options.in_flight).values(), default=0)
        return max(0, needed - self._most_buffer_bytes), seconds * (
            1 + _WORTH_ALL_MEMORY * needed / self._most_buffer_bytes
        )

    def _try(self, shared: frozenset[int] | None = None, **changes: int | str | None) -> _Candidate | None:
        """The plan with some options changed, or with other matrices shared by replicas; None if no more may be made.

        The search goes on from it if it is faster.
        """
        owned, options = self._now.owned, replace(self._now.options, **changes)  # type: ignore[arg-type]
        key = self._now.shared if shared is None else shared, options
        if key in self._made or self._left < 1:
            return self._made.get(key)
        self._left -= 1
        if shared is not None:
            params = list(owned.params)
            for k in self._open:
                params[k] = replace(params[k], share=k in shared)
            owned = own_matrices(params, options)
        candidate = self._make(owned, key[0], options)
        if candidate.score < (self._now.score[0], _FASTER * self._now.score[1]):
            self._now = candidate
        return candidate

    def _try_replicas(self) -> list[_Candidate]:
        """All replicas share one owner, or each computes for itself; from both, one kind of matrix after the other is
        changed.

        Returns the plans of these two, the faster one first.
        """
        kinds: dict[object, list[int]] = {}
        for k in self._open:
            param = self._now.owned.params[k]
            kinds.setdefault((param.flops, param.layouts[0].shape, param.layouts[0].placements), []).append(k)
        heaviest_first = sorted(
            kinds.values(), key=lambda members: -len(members) * self._now.owned.params[members[0]].flops
        )
        both = [self._try(frozenset(shared)) for shared in ((self._open, ()) if kinds else ())]
        starts = sorted((start for start in both if start is not None), key=lambda start: start.score)
        for best in starts:
            for members in 2 * heaviest_first if len(kinds) > 1 else ():
                other = self._try(best.shared.symmetric_difference(members))
                if other is not None and other.score < best.score:
                    best = other
        return starts

    def _try_exchanges(self) -> _Candidate:
        """Memory and waves, again until nothing gains."""
        before = None
        while before is not self._now:
            before = self._now
            self._try_memory()
            self._try_waves()
        return self._now

    def _try_memory(self) -> None:
        budget, in_flight = self._now.options.budget, self._now.options.in_flight
        self._try(in_flight=(in_flight + 1) // 2)
        if self._most_buffer_bytes is not None:
            for other in (2 * budget, budget // 2):
                self._try(budget=other, in_flight=self._most_in_flight(other))

    def _most_in_flight(self, budget: int) -> int:
        """The waves of which the buffers, each of twice the budget, fill the memory."""
        return max(2, min(_MOST_IN_FLIGHT, (self._most_buffer_bytes or 0) // (2 * budget)))

    def _try_waves(self) -> None:
        count = len(self._now.plan.wave_lanes)
        for waves in (3 * count // 2, 2 * count, count // 2):
            if waves:
                self._try(waves=waves)
