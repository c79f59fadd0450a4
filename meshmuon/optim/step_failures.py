"""What a failed step leaves behind on this rank, until other ranks know of it or a checkpoint is loaded."""

from __future__ import annotations

from ..agree.differences import failure_for_other_ranks
from ..errors import StateError

__all__ = ["StepFailures"]


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
        """A state was loaded."""
        self._half_done = self._unreported = None

    def left_half_done(self, error: BaseException) -> None:
        """``error`` ended a step between two exchanges."""
        self._half_done = f"{type(error).__name__}: {error}"

    def completed_with(self, failure: Exception, *, diverged: bool) -> None:
        """A step went through all its exchanges, but ``failure`` happened in it on this rank."""
        self._unreported = failure_for_other_ranks(failure, diverged)

    def to_report(self) -> Exception | None:
        """The error that the other ranks must learn of at the coming agreement, once; while diverged, every time."""
        failure = self._unreported
        if not isinstance(failure, StateError):
            self._unreported = None
        return failure

    def refuse_step(self) -> None:
        """Raises where no step may be made on this rank."""
        if self._half_done is not None:
            raise StateError(
                f"an earlier step was left half done ({self._half_done}). Load a checkpoint of the model and of this optimizer "
                "first."
            )

    def refuse_checkpoint(self) -> None:
        """Raises where the state must not be saved."""
        self.refuse_step()
        if isinstance(self._unreported, StateError):
            raise StateError(str(self._unreported))
