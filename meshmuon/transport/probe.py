"""Messages between two ranks alone, to measure one link. Steps do not send any."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from .failures import named_phase


def swap_with(peer: int, sent: Tensor, received: Tensor) -> None:
    """Sends ``sent`` to rank ``peer`` of the default group and receives as much from it. Only these two ranks call.

    An exchange of gloo waits for all ranks, also for those that send nothing: it cannot measure one link.
    """
    with named_phase("measuring of a link"):
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)])
        for work in works:
            work.wait()
