"""Predicted time of a step, with the launches of its host."""

from __future__ import annotations

from collections.abc import Mapping

from ...plan import PlanData
from ...plan.calibration import Calibration
from ...plan.counts import WavePeers
from ...plan.prediction import step_timeline
from ...plan.timeline import Timeline
from .launches import Launches, launches_of

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
    """``step_timeline`` with the kernels that hosts issue for their devices: ``launches``, or those that follow
    from the plan.
    """
    on_device = {} if machine.device == "cpu" else launches or launches_of(plan, averages=averages)
    issued = [of_rank.total for of_rank in on_device.values()]
    return step_timeline(plan, machine, averages=averages, adamw_elements=adamw_elements, launches=issued, peers=peers)
