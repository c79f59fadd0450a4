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
from ..execute import local_part
from .dtensors import with_local

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


@dataclass(slots=True)
class _Pool:
    """The state of one device and dtype. ``out`` are the tensors that stand in ``optimizer.state`` now."""

    places: list[_Place]
    host: Tensor
    transfers: Transfers
    device: torch.device
    flat: Tensor | None  # on the device, while the state is there
    out: list[Tensor]


class Offload:
    """Moves all state of an optimizer; does nothing until it is turned on."""

    def __init__(self, *, on: bool = False) -> None:
        self.on = on
        self._pools: list[_Pool] = []

    def turn_on(self, states: _States) -> None:
        """Puts the state away now and after every step."""
        self.on = True
        self._put_away(states)

    def turn_off(self, states: _States) -> None:
        """Brings the state back for good."""
        self._bring_back(states)
        self._pools = []
        self.on = False

    @contextmanager
    def resident(self, states: _States) -> Iterator[None]:
        """The state is on its devices inside, and away again afterwards, also when a step fails."""
        if not self.on:
            yield
            return
        self._bring_back(states)
        try:
            yield
        finally:
            self._put_away(states)

    def put_away(self, states: _States) -> None:
        """Puts away what has come to the devices otherwise, by loading."""
        if self.on:
            self._put_away(states)

    def settle(self) -> None:
        """Returns once the host may read the state."""
        for pool in self._pools:
            pool.transfers.settle()

    def _bring_back(self, states: _States) -> None:
        for pool in self._pools:
            pool.flat = torch.empty(pool.host.numel(), dtype=pool.host.dtype, device=pool.device)
            pool.transfers.load(pool.flat, pool.host)
            for k, place in enumerate(pool.places):
                if states.get(place.param, {}).get(place.key) is pool.out[k]:  # not loaded or freed by others meanwhile
                    pool.out[k] = with_local(pool.out[k], place.view(pool.flat))
                    states[place.param][place.key] = pool.out[k]
        for param, key, value in _movable(states):
            if value.device != param.device:  # a copy of an optimizer whose state was away
                states[param][key] = with_local(value, local_part(value).to(param.device))

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
                pool.out[k] = with_local(pool.out[k], place.view(pool.host))
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
        span = 1 + sum((n - 1) * stride for n, stride in zip(local.shape, local.stride(), strict=True)) if local.numel() else 0
        size += -(-span // step) * step
    transfers = transfers_for(device)
    with torch.inference_mode(False):  # made inside inference_mode it could never be written outside
        host = transfers.host_buffer(size, dtype)
    for place, (_, _, value) in zip(places, members, strict=True):
        transfers.store(place.view(host), local_part(value))
    return _Pool(places, host, transfers, device, None, [value for _, _, value in members])
