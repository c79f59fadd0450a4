"""Broken connections: every rank gets an error at once, and it names the phase of the step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import MeshmuonError, TransportError
from ..torch_compat import gloo_of
from .host_channel import HostChannel

_UNUSED_TAG = 0x6D6D  # nobody sends with this tag, so that waiting for it times out
_SHORT = timedelta(milliseconds=1)

_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, HostChannel] = weakref.WeakKeyDictionary()


def close_with(group: dist.ProcessGroup, channel: HostChannel) -> None:
    """From now on ``channel`` belongs to ``group``, and ``hang_up`` closes both."""
    _channels[group] = channel


def existing_channel(group: dist.ProcessGroup) -> HostChannel | None:
    """The channel that belongs to ``group``, if it has one."""
    return _channels.get(group)


@contextmanager
def named_phase(phase: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Turns errors of the process group into a TransportError that names ``phase``, and tells the ranks of ``group``."""
    try:
        yield
    except MeshmuonError:
        raise
    except (RuntimeError, OSError) as error:  # gloo's and NCCL's errors, lost peers and timeouts, and those of connections
        hang_up(group)
        raise TransportError(
            f"ranks lost each other in the {phase} of a step: {error}. A rank has died, has stalled past the group's timeout, "
            "or failed by itself: look for the first error in the logs of all ranks, and resume from the last checkpoint."
        ) from error
    except BaseException:  # Ctrl-C: the next collective of this rank would meet the present one of the others
        hang_up(group)
        raise


def hang_up(group: dist.ProcessGroup | None) -> None:
    """Closes the connections of a group that can no longer be used, so that ranks which wait for this one fail at once.

    Not every rank is connected to the one that died: only its neighbours notice, and the others would wait for these until the
    group's timeout. Ranks may wait in the group or in its channel, so both are closed; of other backends than gloo only the
    channel is. torch has no call that closes the connections of a group. gloo closes a connection when a message on it times out,
    so this waits one millisecond for a message that nobody sends.
    """
    if group is None:
        return
    channel, backend = existing_channel(group), gloo_of(group)
    if channel is not None:
        channel.close()
    if backend is None:
        return
    for peer in range(backend.size()):
        if peer != backend.rank():
            try:
                backend.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(_SHORT)
            except RuntimeError:  # the timeout, as intended
                continue
