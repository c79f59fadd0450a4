"""Work on large tensors, or on many, in portions that fit into the cache of a CPU.

Two operations are done to one portion before the next portion has its turn: the second operation then reads from the cache what
the first one has read or written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PORTION = 1 << 17
"""Elements of a tensor that a thread of a CPU works on at a time: gradient and momentum in float32 take 1 MiB of its L2 cache."""


def portion_size() -> int:
    """Elements of one tensor that all threads together work on at a time; each has a cache of its own."""
    return PORTION * torch.get_num_threads()


def portions_of_lists(*lists: list[Tensor], limit: int) -> Iterator[tuple[list[Tensor], ...]]:
    """Cuts equally long lists of tensors into shorter lists; the tensors of each have at most ``limit`` elements together.

    The k-th tensors of all lists have one shape. A tensor above the limit comes alone, for ``portions_of_tensors`` to cut.
    Tensors of 3, 4, 9 and 2 elements with a limit of 8 give [3, 4], [9], [2].
    """
    start = elements = 0
    for k, tensor in enumerate(lists[0]):
        size = tensor.numel()
        if elements + size > limit and start < k:
            yield tuple([tensors[start:k] for tensors in lists])
            start, elements = k, 0
        elements += size
    if start < len(lists[0]):
        yield tuple([tensors[start:] for tensors in lists])


def portions_of_tensors(*tensors: Tensor, limit: int) -> list[Sequence[Tensor]]:
    """For each of several tensors with one shape, its views of at most ``limit`` elements; all are cut in the same way."""
    size = tensors[0].numel()
    if size <= limit:
        return [[tensor] for tensor in tensors]
    if all(tensor.is_contiguous() for tensor in tensors):
        count = -(-size // limit)  # rounded up, as is the size of a portion: all but the last are equal
        return [tensor.view(-1).chunk(count) for tensor in tensors]
    cuts = list(cuts_within(tuple(tensors[0].shape), limit))
    return [[tensor[cut] for cut in cuts] for tensor in tensors]


def cuts_within(shape: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """Cuts a tensor of ``shape`` into parts of at most ``limit`` elements. Yields indices, ``()`` for the whole tensor."""
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
