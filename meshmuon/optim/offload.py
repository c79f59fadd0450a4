"""Optimizer state in host memory between steps: offloaded after a step, loaded before the next.

While the state is offloaded, ``optimizer.state`` holds host tensors of the same shapes, so it can be saved, copied and
read as usual. Flat buffers make each direction a few copies: one for AdamW's and one for other state of each device and
dtype, on a GPU as many as waste little pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..device import Mark, Transfers, is_staged, transfers_for
from ..errors import KeptError
from ..params.dtensors import with_local
from ..state.param_state import ADAMW_KEYS, COUNTER
from ..torch_compat import local_part

_ALIGNMENT = 64  # bytes; suits vector instructions and copies
_NOT_MOVED = ("step", COUNTER)  # a number or two per parameter, which a step needs on its device

_States = Mapping[Tensor, dict[str, Any]]
_PoolKind: TypeAlias = tuple[torch.device, torch.dtype, bool]  # of a pool; last, whether it has AdamW's state


class _Slot(NamedTuple):
    """A tensor of the state, and where its elements are in a pool's flat buffers."""

    param: Tensor
    key: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.stride, self.offset)

    def view_in_own_storage(self, flat: Tensor) -> Tensor:
        """As ``view``, but over a storage that covers only this tensor's memory.

        torch can neither copy nor save a DTensor whose local tensor has an offset, and would save all of ``flat`` with
        a plain tensor.
        """
        start, stop = (flat.itemsize * element for element in (self.offset, self.offset + self.span))
        storage = flat.untyped_storage()[start:stop]
        return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(storage, 0, self.shape, self.stride)

    @property
    def span(self) -> int:
        """Number of elements of the buffer from this tensor's first to its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))


@dataclass(slots=True)
class _Pool:
    """State of one kind that is copied together."""

    slots: list[_Slot]
    host: Tensor  # flat buffer in host memory
    transfers: Transfers  # copies between host and device
    device: torch.device
    of_adamw: bool  # which a step needs last, and loads while it works on matrices
    flat: Tensor | None  # flat buffer on the device; None while the state is offloaded
    current: list[Tensor]  # the tensors that are in ``optimizer.state`` now, one per slot
    loaded: Mark = None  # when ``flat`` has the state

    def members(self) -> Iterator[tuple[_Slot, Tensor]]:
        return zip(self.slots, self.current, strict=True)

    def load_separately(self, slot: _Slot) -> Tensor:
        local = torch.empty_strided(slot.shape, slot.stride, dtype=self.host.dtype, device=self.device)
        self.transfers.load(local, slot.view(self.host))
        return local


class Offload:
    """Moves all state of an optimizer; does nothing until it is turned on."""

    def __init__(self, *, on: bool = False) -> None:
        self.on = on
        self._inside = False  # a step is running
        self._pools: list[_Pool] = []

    def turn_on(self, states: _States) -> None:
        """Offloads the state now and after every step."""
        self.on = True
        self._offload(states)

    def turn_off(self, states: _States) -> None:
        """Loads the state for good, each tensor into separate memory."""
        self._load(states, bulk=False)
        self._pools = []
        self.on = False

    @contextmanager
    def resident(self, states: _States, failure: KeptError, *, adamw_later: bool = False) -> Iterator[None]:
        """Loads the state for the ``with`` block and offloads it afterwards, even if the step fails.

        If ``adamw_later``, AdamW's is there only after ``wait_for_adamw``. Keeps an error of loading: the other ranks
        must learn of it before this one raises it.
        """
        if not self.on or self._inside:
            yield
            return
        self._inside = True
        try:
            with failure:
                self._load(states, adamw_later=adamw_later)
            yield
        finally:
            self._inside = False
            self._offload(states)

    def wait_for_adamw(self) -> None:
        """What the device is given next finds the state of AdamW there."""
        for pool in self._pools:
            if pool.of_adamw:
                pool.transfers.wait(pool.loaded)

    def put_away(self, states: _States) -> None:
        """Offloads state that has been created or loaded from a checkpoint on the devices."""
        if self.on and not self._inside:
            self._offload(states)

    def settle(self) -> None:
        """Waits until the host can read the state."""
        for pool in self._pools:
            pool.transfers.settle()

    @torch.inference_mode(False)  # tensors created inside inference_mode could not be written outside
    @torch.no_grad()
    def _load(self, states: _States, *, bulk: bool = True, adamw_later: bool = False) -> None:
        for pool in self._pools:
            if pool.flat is not None:  # offloading has failed, and the host has older values
                continue
            if bulk:
                flat = torch.empty(pool.host.numel(), dtype=pool.host.dtype, device=pool.device)
                pool.loaded = pool.transfers.load(flat, pool.host, waits=not (adamw_later and pool.of_adamw))
                pool.flat = flat
            for k, slot in enumerate(pool.slots):
                if states.get(slot.param, {}).get(slot.key) is pool.current[k]:  # not replaced or deleted meanwhile
                    local = pool.load_separately(slot) if pool.flat is None else slot.view(pool.flat)
                    pool.current[k] = with_local(pool.current[k], local)
                    states[slot.param][slot.key] = pool.current[k]
        for param, key, value in _movable(states):
            if value.device != param.device:  # in a copy of an optimizer whose state was offloaded
                states[param][key] = with_local(value, local_part(value).to(param.device))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _offload(self, states: _States) -> None:
        by_pool: dict[_PoolKind, list[tuple[Tensor, str, Tensor]]] = {}
        # and so copied last
        for param, key, value in sorted(_movable(states), key=lambda member: member[1] in ADAMW_KEYS):
            by_pool.setdefault((param.device, value.dtype, key in ADAMW_KEYS), []).append((param, key, value))
        held = {(id(slot.param), slot.key, id(value)) for pool in self._pools for slot, value in pool.members()}
        if held != {(id(param), key, id(value)) for members in by_pool.values() for param, key, value in members}:
            self.settle()  # before host buffers are freed that may still be written
            self._pools = [pool for kind, members in by_pool.items() for pool in _new_pools(kind, members)]
        for pool in self._pools:
            if pool.flat is not None:
                pool.transfers.store(pool.host, pool.flat)
            pool.flat = None
            for k, slot in enumerate(pool.slots):
                pool.current[k] = with_local(pool.current[k], slot.view_in_own_storage(pool.host))
                states[slot.param][slot.key] = pool.current[k]


def _movable(states: _States) -> list[tuple[Tensor, str, Tensor]]:
    """What is moved: not the state of weights in host memory on a mesh of devices, which is there already."""
    return [
        (param, key, value)
        for param, state in states.items()
        if not is_staged(param)
        for key, value in state.items()
        if isinstance(value, Tensor) and key not in _NOT_MOVED
    ]


def _new_pools(kind: _PoolKind, members: list[tuple[Tensor, str, Tensor]]) -> list[_Pool]:
    """Pools whose host buffers have the values of ``members``: (parameter, key, tensor) triples."""
    device, dtype, of_adamw = kind
    step = max(1, _ALIGNMENT // dtype.itemsize)
    slots = [_Slot(param, key, local_part(value).shape, local_part(value).stride(), 0) for param, key, value in members]
    spans = [-(-slot.span // step) * step for slot in slots]
    transfers, pools, first = transfers_for(device), [], 0
    for count in transfers.portions([dtype.itemsize * span for span in spans]):
        portion = slice(first, first + count)
        offsets = accumulate(spans[portion], initial=0)
        placed = [slot._replace(offset=offset) for slot, offset in zip(slots[portion], offsets, strict=False)]
        host = transfers.host_buffer(sum(spans[portion]), dtype)
        values = [value for _, _, value in members[portion]]
        for slot, value in zip(placed, values, strict=True):
            local = local_part(value)
            if local.device == device:
                transfers.store(slot.view(host), local)
            else:  # it was offloaded already, in another buffer
                slot.view(host).copy_(local)
        pools.append(_Pool(placed, host, transfers, device, of_adamw, None, values))
        first += count
    return pools
