"""An exchange that goes in two hops through relays: three exchanges one after the other, and the copies between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ortho import Workspace
from ..plan import HopRoutes, Hops, Parcel, Relays
from ..transport import Exchange, Pending
from .step_param import Observer
from .wave import CopyPairs, ExchangeBuffers


@dataclass(frozen=True, slots=True)
class RelayedPending:
    """A relayed exchange that has started. All ranks wait for their relayed exchanges in the same order."""

    buffers: RelayedBuffers
    exchange: Exchange
    phase: str
    observer: Observer
    collecting: Pending

    def wait(self) -> None:
        """Forwards and distributes what was collected; work that is issued after this call sees the received elements."""
        buffers = self.buffers
        self.collecting.wait()
        buffers.to_forward.run()
        forwarding = buffers.forward.start(self.exchange, self.phase, self.observer)
        forwarding.wait()
        buffers.to_distribute.run()
        distributing = buffers.distribute.start(self.exchange, self.phase, self.observer)
        distributing.wait()
        buffers.to_received.run()


@dataclass(frozen=True, slots=True)
class RelayedBuffers:
    """What ``ExchangeBuffers`` is for an exchange in two hops, with the same ``start``."""

    to_collect: CopyPairs
    collect: ExchangeBuffers
    to_forward: CopyPairs
    forward: ExchangeBuffers
    to_distribute: CopyPairs
    distribute: ExchangeBuffers
    to_received: CopyPairs

    def start(self, exchange: Exchange, phase: str, observer: Observer) -> RelayedPending:
        """Starts the first of its exchanges; ``phase`` names all of them in errors."""
        self.to_collect.run()
        return RelayedPending(self, exchange, phase, observer, self.collect.start(exchange, phase, observer))


@dataclass(frozen=True, slots=True)
class RelayMemory:
    """Buffers between the hops of one exchange.

    Exchanges of the same ``place`` are never under way at the same time, and share the buffers of the first hop. The others run
    while the exchange is waited for, which all exchanges of one ``direction`` do one after the other on one stream.
    """

    workspace: Workspace
    place: str
    direction: str

    def take(self, hop: int, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of one hop. Before the first is used, the largest of its kind has been taken (``reserve``)."""
        where = self.direction if hop else self.place
        return self.workspace.take(f"relay {hop} {name} {where}", (size,), dtype, device)

    def reserve(self, hops: Hops, position: int, dtype: torch.dtype, device: torch.device) -> None:
        """Takes the buffers of an exchange on the rank at ``position`` of the plan's, so that others may be smaller."""
        for number, hop in enumerate(hops):
            for name, sizes in (("sent", hop.sent), ("received", hop.received)):
                self.take(number, name, sizes[position] // dtype.itemsize, dtype, device)


@dataclass(frozen=True, slots=True)
class RelayedExchange:
    """One exchange as a rank must know it to relay for others: all parcels that leave its node, and all that arrive there."""

    rank: int
    leaving: Mapping[Parcel, int]  # → elements
    arriving: Mapping[Parcel, int]

    def buffers(self, relays: Relays, exchange: Exchange, received: Tensor, sent: Tensor, memory: RelayMemory) -> RelayedBuffers:
        """The exchange from ``sent``, ordered by the ranks that parcels go to, to ``received``, by those that they come from."""
        sizes = {**self.leaving, **self.arriving}
        own = _views(sent, [parcel for parcel in sorted(self.leaving) if parcel[0] == self.rank], sizes)
        final = _views(received, [parcel for parcel in sorted(self.arriving) if parcel[1] == self.rank], sizes)
        hops = relays.hops(self.rank, self.leaving, self.arriving)
        outs, ins, exchanges, like = [], [], [], (sent.dtype, sent.device)
        for number, hop in enumerate(hops):
            leaving, arriving = [parcel for _, parcel in hop.sent], [parcel for _, parcel in hop.received]
            out = memory.take(number, "sent", sum(sizes[parcel] for parcel in leaving), *like)
            arrived = memory.take(number, "received", sum(sizes[parcel] for parcel in arriving), *like)
            outs.append(_views(out, leaving, sizes))
            ins.append(_views(arrived, arriving, sizes))
            exchanges.append(_exchange_buffers(hop, sizes, exchange, arrived, out))
        return RelayedBuffers(
            to_collect=_copies(outs[0], own),
            collect=exchanges[0],
            to_forward=_copies(outs[1], {**own, **ins[0]}),
            forward=exchanges[1],
            to_distribute=_copies(outs[2], ins[1]),
            distribute=exchanges[2],
            to_received=_copies(final, {**ins[0], **ins[1], **ins[2]}),
        )


def _views(buffer: Tensor, parcels: Sequence[Parcel], sizes: Mapping[Parcel, int]) -> dict[Parcel, Tensor]:
    return dict(zip(parcels, torch.split(buffer, [sizes[parcel] for parcel in parcels]), strict=True)) if parcels else {}


def _copies(targets: Mapping[Parcel, Tensor], sources: Mapping[Parcel, Tensor]) -> CopyPairs:
    return CopyPairs(list(targets.values()), [sources[parcel] for parcel in targets])


def _exchange_buffers(
    hop: HopRoutes, sizes: Mapping[Parcel, int], exchange: Exchange, received: Tensor, sent: Tensor
) -> ExchangeBuffers:
    def splits(parcels: Sequence[tuple[int, Parcel]]) -> list[int]:
        elements: dict[int, int] = {}
        for peer, parcel in parcels:
            elements[peer] = elements.get(peer, 0) + sizes[parcel]
        return exchange.splits(elements)

    return ExchangeBuffers(received, splits(hop.received), sent, splits(hop.sent))
