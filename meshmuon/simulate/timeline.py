"""When every rank of a stage does what in a step, as ``meshmuon/plan/timeline.py`` walks through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan import StepSeconds, WaveSeconds
from ..plan import timeline as plan_timeline
from .work import StageWork


class Span(NamedTuple):
    """Something that ranks do; times are (ranks,) in seconds from the beginning of the step."""

    name: str  # momentum, gather, orthogonalise, scatter, update, local or adamw
    wave: int | None
    start: Tensor
    end: Tensor

    @property
    def on_links(self) -> bool:
        """Whether links are busy with it, not the device."""
        return self.name in ("gather", "scatter")


@dataclass(frozen=True)
class Timeline:
    """A step of one stage."""

    spans: tuple[Span, ...]
    end: Tensor  # (ranks,): when each rank has ended
    waited: Tensor  # (ranks,): seconds in which its device waited for an exchange
    exchanging: float  # seconds of all exchanges, each on the rank that takes longest
    overlaps: bool  # whether links work beside the device
    host: Tensor  # (ranks,): seconds of the host, which are in ``end`` where the device had less to do
    phases: tuple[plan_timeline.Phase, ...] = field(repr=False)  # the same as ``spans``, as plain numbers

    @property
    def seconds(self) -> float:
        """Seconds of the step on its slowest rank."""
        return float(self.end.max()) if self.end.numel() else 0.0

    @property
    def waited_for(self) -> float:
        """Seconds of exchanges that the slowest rank waited for: all of them if its cores do the sending."""
        if not self.overlaps:
            return self.exchanging
        return min(self.exchanging, float(self.waited[int(self.end.argmax())])) if self.end.numel() else 0.0

    @property
    def hidden(self) -> float:
        """Seconds of exchanges during which the slowest rank had other work."""
        return self.exchanging - self.waited_for


def timeline_of(work: StageWork, in_flight: int, *, overlaps: bool = True) -> Timeline:
    """The timeline of a stage with ``in_flight`` waves at the same time; links work beside the device if it ``overlaps``."""
    waves, count = work.orthogonalise.shape
    parts = [part.tolist() for part in (work.momentum, work.gather, work.orthogonalise, work.scatter, work.update)]
    step = StepSeconds(
        ranks=tuple(range(count)),
        waves=tuple(WaveSeconds(*(part[wave] for part in parts)) for wave in range(waves)),
        local=work.local.tolist(),
        adamw=work.adamw.tolist(),
        host=[0.0] * count,
        busy=0.0 if overlaps else 1.0,
        in_flight=in_flight,
    )
    walked = plan_timeline.timeline_of(step)
    phases = [Span(kind, wave, _by_rank(start), _by_rank(end)) for kind, wave, start, end in walked.phases if kind != "host"]
    waited = sum((phase.end - phase.start for phase in phases if phase.name == "wait"), start=torch.zeros(count).double())
    end = torch.maximum(_by_rank(list(walked.ends.values())), work.host)  # the host runs ahead, unless it is slower
    spans = tuple(phase for phase in phases if phase.name != "wait")
    exchanging = sum(float((span.end - span.start).max()) for span in spans if span.on_links)
    return Timeline(spans, end, waited, exchanging, overlaps, work.host, walked.phases)


def _by_rank(seconds: Sequence[float]) -> Tensor:
    return torch.tensor(seconds, dtype=torch.float64)
