"""The consequences of a failed step on this rank, until the other ranks know of it or a checkpoint is loaded."""

from __future__ import annotations

from ..agree.differences import failure_for_other_ranks
from ..errors import StateError


class StepFailures:
    """The bookkeeping of failed steps. One of four states:

    - **Clean**: the last step succeeded, or failed before anything was written.
    - **Unreported**: this rank completed all exchanges of a step, but part of the step failed here. The other ranks noticed
      nothing. The next ``step()`` reports the error to them instead of stepping, and all ranks raise it; then the state is clean.
    - **Diverged**: as above, and replicas of the same weights now differ. Every ``step()`` reports it, and ``state_dict()``
      refuses, until a state is loaded.
    - **Half done**: this rank left a step between two exchanges (an error in transport, Ctrl-C), so nobody knows which weights
      were updated. ``step()`` and ``state_dict()`` refuse on this rank until a state is loaded. Its connections are closed, so
      that the other ranks do not wait for it.
    """

    def __init__(self) -> None:
        self._half_done: str | None = None
        self._unreported: Exception | None = None

    def clear(self) -> None:
        """Returns to the clean state, because a state was loaded."""
        self._half_done = self._unreported = None

    def left_half_done(self, error: BaseException) -> None:
        """Records that ``error`` ended a step between two exchanges."""
        self._half_done = f"{type(error).__name__}: {error}"

    def completed_with(self, failure: Exception, *, diverged: bool) -> None:
        """Records that a step completed all its exchanges although ``failure`` happened on this rank."""
        self._unreported = failure_for_other_ranks(failure, diverged)

    def to_report(self) -> Exception | None:
        """The error to report to the other ranks at the coming agreement; reported once, or at every step while diverged."""
        failure = self._unreported
        if not isinstance(failure, StateError):
            self._unreported = None
        return failure

    def refuse_step(self) -> None:
        """Raises if this rank must not step."""
        if self._half_done is not None:
            raise StateError(
                f"an earlier step was left half done ({self._half_done}). Load a checkpoint of the model and of this optimizer "
                "first."
            )

    def refuse_checkpoint(self) -> None:
        """Raises if the state must not be saved."""
        self.refuse_step()
        if isinstance(self._unreported, StateError):
            raise StateError(str(self._unreported))
