"""What differs between a GPU and a CPU, behind one interface: recording work once and replaying it.

The CUDA twin has not been run on a GPU by this project's tests; the CPU twin, with the same signature, has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["CudaReplay", "DirectReplay", "replay_for"]


class DirectReplay:
    """The CPU twin: replaying is calling."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def __call__(self) -> None:
        """Does the work."""
        self._work()


class CudaReplay:
    """Runs ``work`` on its first call and records it as a CUDA graph; later calls replay the graph.

    ``work`` must always read and write the same memory and must not wait for the device.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Does the work, by graph from the second call on."""
        if self._graph is not None:
            self._graph.replay()
            return
        # The first run does the real work and warms up libraries on a side stream, as capturing demands.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._work()
        self._graph = graph


def replay_for(device: torch.device, work: Callable[[], None], *, graphs: bool) -> Callable[[], None]:
    """``work`` as something to call at every step: a CUDA graph where asked for and possible, else itself."""
    return CudaReplay(work) if graphs and device.type == "cuda" else DirectReplay(work)
