"""Broken connections: every rank gets an error at once, and it names the phase of the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import MeshmuonError, TransportError
from ..torch_compat import gloo_of

_UNUSED_TAG = 0x6D6D  # nobody sends with this tag, so that waiting for it times out
_SHORT = timedelta(milliseconds=1)


@contextmanager
def named_phase(phase: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Turns errors of the process group into a TransportError that names ``phase``, and tells the ranks of ``group``."""
    try:
        yield
    except MeshmuonError:
        raise
    except RuntimeError as error:  # gloo's and NCCL's errors, lost peers and timeouts are all of this kind
        hang_up(group)
        raise TransportError(
            f"ranks lost each other in the {phase} of a step: {error}. A rank has died, has stalled past the group's timeout, "
            "or failed by itself: look for the first error in the logs of all ranks, and resume from the last checkpoint."
        ) from error
    except BaseException:  # Ctrl-C: the next collective of this rank would meet the present one of the others
        hang_up(group)
        raise


def hang_up(group: dist.ProcessGroup | None) -> None:
    """Closes the connections of a gloo group that can no longer be used, so that ranks which wait for this one fail at once.

    Not every rank is connected to the one that died: in a ring only its neighbours notice, and the others would wait for these
    until the group's timeout. torch has no call that closes the connections of a group. gloo closes a connection when a message
    on it times out, so this waits one millisecond for a message that nobody sends.
    """
    backend = None if group is None else gloo_of(group)
    if backend is None:
        return
    for peer in range(backend.size()):
        if peer != backend.rank():
            try:
                backend.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(_SHORT)
            except RuntimeError:  # the timeout, as intended
                continue
