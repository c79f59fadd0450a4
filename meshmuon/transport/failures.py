"""What a broken connection becomes: one error that names the phase of the step, on every rank and at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import MeshmuonError, TransportError
from ..torch_compat import gloo_of

__all__ = ["hang_up", "named_phase"]

_UNUSED_TAG = 0x6D6D  # no one sends under it, so that waiting for it ends by the clock
_SHORT = timedelta(milliseconds=1)


@contextmanager
def named_phase(phase: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Errors of the process group inside become a TransportError that names ``phase``; the ranks of ``group`` hear of it."""
    try:
        yield
    except MeshmuonError:
        raise
    except RuntimeError as error:  # gloo's and NCCL's errors, lost peers and timeouts are all of this kind
        hang_up(group)
        raise TransportError(
            f"ranks lost each other in the {phase} of a step: {error}. A rank has died, has stalled past the group's timeout, "
            "or failed by itself: look at the first error in the logs of all ranks, and go on from the last checkpoint."
        ) from error
    except BaseException:  # Ctrl-C: what this rank does next would meet what the others do now
        hang_up(group)
        raise


def hang_up(group: dist.ProcessGroup | None) -> None:
    """Closes the connections of a gloo group that can no longer be used, so that ranks which wait for this one hear at once.

    Not every rank is connected to the one that died: in a ring only its neighbours see it, and the others would wait for these
    until the group's timeout. Nothing in torch closes the connections of a living group, but gloo itself does when waiting for a
    message has taken too long.
    """
    backend = None if group is None else gloo_of(group)
    if backend is None:
        return
    for peer in range(backend.size()):
        if peer != backend.rank():
            try:
                backend.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(_SHORT)
            except RuntimeError:  # what it is for
                continue
