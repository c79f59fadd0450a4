"""One wave on one rank: pieces go to the owners of their matrices, are orthogonalised there, and come back as updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..device import HOST, Mark, Streams, Transfers, transfers_for
from ..errors import OrthogonalizeError
from ..ortho import Workspace
from ..transport import Exchange, Pending
from .ortho_batch import OrthoBatch, orthogonalize_error
from .shard_views import NONE_FAILED, GradientReads, ShardViews
from .step_param import MatrixKey, Observer, StepParam


class StartedExchange(Protocol):
    """An exchange that is under way."""

    def wait(self) -> None:
        """Work that is issued after this call sees the received elements."""
        ...


class PreparedExchange(Protocol):
    """One exchange with its buffers: ``ExchangeBuffers``, or ``RelayedBuffers`` where it goes through relays."""

    def start(self, exchange: Exchange, phase: str, observer: Observer) -> StartedExchange:
        """Starts the exchange; ``phase`` names it in errors. ``observer`` sees all that is sent."""
        ...


@dataclass(frozen=True, slots=True)
class ExchangeBuffers:
    """What one exchange sends and receives: flat views of two buffers, and elements per rank of the exchange's group.

    A rank that receives 6 elements from rank 0 and 12 from rank 2 of four has ``received`` of 18 and splits of [6, 0, 12, 0].
    """

    received: Tensor
    received_splits: list[int]
    sent: Tensor
    sent_splits: list[int]

    def start(self, exchange: Exchange, phase: str, observer: Observer) -> Pending:
        """Starts the exchange; ``phase`` names it in errors."""
        observer.sends(self.sent)
        return exchange.start(self.received, self.received_splits, self.sent, self.sent_splits, phase=phase)


@dataclass(frozen=True, slots=True)
class CopyPairs:
    """Two lists of views with equal shapes; each source is copied to its target."""

    target: list[Tensor]
    source: list[Tensor]

    def run(self) -> None:
        """Copies all pairs."""
        if self.target:
            torch._foreach_copy_(self.target, self.source)


@dataclass(frozen=True, slots=True)
class Stage:
    """Flat memory of the device, and as much host memory that is copied there and back."""

    device: Tensor
    host: Tensor
    transfers: Transfers

    def to_device(self) -> None:
        """What the device is given next finds what the host has written."""
        self.transfers.load(self.device, self.host)

    def to_host(self) -> None:
        """Returns once the host may read what the device has been given to compute so far, and may write for the next copy."""
        self.transfers.store(self.host, self.device)
        self.transfers.settle()


class Staging:
    """The stages of one device. Those of one name share host memory, as the buffers of a ``Workspace`` do."""

    def __init__(self, device: torch.device) -> None:
        self._transfers = transfers = transfers_for(device)
        self._host = Workspace(lambda size, dtype, _: transfers.host_buffer(size, dtype))

    def flat(self, name: str, device: Tensor) -> Stage:
        """A stage for a flat tensor of the device."""
        return Stage(device, self._host.take(name, device.shape, device.dtype, HOST), self._transfers)

    def matrices(self, name: str, shape: tuple[int, int, int], device: Tensor) -> tuple[Stage, Tensor]:
        """A stage for the flat memory of matrices on the device, and the same matrices in host memory."""
        return self.flat(name, device), self._host.take_matrices(name, shape, device.dtype, HOST)

    def bytes(self) -> int:
        """Host memory held."""
        return self._host.bytes()


@dataclass(frozen=True, slots=True)
class OwnedBatch:
    """A batch of matrices that this rank owns."""

    ortho_batch: OrthoBatch  # where they are orthogonalised
    unpack: CopyPairs  # from the pieces in the exchange buffers to ``ortho_batch``
    pack: CopyPairs  # from ``ortho_batch`` to the pieces in the exchange buffers

    def run(self, idle: AbstractSet[int], observer: Observer) -> None:
        """Assembles the matrices from their pieces, orthogonalises them, and cuts them into pieces again."""
        if self.ortho_batch.is_idle(idle):
            return
        with observer.phase("gather"):
            self.unpack.run()
        if self.ortho_batch.orthogonalise(idle, observer):
            with observer.phase("scatter"):
                self.pack.run()


@dataclass(frozen=True, slots=True)
class FallibleWave:
    """Tells all ranks which matrices of a wave have failed at their owners, before anyone applies an update.

    It takes one vote in host memory per wave, and no wait for a device: a scheme or a rule raises where the host calls it.
    """

    failures: list[Exception]  # what has gone wrong in the step on this rank
    repeated: frozenset[MatrixKey]  # matrices that several ranks compute, for different holders

    def failed(self, exchange: Exchange, owned_batches: Sequence[OwnedBatch]) -> frozenset[MatrixKey]:
        """The matrices that have failed on any rank. All ranks keep the same error of them."""
        failures = [(batch.ortho_batch.take_failure(), batch.ortho_batch.matrices) for batch in owned_batches]
        failed_here = [(*failure, matrices) for failure, matrices in failures if failure is not None]
        told = exchange.tell(failed_here)
        entries = [(rank, *entry) for rank, of_rank in sorted(told.items()) for entry in of_rank]
        keys = frozenset((param, matrix) for *_, matrices in entries for param, matrix in matrices)
        if entries:
            rank, _, reason, _ = entries[0]
            own_keys = [(names, reason) for names, reason, _ in failed_here]
            own = [
                error
                for error in self.failures
                if isinstance(error, OrthogonalizeError) and not error.where and (error.names, error.reason) in own_keys
            ]
            shared = orthogonalize_error((name for _, names, *_ in entries for name in names), reason, f"rank {rank}: ")
            shared.__cause__ = own[0].__cause__ if own else None
            shared.known_to_all = keys.isdisjoint(self.repeated)
            self.failures[:] = [error for error in self.failures if error not in own] + [shared]
        return keys


class RankWave(Protocol):
    """A wave on one rank, with its views made once."""

    def run(
        self,
        step_params: Sequence[StepParam],
        idle: AbstractSet[int],
        exchange: Exchange,
        streams: Streams,
        ready: Mark,
        observer: Observer,
    ) -> Iterator[None]:
        """A step of the wave; yields after each of its two exchanges has started, so that other waves can work meanwhile.

        ``ready`` marks where the main stream has all gradients. For ``idle`` parameters, the contents of the pieces that travel
        have no meaning, and nothing is written.
        """
        ...


@dataclass(frozen=True, slots=True)
class Wave:
    """The ``RankWave`` of sharded matrices."""

    gather: PreparedExchange  # the exchange of pieces, to their owners
    scatter: PreparedExchange  # the exchange of updates, back to the holders of the pieces
    momentum_views: ShardViews  # where the momentum of each of this rank's pieces is written, before it is rounded for the wire
    rounding: CopyPairs  # from there to the buffer that is sent; empty where the dtype on the wire is that of the update
    update_views: ShardViews  # where each piece of the update is in the buffer that is received
    owned_batches: tuple[OwnedBatch, ...]  # the matrices that this rank owns, batch by batch
    gradient_reads: GradientReads  # the parameters whose gradients it is the first or the last to read
    fallible: FallibleWave | None = None  # how ranks tell each other what failed; None if no matrix of the wave is ``fallible``
    stage: Stage | None = None  # between the buffers that the views are of and those that travel; None where they are the same

    def run(
        self,
        step_params: Sequence[StepParam],
        idle: AbstractSet[int],
        exchange: Exchange,
        streams: Streams,
        ready: Mark,
        observer: Observer,
    ) -> Iterator[None]:
        """A step of the wave."""
        with streams.beside(ready, self.gradient_reads.gradients(step_params, idle)), observer.phase("momentum"):
            self.gradient_reads.accumulate_momentum(step_params, idle)
            self.momentum_views.fill(step_params, idle)
            self.rounding.run()
            if self.stage is not None:
                self.stage.to_device()
            gather = self.gather.start(exchange, "gather", observer)
        self.gradient_reads.free_gradients(step_params)
        yield
        with observer.phase("gather", waits=True):
            # An exchange runs after what its stream was given before it, so that the main stream waits for the side stream, too.
            gather.wait()
        for batch in self.owned_batches:
            batch.run(idle, observer)
        scatter = self.scatter.start(exchange, "scatter", observer)
        yield
        with streams.beside(ready):
            with observer.phase("scatter", waits=True):
                scatter.wait()  # likewise, the side stream waits for the main one
                if self.stage is not None:
                    self.stage.to_host()
                failed = NONE_FAILED if self.fallible is None else self.fallible.failed(exchange, self.owned_batches)
            with observer.phase("update"):
                self.update_views.apply(step_params, idle, failed)
