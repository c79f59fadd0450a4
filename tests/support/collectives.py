"""Counts the collectives that ranks make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from meshmuon.torch_compat import new_named_group

_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "all_to_all_single", "broadcast", "barrier")


@contextmanager
def counted_collectives() -> Iterator[dict[int, list[tuple[str, int]]]]:
    """Rank → what it has called, with the number of elements of the tensor; ``("new_group", 0)`` for a new process
    group.

    A rank may clear its own list, such as after making its meshes.
    """
    calls: dict[int, list[tuple[str, int]]] = defaultdict(list)

    def counting(name: str, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[dist.get_rank()].append((name, args[0].numel() if args and isinstance(args[0], Tensor) else 0))
            return original(*args, **options)

        return call

    with ExitStack() as stack:
        for name in _COLLECTIVES:
            stack.enter_context(patch.object(dist, name, counting(name, getattr(dist, name))))
        stack.enter_context(patch("meshmuon.transport.groups.new_named_group", counting("new_group", new_named_group)))
        yield calls
