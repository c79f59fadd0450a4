"""One wave on one rank: pieces go to the owners of their matrices, are orthogonalised there, and come back as updates.

``Wave.run`` is the whole way in reading order. It is a generator that yields twice, after each of its two exchanges has
started, so that other waves can work meanwhile; once more if it sends its results in a turn of their own. A matrix that
is whole on its rank needs no exchange: ``local_batch.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..errors import OrthogonalizeError
from ..transport import Pending
from .buffers import Stage
from .ortho_batch import OrthoBatch, orthogonalize_error
from .shards import NONE_FAILED, MomentumViews, UpdateViews, restore
from .step_param import MatrixKey, RunningStep


class RankWave(Protocol):
    """A wave on one rank, with its views made once."""

    @property
    def gather(self) -> PreparedExchange: ...

    @property
    def scatter(self) -> PreparedExchange: ...

    def run(self, step: RunningStep) -> Iterator[None]:
        """A step of the wave. If all of its parameters are idle, it keeps its turns, which decide which buffers are
        free.
        """
        ...


@dataclass(frozen=True, slots=True)
class Wave:
    """The ``RankWave`` of sharded matrices."""

    params: frozenset[int]  # the parts whose matrices travel in it, between any ranks
    momentum_views: MomentumViews  # where what this rank sends is written
    gather: PreparedExchange  # the exchange of pieces, to their owners
    owned_batches: tuple[OwnedBatch, ...]  # the matrices that this rank owns, batch by batch
    scatter: PreparedExchange  # the exchange of updates, back to the holders of the pieces
    update_views: UpdateViews  # where each piece of the update then is
    frees: Sequence[int]  # the parts whose gradients it is the last to read
    fallible: bool  # code of the user computes some of its matrices: ranks tell each other which have failed
    repeated: frozenset[MatrixKey]  # matrices of the plan that several ranks compute, for different holders
    shared: Sequence[int]  # the parts that all ranks know of, in the same order on all of them
    # copies between host memory, where the views are, and the device; None if both are the same
    stage: Stage | None = None

    def run(self, step: RunningStep) -> Iterator[None]:
        if self.params <= step.idle:
            yield from (None,) * 2
            return
        observer, streams = step.observer, step.streams
        # The side stream does elementwise work and exchanges, the main stream orthogonalises. On a CPU all work runs in
        # order.
        with streams.on_side_stream(step.ready, step.freed_gradients(self.frees)), observer.phase("momentum"):
            old_momenta = self.update_views.copy_momenta(step)
            fallible_momenta = self.momentum_views.fill(step)
            if self.stage is not None and not step.only_compiles:
                self.stage.to_device()
            gather = self.gather.start(step, "gather")
        step.free_gradients(self.frees)
        yield
        with observer.phase("gather"):
            # An exchange runs after what its stream was given before it, so that the main stream waits for the side
            # stream, too.
            gather.wait()
        for batch in self.owned_batches:
            batch.run(step)
        scatter = self.scatter.start(step, "scatter")
        yield
        with streams.on_side_stream(step.ready):  # which it has already seen: ``scatter.wait`` adds the rest
            with observer.phase("scatter"):
                scatter.wait()  # here the side stream waits for the main one
                if self.stage is not None and not step.only_compiles:
                    self.stage.to_host()
                failed = self._failed_anywhere(step) if self.fallible else NONE_FAILED
            with observer.phase("update"):
                restore(fallible_momenta, failed)
                self.update_views.apply(step, failed, old_momenta)

    def _failed_anywhere(self, step: RunningStep) -> frozenset[MatrixKey]:
        """The matrices of the wave that have failed at their owners. All ranks keep the same error of them.

        It takes one vote in host memory, and no wait for a device: a scheme or a rule raises where the host calls it.
        """
        assert step.exchange is not None
        owned = {key for batch in self.owned_batches for key in batch.ortho_batch.matrices}
        own = [
            error
            for error in step.failures
            if isinstance(error, OrthogonalizeError) and owned.issuperset(error.matrices)
        ]
        # A rank may have parameters that others do not know of, so that its indices mean nothing to them.
        position = {part: k for k, part in enumerate(self.shared)}
        here = [(error.names, error.reason, [(position[part], m) for part, m in error.matrices]) for error in own]
        entries = [(rank, *entry) for rank, of_rank in sorted(step.exchange.tell(here).items()) for entry in of_rank]
        keys = frozenset((self.shared[at], matrix) for *_, matrices in entries for at, matrix in matrices)
        if entries:
            rank, _, reason, _ = entries[0]
            names = (name for _, names, *_ in entries for name in names)
            common = orthogonalize_error(names, reason, keys, f"rank {rank}: ")
            common.__cause__ = own[0].__cause__ if own else None
            common.known_to_all = keys.isdisjoint(self.repeated)
            step.failures[:] = [error for error in step.failures if error not in own] + [common]
        return keys


@dataclass(frozen=True, slots=True)
class OwnedBatch:
    """A batch of matrices that this rank owns."""

    ortho_batch: OrthoBatch  # where they are orthogonalised
    unpack: CopyPairs  # from the pieces in the exchange buffers to ``ortho_batch``
    pack: CopyPairs  # from ``ortho_batch`` to the pieces in the exchange buffers

    def run(self, step: RunningStep) -> None:
        """Assembles the matrices from their pieces, orthogonalises them, and cuts them into pieces again."""
        if self.ortho_batch.is_idle(step.idle):
            return
        with step.observer.phase("gather"):
            self.unpack.run(step)
        if self.ortho_batch.orthogonalise(step):
            with step.observer.phase("scatter"):
                self.pack.run(step)


@dataclass(frozen=True, slots=True)
class CopyPairs:
    """Two lists of views with equal shapes; each source is copied to its target."""

    target: list[Tensor]
    source: list[Tensor]

    def run(self, step: RunningStep) -> None:
        if self.target:
            step.elementwise.copy(self.target, self.source)


NO_COPIES = CopyPairs([], [])


@dataclass(frozen=True, slots=True)
class PreparedExchange:
    """One exchange of the process group: flat views of two buffers, and elements per rank of the group.

    A rank that receives 6 elements from rank 0 and 12 from rank 2 of four has ``received`` of 18 and splits of [6, 0,
    12, 0].
    """

    received: Tensor
    received_splits: list[int]
    sent: Tensor
    sent_splits: list[int]

    def start(self, step: RunningStep, phase: str) -> Pending:
        """Starts it; ``phase`` names it in errors. The step's observer sees all that is sent."""
        assert step.exchange is not None
        return step.exchange.start(self.received, self.received_splits, self.sent, self.sent_splits, phase=phase)
