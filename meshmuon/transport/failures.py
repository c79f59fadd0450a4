"""What a broken connection becomes: one error that names the phase of the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import MeshmuonError, TransportError

__all__ = ["named_phase"]


@contextmanager
def named_phase(phase: str) -> Iterator[None]:
    """Errors of the process group inside become a TransportError that names ``phase``."""
    try:
        yield
    except MeshmuonError:
        raise
    except RuntimeError as error:  # gloo's and NCCL's errors, lost peers and timeouts are all of this kind
        raise TransportError(
            f"ranks lost each other in the {phase} of a step: {error}. A rank has died, has stalled past the group's timeout, "
            "or failed by itself: look at the first error in the logs of all ranks, and go on from the last checkpoint."
        ) from error
