"""Weights of 16 bits: the new weight is formed in float32 and rounded once, to the nearest number or stochastically.

In bfloat16, p·(1 − lr·weight_decay) is p again if lr·weight_decay is below 2⁻⁹, and so is p minus a small update.
Stochastic rounding takes the next larger or the next smaller number, with probabilities whose mean is the unrounded
number: what a single step cannot express is right on average.

The random bits are a function of a key and a count, which are part of the optimizer's state, and of the element's place
in the whole parameter. They are therefore the same however the parameter is sharded, on every kind of device, and after
a restart.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ..device import copy_to, known_to_host
from ..layout import Ranges
from ..ortho import Workspace
from .views import Cut, cut_out_of_broadcast

_CHUNK = {"cpu": 1 << 16}  # elements that are formed at a time: in the cache of a CPU
_CHUNK_ON_DEVICE = 1 << 22

# Constants of 64 bits of SplitMix64, and odd ones of 32 bits, as the signed integers that torch computes with.
_GAMMA, _MIX_1, _MIX_2 = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SPREAD_1, _SPREAD_2 = 0x7FEB352D, 0x846CA68B - (1 << 32)


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype are formed in float32 and rounded."""
    return dtype.itemsize == 2


@dataclass(frozen=True, slots=True)
class Elements:
    """The place of each element of a local tensor in the whole parameter: its row and its column, which are broadcast.

    The rows of a parameter are all of its dims but the last, flattened: expert 2 of (8, 64, 48) has rows 128 to 191.
    """

    rows: Tensor  # int64
    cols: Tensor  # int64

    def hashed(self) -> Elements:
        """Hashes in place of the indices of rows and columns, the same at every step. ``RandomWords`` is made from
        them.
        """
        return Elements(_mixed(self.rows + _GAMMA), _mixed(self.cols - _GAMMA))

    def cut_out(self, cut: Cut | None) -> Elements:
        """The elements of a cut of the local tensor."""
        return (
            self
            if cut is None
            else Elements(cut_out_of_broadcast(self.rows, cut), cut_out_of_broadcast(self.cols, cut))
        )


def elements_held(shape: Sequence[int], held: Sequence[Ranges], device: torch.device) -> Elements:
    """The elements that a rank holds of a parameter of ``shape``; ``held`` has the ranges of each dim, in local
    order.
    """
    dims = len(shape)
    rows, cols = torch.zeros((1,) * dims, dtype=torch.int64, device=device), None
    for dim, ranges in enumerate(held):
        spans = [torch.arange(start, stop, device=device) for start, stop in ranges]
        index = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64, device=device)
        index = index.view(*(-1 if k == dim else 1 for k in range(dims)))
        if dim == dims - 1:
            cols = index
        else:
            rows = rows + index * math.prod(shape[dim + 1 : -1])
    return Elements(rows, torch.zeros_like(rows) if cols is None else cols)


@dataclass(frozen=True, slots=True)
class RandomWords:
    """A random word of 32 bits for each row and each column of a tensor; an element's word is made from these two."""

    rows: Tensor  # int32, as in ``Elements``
    cols: Tensor

    @classmethod
    def of(cls, counter: Tensor, elements: Elements) -> RandomWords:
        """The words of a step. ``counter`` has the parameter's key and the count of its steps; ``elements`` are
        hashed.
        """
        key, count = counter.tolist() if known_to_host(counter) else counter
        seed = _mixed(_wrapped(_mixed(key) + count * _GAMMA))
        return cls(_word(elements.rows ^ seed), _word(elements.cols ^ _mixed(_wrapped(seed + _GAMMA))))

    def cut_out(self, cut: Cut) -> RandomWords:
        """The words of a cut of the tensor."""
        return RandomWords(cut_out_of_broadcast(self.rows, cut), cut_out_of_broadcast(self.cols, cut))


_Part = TypeVar("_Part")

_CutUpdate: TypeAlias = "tuple[Tensor, Tensor, RandomWords | None]"
"""A cut of a parameter, its update, and its random words if it is rounded stochastically."""


