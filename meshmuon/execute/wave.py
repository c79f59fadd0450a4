"""One wave on one rank: pieces go to the owners of their matrices, are orthogonalised there, and come back as updates.

A matrix that is whole on its rank needs no exchange: ``LocalBatch``. A wave is a generator that yields twice, after each of its
two exchanges has started, so that other waves can work meanwhile; three times if it sends its results in a turn of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

from ..errors import OrthogonalizeError
from .buffers import CopyPairs, PreparedExchange, Stage
from .ortho_batch import OrthoBatch, orthogonalize_error
from .shards import NONE_FAILED, MomentumViews, ShardView, UpdateViews, load_rule_state, restore, store_rule_state
from .step_param import MatrixKey, RunningStep

STAGED_IN_FLIGHT = 2
"""How many staged batches are under way: one is orthogonalised while the host works on the one before and on the next."""


class RankWave(Protocol):
    """A wave on one rank, with its views made once."""

    def run(self, step: RunningStep) -> Iterator[None]:
        """A step of the wave. If all of its parameters are idle, it keeps its turns, which decide which buffers are free."""
        ...


@dataclass(frozen=True, slots=True)
class Wave:
    """The ``RankWave`` of sharded matrices."""

    params: frozenset[int]  # whose matrices travel in it, between whichever ranks
    momentum_views: MomentumViews  # where what this rank sends is written, before it is rounded for the wire
    rounding: CopyPairs  # from there to the buffer that is sent; empty where the dtype on the wire is that of the update
    gather: PreparedExchange  # the exchange of pieces, to their owners
    owned_batches: tuple[OwnedBatch, ...]  # the matrices that this rank owns, batch by batch
    scatter: PreparedExchange  # the exchange of updates, back to the holders of the pieces
    update_views: UpdateViews  # where each piece of the update is in the buffer that is received
    frees: Sequence[int]  # the parameters whose gradients it is the last to read
    fallible: bool  # code of the user computes some of its matrices: ranks tell each other which have failed
    repeated: frozenset[MatrixKey]  # matrices of the plan that several ranks compute, for different holders
    shared: Sequence[int]  # the parameters that all ranks know of, in an order that is the same on all of them
    # Gathers are waited for beside the main stream, where a rank without matrices of the wave starts the scatter, too: the others
    # do not wait for what it computes in another wave. All waves are in flight, none is finished before the last has computed.
    beside: bool = False
    sends_last: bool = False  # the results are sent in a turn of their own
    stage: Stage | None = None  # between the buffers that the views are of and those that travel; None where they are the same

    def run(self, step: RunningStep) -> Iterator[None]:
        if self.params <= step.idle:
            yield from (None,) * (3 if self.sends_last else 2)
            return
        observer, streams = step.observer, step.streams
        with streams.beside(step.ready, step.freed_gradients(self.frees)), observer.phase("momentum"):
            before = self.update_views.keep_momentum(step)
            kept = self.momentum_views.fill(step)
            self.rounding.run(step)
            if self.stage is not None and not step.only_compiles:
                self.stage.to_device()
            gather = self.gather.start(step, "gather")
        step.free_gradients(self.frees)
        yield
        with streams.beside(step.ready) if self.beside else nullcontext(), observer.phase("gather", waits=True):
            # An exchange runs after what its stream was given before it, so that the main stream waits for the side stream, too.
            gather.wait()
        if self.beside and self.owned_batches:
            streams.main_waits(streams.side_mark())
        for batch in self.owned_batches:
            batch.run(step)
        if self.sends_last:
            yield
        with streams.beside(step.ready) if self.beside and not self.owned_batches else nullcontext():
            scatter = self.scatter.start(step, "scatter")
        yield
        with streams.beside(step.ready):  # what the side stream has already seen: ``scatter.wait`` adds the rest
            with observer.phase("scatter", waits=True):
                scatter.wait()  # here the side stream waits for the main one
                if self.stage is not None and not step.only_compiles:
                    self.stage.to_host()
                failed = self._failed_anywhere(step) if self.fallible else NONE_FAILED
            with observer.phase("update"):
                restore(kept, failed)
                self.update_views.apply(step, failed, before)

    def _failed_anywhere(self, step: RunningStep) -> frozenset[MatrixKey]:
        """The matrices of the wave that have failed at their owners. All ranks keep the same error of them.

        It takes one vote in host memory, and no wait for a device: a scheme or a rule raises where the host calls it.
        """
        assert step.exchange is not None
        owned = {key for batch in self.owned_batches for key in batch.ortho_batch.matrices}
        own = [error for error in step.failures if isinstance(error, OrthogonalizeError) and owned.issuperset(error.matrices)]
        # A rank may have parameters that others do not know of, so that its indices mean nothing to them.
        position = {param: k for k, param in enumerate(self.shared)}
        here = [(error.names, error.reason, [(position[param], m) for param, m in error.matrices]) for error in own]
        entries = [(rank, *entry) for rank, of_rank in sorted(step.exchange.tell(here).items()) for entry in of_rank]
        keys = frozenset((self.shared[at], matrix) for *_, matrices in entries for at, matrix in matrices)
        if entries:
            rank, _, reason, _ = entries[0]
            names = (name for _, names, *_ in entries for name in names)
            shared = orthogonalize_error(names, reason, keys, f"rank {rank}: ")
            shared.__cause__ = own[0].__cause__ if own else None
            shared.known_to_all = keys.isdisjoint(self.repeated)
            step.failures[:] = [error for error in step.failures if error not in own] + [shared]
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
class LocalBatch:
    """Matrices beside their weights: momentum, orthogonalise, update."""

    ortho_batch: OrthoBatch  # where they are orthogonalised
    momentum_views: MomentumViews  # their place in the parameters, and their views of ``ortho_batch``
    update_views: UpdateViews  # the same
    rule_state: list[ShardView]  # the place of their rule state, and its views of ``ortho_batch``
    frees: Sequence[int]  # the parameters whose gradients it is the last to read

    def run(self, step: RunningStep) -> None:
        if self.ortho_batch.is_idle(step.idle):
            return
        with step.observer.phase("momentum"):
            before = self.update_views.keep_momentum(step)
            kept = self.momentum_views.fill(step)
            load_rule_state(self.rule_state, step)
        step.free_gradients(self.frees)
        if not self.ortho_batch.orthogonalise(step):
            restore(kept)
            return
        with step.observer.phase("update"):
            self.update_views.apply(step, kept=before)
            store_rule_state(self.rule_state, step)


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Matrices whose weights are in host memory: a ``LocalBatch`` with a way to the device and back."""

    batch: LocalBatch  # whose views are of the host memory of ``stage``
    stage: Stage  # between that memory and the ``ortho_batch``

    def run(self, step: RunningStep) -> Iterator[None]:
        """Yields when its matrices are on their way to the device, and when the device has been given them to orthogonalise.

        Other batches can be copied meanwhile.
        """
        batch, streams = self.batch, step.streams
        if batch.ortho_batch.is_idle(step.idle):
            yield from (None, None)
            return
        with streams.beside(step.ready), step.observer.phase("momentum"):
            before = batch.update_views.keep_momentum(step)
            kept = batch.momentum_views.fill(step)
            load_rule_state(batch.rule_state, step)
            if not step.only_compiles:
                self.stage.to_device()
            loaded = streams.side_mark()
        step.free_gradients(batch.frees)
        yield
        streams.main_waits(loaded)
        succeeded = batch.ortho_batch.orthogonalise(step)
        computed = streams.main_mark()
        yield
        if not succeeded:
            restore(kept)
            return
        with (
            streams.beside(computed),
            step.observer.phase("update"),
        ):  # not behind the next batch, if the main stream has it by now
            if not step.only_compiles:
                self.stage.to_host()
            batch.update_views.apply(step, kept=before)
            store_rule_state(batch.rule_state, step)
