"""Looking at a model's tensors without leaving a trace in what is made of its forward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, ParamSpec

import torch

from ..torch_compat import has_compiled, without_modes

__all__ = ["uncompiled", "unseen"]

_lock = threading.Lock()
_inside = 0  # threads that are inside ``uncompiled()``
_stance: AbstractContextManager[Any] | None = None

_P = ParamSpec("_P")


def unseen(method: Callable[_P, None]) -> Callable[_P, None]:
    """A method that neither autograd nor compilers nor modes see.

    Selective activation checkpointing is such a mode: what it saw here in the forward pass it would give to the model in the
    recomputation. The decorators of torch.compile would load all of it with this module, so they are put on at the first call.
    """
    guarded: list[Callable[_P, None]] = []

    @torch.no_grad()
    def unrecorded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        with without_modes():
            method(*args, **kwargs)

    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if not has_compiled():
            unrecorded(*args, **kwargs)
            return
        if not guarded:
            disable: Any = torch.compiler.disable
            guarded.append(disable(unrecorded))
        guarded[0](*args, **kwargs)

    return run


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled code runs as it is written; where nothing was ever compiled, nothing is loaded for it.

    The stance is one of the whole process: of threads that come and go the first one takes it, and the last one gives it back.
    """
    global _inside, _stance
    with _lock:
        _inside += 1
        if _stance is None and has_compiled():
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _stance is not None:
                _stance.__exit__(None, None, None)
                _stance = None
