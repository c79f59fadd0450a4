"""What goes through the process group in a step, how long the host waits for it, and how long it takes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshmuon.transport import Agreement, Vote

__all__ = ["Wire"]


class _Timed:
    """A collective under way, whose waiting is added up."""

    def __init__(self, work: Any, wire: Wire) -> None:
        self._work, self._wire = work, wire

    def wait(self, *timeout: timedelta) -> None:
        """Waits and counts."""
        begin = time.perf_counter()
        try:
            self._work.wait(*timeout)
        finally:
            self._wire.waited += time.perf_counter() - begin

    def is_completed(self) -> bool:
        """As torch's."""
        return bool(self._work.is_completed())


class Wire:
    """Counts the ragged exchanges and the small agreements of this process from now on."""

    def __init__(self) -> None:
        self.waited, self.agreements = 0.0, 0
        self.exchanges: list[tuple[Tensor, Tensor, list[int], list[int], Any]] = []
        self._exchange: Callable[..., Any] = dist.all_to_all_single
        self._vote: Callable[[Agreement, Vote], Vote] = Agreement.decide
        dist.all_to_all_single = self._counted_exchange  # type: ignore[assignment]
        wire = self

        def counted_vote(agreement: Agreement, vote: Vote) -> Vote:
            wire.agreements += 1
            return wire._vote(agreement, vote)

        Agreement.decide = counted_vote  # type: ignore[assignment, method-assign]

    def reset(self) -> None:
        """Starts counting anew."""
        self.waited, self.agreements = 0.0, 0
        self.exchanges = []

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent in exchanges."""
        return sum(sum(splits) * sent.element_size() for _, sent, _, splits, _ in self.exchanges)

    def alone(self) -> Callable[[], None]:
        """The exchanges counted so far, one after the other, on buffers of their own, with nothing to do meanwhile."""
        calls = [
            (received.clone(), sent.clone(), there, here, group)
            for received, sent, there, here, group in self.exchanges
        ]

        def run() -> None:
            for received, sent, there, here, group in calls:
                self._exchange(received, sent, there, here, group=group, async_op=True).wait()

        return run

    def _counted_exchange(
        self, output: Tensor, sent: Tensor, there: list[int], here: list[int], *, group: Any, async_op: bool
    ) -> Any:
        self.exchanges.append((output, sent, there, here, group))
        return _Timed(self._exchange(output, sent, there, here, group=group, async_op=async_op), self)
