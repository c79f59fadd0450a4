"""What a rank has until it knows what all ranks have decided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import KeptError
from ..transport import PendingVerdict
from .step_decision import RankStatus, StepDecision

if TYPE_CHECKING:
    from .planner import Planner


class PendingDecision:
    """A decision for which the votes of the ranks are on their way. Either ``wait`` or ``abandon`` is called, once."""

    def __init__(self, planner: Planner, failure: KeptError, status: RankStatus, votes: PendingVerdict | None) -> None:
        self._planner, self._failure, self._status, self._votes = planner, failure, status, votes
        # What will be decided unless some rank has other plans or something out of the ordinary.
        self.expected = planner.expected(failure, status)

    def advance(self) -> None:
        """Passes on what has arrived of the votes, without waiting."""
        if self._votes is not None:
            self._votes.advance()

    def wait(self) -> StepDecision:
        """What all ranks have decided; raises on all of them if they cannot agree."""
        return self._planner.decide(self._failure, self._status, self._votes)

    def abandon(self) -> None:
        """Leaves the step. Ranks that wait for this one get an error at once, where they can be told."""
        self._failure.take()
        if self._votes is not None:
            self._votes.abandon()