class RoundingScratch:
    """Memory for one chunk of a parameter, made at its first use and kept in ``workspace``.

    ``name`` distinguishes the streams of a device that work at the same time.
    """

    def __init__(self, workspace: Workspace | None = None, name: str = "rounding") -> None:
        self._workspace, self._name = Workspace() if workspace is None else workspace, name

    def take(self, what: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor for a chunk of ``shape``. Chunks of one name share memory."""
        with torch.inference_mode(False):  # made inside inference_mode it could not be written outside of it
            return self._workspace.take(f"{self._name} {what}", shape, dtype, device)

    def take_like(self, what: str, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Uninitialised tensors with the shapes of ``tensors``."""
        sizes = [tensor.numel() for tensor in tensors]
        flat = self.take(what, (sum(sizes),), dtype, tensors[0].device)
        return [part.view(tensor.shape) for part, tensor in zip(torch.split(flat, sizes), tensors, strict=True)]


_of_thread = threading.local()


def scratch_for(device: torch.device) -> RoundingScratch:
    """A CPU's, which each thread keeps: new memory costs more than the work in it. On a device, streams work at the
    same time.
    """
    if device.type != "cpu":
        return RoundingScratch()
    if not hasattr(_of_thread, "scratch"):
        _of_thread.scratch = RoundingScratch()
    scratch: RoundingScratch = _of_thread.scratch
    return scratch


def chunks_of(shape: Sequence[int], device: torch.device) -> Iterator[tuple[slice, ...]]:
    """Cuts a tensor of ``shape`` into chunks that a step forms at a time."""
    return cuts_within(tuple(shape), _chunk_size(device))


def cuts_within(shape: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """Cuts a tensor of ``shape`` into such of at most ``limit`` entries: indices, ``()`` for the whole tensor."""
    if math.prod(shape) <= limit:
        yield ()
        return
    inner = math.prod(shape[1:])
    if inner <= limit:
        step = limit // inner
        yield from ((slice(start, start + step),) for start in range(0, shape[0], step))
        return
    for k in range(shape[0]):
        yield from ((slice(k, k + 1), *rest) for rest in cuts_within(shape[1:], limit))


def _chunk_size(device: torch.device) -> int:
    return _CHUNK.get(device.type, _CHUNK_ON_DEVICE)


def apply_narrow(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    decay: float | Tensor,
    rate: float | Tensor,
    *,
    cautious: bool,
    words: Sequence[RandomWords | None] | None,
    scratch: RoundingScratch,
) -> None:
    """p ← p·decay − rate·update in float32, rounded once; stochastically where there are ``words``. May overwrite
    ``updates``.

    Each operation rounds once in float32, so that the same bits follow wherever an element lies. Large parameters are
    cut into chunks, small ones share one.
    """
    cuts = (
        (param[cut], update[cut], None if param_words is None else param_words.cut_out(cut))
        if cut
        else (param, update, param_words)
        for param, update, param_words in zip(params, updates, words or [None] * len(params), strict=True)
        for cut in (chunks_of(param.shape, param.device) if param.numel() else ())
    )
    for chunk in together(cuts, lambda cut: cut[0].numel(), _chunk_size(params[0].device)):
        _apply_chunk(chunk, decay, rate, cautious=cautious, scratch=scratch)


def together(parts: Iterable[_Part], size: Callable[[_Part], int], limit: int) -> Iterator[list[_Part]]:
    """Consecutive parts, as many at a time as the limit allows, and at least one."""
    chunk: list[_Part] = []
    held = 0
    for part in parts:
        if held + size(part) > limit and chunk:
            yield chunk
            chunk, held = [], 0
        chunk.append(part)
        held += size(part)
    if chunk:
        yield chunk


def _apply_chunk(
    chunk: Sequence[_CutUpdate],
    decay: float | Tensor,
    rate: float | Tensor,
    *,
    cautious: bool,
    scratch: RoundingScratch,
) -> None:
    targets, changes = [target for target, _, _ in chunk], [change for _, change, _ in chunk]
    weights = scratch.take_like("weight", targets, torch.float32)
    torch._foreach_copy_(weights, targets)
    if any(change.dtype != torch.float32 for change in changes):
        narrow, changes = changes, scratch.take_like("update", targets, torch.float32)
        torch._foreach_copy_(changes, narrow)
    if cautious:
        decayed, flags = (
            scratch.take_like("decayed", targets, torch.float32),
            scratch.take_like("flags", targets, torch.bool),
        )
        for weight, change, out, same_way in zip(weights, changes, decayed, flags, strict=True):
            torch.ge(torch.mul(weight, change, out=out).mul_(rate), 0, out=same_way)
            torch.where(same_way, torch.mul(weight, decay, out=out), weight, out=out)
        weights = decayed
    elif isinstance(decay, Tensor) or decay != 1.0:
        torch._foreach_mul_(weights, decay)
    torch._foreach_mul_(changes, rate)
    torch._foreach_add_(changes, 0.0)  # −0 becomes 0: at rate 0 a weight of −0 keeps its sign
    torch._foreach_sub_(weights, changes)
    for weight, (_, _, part_words) in zip(weights, chunk, strict=True):
        if part_words is not None:
            round_stochastically(weight, part_words, scratch)
    torch._foreach_copy_(targets, weights)


def round_stochastically(numbers: Tensor, words: RandomWords, scratch: RoundingScratch) -> None:
    """Rounds float32 numbers to bfloat16, up or down in magnitude with the probabilities that make the mean exact, in
    place.

    A bfloat16 number is the upper half of a float32 number. A random number of 16 bits is added to the lower half, and
    the lower half is cleared. What is a bfloat16 number already, and what is not finite, stays.
    """
    is_nan = torch.ne(numbers, numbers, out=scratch.take("flags", numbers.shape, torch.bool, numbers.device))
    numbers.view(torch.int32).add_(noise_from(words, numbers.shape, scratch)).bitwise_and_(-(1 << 16))
    numbers.masked_fill_(is_nan, math.nan)  # adding to the bits of a NaN may give any number


def noise_from(words: RandomWords, shape: Sequence[int], scratch: RoundingScratch) -> Tensor:
    """16 random bits for each element of a tensor of ``shape``, as int32, in ``scratch``."""
    device = words.rows.device
    noise, shifted = (scratch.take(name, shape, torch.int32, device) for name in ("noise", "shifted"))
    torch.bitwise_xor(words.rows, words.cols, out=noise)
    noise.mul_(_SPREAD_1)
    noise.bitwise_xor_(_shift_right(noise, 15, 0x1FFFF, shifted))
    noise.mul_(_SPREAD_2)
    return _shift_right(noise, 16, 0xFFFF, shifted)


def advance_counters(counters: Iterable[Tensor | None], skip_mask: Tensor | None) -> None:
    """Counts a step of the parameters with these counters; not if ``skip_mask``, a boolean on a device, is true."""
    counts = [counter[1:] for counter in dict.fromkeys(counters) if counter is not None]
    if skip_mask is None:
        for device in dict.fromkeys(count.device for count in counts):  # weights may be in host memory beside others
            torch._foreach_add_([count for count in counts if count.device == device], 1)
    else:
        for count in counts:
            count.add_(copy_to((~skip_mask).long(), count.device))


_Words = TypeVar("_Words", int, Tensor)


def _mixed(words: _Words) -> _Words:
    """SplitMix64's permutation of words of 64 bits: all bits of the result depend on all bits of the argument."""
    words = _wrapped((words ^ ((words >> 30) & ((1 << 34) - 1))) * _MIX_1)
    words = _wrapped((words ^ ((words >> 27) & ((1 << 37) - 1))) * _MIX_2)
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def _wrapped(words: _Words) -> _Words:
    """Python's integers as signed words of 64 bits, which torch's are already."""
    return words if isinstance(words, Tensor) else ((words + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _word(words: Tensor) -> Tensor:
    """32 random bits from a hashed index xor a seed: the upper half of a product depends on all bits."""
    return ((words * _MIX_2) >> 32).to(torch.int32)


def _shift_right(words: Tensor, bits: int, mask: int, out: Tensor) -> Tensor:
    """Shifts right and fills with zeros; torch fills with the sign."""
    return torch.bitwise_right_shift(words, bits, out=out).bitwise_and_(mask)
