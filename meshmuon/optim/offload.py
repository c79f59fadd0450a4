"""Optimizer state in host memory between steps: put away in bulk after a step, brought back before the next.

While the state is away, ``optimizer.state`` holds host tensors of the same shapes, so that saving, copying and looking at it work
as ever. One flat buffer per device and dtype makes each way one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..device import Transfers, transfers_for
from ..params.dtensors import with_local
from ..torch_compat import local_part

__all__ = ["Offload"]

_ALIGNMENT = 64  # bytes; what vector instructions and copies like best
_NOT_MOVED = ("step",)  # a number per parameter, which AdamW's kernel wants where it is

_States = Mapping[Tensor, dict[str, Any]]


class _Place(NamedTuple):
    """One tensor of the state, and where its elements are in a pool's buffers."""

    param: Tensor
    key: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.stride, self.offset)

    def alone(self, flat: Tensor) -> Tensor:
        """As ``view``, but at the beginning of a storage of its own over the same memory.

        torch can neither copy nor save a DTensor whose part begins elsewhere, and would save all of ``flat`` with a plain tensor.
        """
        first, last = (flat.itemsize * at for at in (self.offset, self.offset + self.span))
        storage = flat.untyped_storage()[first:last]
        return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(storage, 0, self.shape, self.stride)

    @property
    def span(self) -> int:
        """Elements from the first to the last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))


@dataclass(slots=True)
class _Pool:
    """The state of one device and dtype. ``out`` are the tensors that stand in ``optimizer.state`` now."""

    places: list[_Place]
    host: Tensor
    transfers: Transfers
    device: torch.device
    flat: Tensor | None  # on the device, while the state is there
    out: list[Tensor]

    def separate(self, place: _Place) -> Tensor:
        local = torch.empty_strided(place.shape, place.stride, dtype=self.host.dtype, device=self.device)
        self.transfers.load(local, place.view(self.host))
        return local


class Offload:
    """Moves all state of an optimizer; does nothing until it is turned on."""

    def __init__(self, *, on: bool = False) -> None:
        self.on = on
        self._inside = False  # a step is under way
        self._pools: list[_Pool] = []

    def turn_on(self, states: _States) -> None:
        """Puts the state away now and after every step."""
        self.on = True
        self._put_away(states)

    def turn_off(self, states: _States) -> None:
        """Brings the state back for good, each tensor into memory of its own."""
        self._bring_back(states, bulk=False)
        self._pools = []
        self.on = False

    @contextmanager
    def resident(self, states: _States) -> Iterator[Exception | None]:
        """The state is on its devices inside, and away again afterwards, also when a step fails.

        Gives what kept the state from coming back: the other ranks must hear of it before this one raises it.
        """
        if not self.on or self._inside:
            yield None
            return
        failure: Exception | None = None
        self._inside = True
        try:
            try:
                self._bring_back(states)
            except Exception as error:
                failure = error
            yield failure
        finally:
            self._inside = False
            self._put_away(states)

    def put_away(self, states: _States) -> None:
        """Puts away what has come to the devices otherwise, by loading."""
        if self.on and not self._inside:
            self._put_away(states)

    def settle(self) -> None:
        """Returns once the host may read the state."""
        for pool in self._pools:
            pool.transfers.settle()

    @torch.inference_mode(False)  # what is made inside inference_mode could never be written outside
    @torch.no_grad()
    def _bring_back(self, states: _States, *, bulk: bool = True) -> None:
        for pool in self._pools:
            if pool.flat is not None:  # putting it away failed, and what the host has is older
                continue
            if bulk:
                flat = torch.empty(pool.host.numel(), dtype=pool.host.dtype, device=pool.device)
                pool.transfers.load(flat, pool.host)
                pool.flat = flat
            for k, place in enumerate(pool.places):
                if states.get(place.param, {}).get(place.key) is pool.out[k]:  # not loaded or freed by others meanwhile
                    local = pool.separate(place) if pool.flat is None else place.view(pool.flat)
                    pool.out[k] = with_local(pool.out[k], local)
                    states[place.param][place.key] = pool.out[k]
        for param, key, value in _movable(states):
            if value.device != param.device:  # a copy of an optimizer whose state was away
                states[param][key] = with_local(value, local_part(value).to(param.device))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _put_away(self, states: _States) -> None:
        found: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, str, Tensor]]] = {}
        for param, key, value in _movable(states):
            found.setdefault((param.device, value.dtype), []).append((param, key, value))
        if not self._knows(list(found.values())):
            self.settle()  # host buffers that may still be written are let go
            self._pools = [_new_pool(device, dtype, members) for (device, dtype), members in found.items()]
        for pool in self._pools:
            if pool.flat is not None:
                pool.transfers.store(pool.host, pool.flat)
            pool.flat = None
            for k, place in enumerate(pool.places):
                pool.out[k] = with_local(pool.out[k], place.alone(pool.host))
                states[place.param][place.key] = pool.out[k]

    def _knows(self, found: list[list[tuple[Tensor, str, Tensor]]]) -> bool:
        """Whether all state is what the pools have given out, so that one copy per pool puts it away."""
        return len(found) == len(self._pools) and all(
            len(pool.out) == len(members) and all(out is value for out, (_, _, value) in zip(pool.out, members, strict=True))
            for pool, members in zip(self._pools, found, strict=True)
        )


def _movable(states: _States) -> list[tuple[Tensor, str, Tensor]]:
    return [
        (param, key, value)
        for param, entry in states.items()
        for key, value in entry.items()
        if isinstance(value, Tensor) and key not in _NOT_MOVED
    ]


def _new_pool(device: torch.device, dtype: torch.dtype, members: list[tuple[Tensor, str, Tensor]]) -> _Pool:
    """A pool that already holds what ``members`` hold."""
    step = max(1, _ALIGNMENT // dtype.itemsize)
    places, size = [], 0
    for param, key, value in members:
        local = local_part(value)
        places.append(_Place(param, key, local.shape, local.stride(), size))
        size += -(-places[-1].span // step) * step
    transfers = transfers_for(device)
    host = transfers.host_buffer(size, dtype)
    for place, (_, _, value) in zip(places, members, strict=True):
        local = local_part(value)
        if local.device == device:
            transfers.store(place.view(host), local)
        else:  # it was away already, in another buffer
            place.view(host).copy_(local)
    return _Pool(places, host, transfers, device, None, [value for _, _, value in members])
