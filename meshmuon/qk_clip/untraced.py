"""Running code inside a model's forward pass that autograd, compilers and dispatch modes do not record."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, ParamSpec

import torch

from ..torch_compat import has_compiled, never_traced, without_modes

_lock = threading.Lock()
_threads_inside = 0  # threads that are inside ``uncompiled()``
_stance: AbstractContextManager[Any] | None = None  # the stance that the first of them has set

_P = ParamSpec("_P")


def untraced(method: Callable[_P, None]) -> Callable[_P, None]:
    """Hides a method from autograd, compilers and dispatch modes.

    Selective activation checkpointing is such a mode: results that it caches here in the forward pass would be handed to the
    model's own operations in the recomputation.
    """

    @never_traced
    @torch.no_grad()
    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        with without_modes():
            method(*args, **kwargs)

    return run


@contextmanager
def uncompiled() -> Iterator[None]:
    """Runs compiled code eagerly inside the ``with``. Does not load torch.compile if nothing was compiled.

    The stance is global to the process: the first thread that enters sets it, and the last one that leaves resets it.
    """
    global _threads_inside, _stance
    with _lock:
        _threads_inside += 1
        if _stance is None and has_compiled():
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
    try:
        yield
    finally:
        with _lock:
            _threads_inside -= 1
            if _threads_inside == 0 and _stance is not None:
                _stance.__exit__(None, None, None)
                _stance = None
