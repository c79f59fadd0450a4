"""Looking at a model's tensors without leaving a trace in what is made of its forward pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["unseen"]

_P = ParamSpec("_P")


def unseen(method: Callable[_P, None]) -> Callable[_P, None]:
    """A method that neither autograd nor compilers nor modes see.

    Selective activation checkpointing is such a mode: what it saw here in the forward pass it would give to the model in the
    recomputation. The decorators of torch.compile would load all of it with this module, so they are put on at the first call.
    """
    guarded: list[Callable[_P, None]] = []

    @torch.no_grad()
    def without_modes(*args: _P.args, **kwargs: _P.kwargs) -> None:
        with _disable_current_modes():
            method(*args, **kwargs)

    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if "torch._dynamo" not in sys.modules:
            without_modes(*args, **kwargs)
            return
        if not guarded:
            disable: Any = torch.compiler.disable
            guarded.append(disable(without_modes))
        guarded[0](*args, **kwargs)

    return run
