"""Checks of single options, by type first: a string, a NaN or a number that no float32 holds must never reach a step.

What is accepted means what it says: a flag is True or False and nothing that merely counts as true; a number is any real number
or a floating point tensor of one element, never a flag.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..device import known_to_host
from ..errors import ConfigError
from ..ortho import FORMS
from ..plan import REPLICA_OPTIONS

__all__ = [
    "FLOAT_DTYPES",
    "check_choice",
    "check_dtype",
    "check_flag",
    "check_optimizer_options",
    "check_range",
    "check_replica_group",
    "check_whole",
    "number",
    "shown",
]

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What momentum, products and pieces may be: torch computes in none of the narrower ones."""

_LONGEST = 120
_MOST_WAVES = 1024


def shown(value: object) -> str:
    """A value as errors show it."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def number(value: Any, what: str, where: str) -> float:
    """The value as a float; refuses what is no number, and tensors that it would take a wait for the device to read."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ConfigError(f"{where}: {what} is a tensor of {value.numel()} elements; it must have one.")
        if not value.is_floating_point():
            raise ConfigError(f"{where}: {what} is a tensor of {value.dtype}; it must be of a floating point dtype.")
        if not known_to_host(value):
            raise ConfigError(
                f"{where}: {what} is a tensor on {value.device}, and every step would wait for the device to read it. Write "
                f"{what}=float(...); only lr may be a tensor on a device."
            )
        return float(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{where}: {what}={shown(value)} must be a number.")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_range(value: Any, what: str, where: str, *, low: float, below: float = math.inf) -> None:
    """Refuses what is not a number in [low, below)."""
    if not low <= number(value, what, where) < below:
        bound = f"at least {low:g} and finite" if below == math.inf else f"in [{low:g}, {below:g})"
        raise ConfigError(f"{where}: {what}={value if isinstance(value, Tensor) else shown(value)} must be {bound}.")


def check_flag(value: Any, what: str, where: str) -> None:
    """Refuses all but True and False: the text "False" would count as true."""
    if value is not True and value is not False:
        raise ConfigError(f"{where}: {what}={shown(value)} must be True or False.")


def check_whole(value: Any, what: str) -> None:
    """Refuses what is not a whole number: not even 1.0."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{what}={shown(value)} must be a whole number (int).")


def check_choice(value: Any, what: str, choices: Sequence[str]) -> None:
    """Refuses what is none of a few strings."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{what}={shown(value)} is unknown; write one of {tuple(choices)}.")


def check_optimizer_options(options: Mapping[str, Any]) -> None:
    """Refuses options of the whole optimizer that cannot be meant; sizes out of range are left to whoever uses them."""
    for flag in ("debug", "use_distributed_muon", "deterministic", "cuda_graphs"):
        check_flag(options[flag], flag, "Muon")
    for size in ("warmup_step", "chunk_size", "memory_budget"):
        check_whole(options[size], size)
    ahead = options["warmup_step"]
    if not 0 <= ahead <= _MOST_WAVES:
        bound = "at least 0" if ahead < 0 else f"at most {_MOST_WAVES}: each wave under way needs buffers of its own"
        raise ConfigError(f"warmup_step={shown(ahead)} must be {bound}.")
    check_choice(options["form"], "form", FORMS)
    check_choice(options["replicas"], "replicas", REPLICA_OPTIONS)
    _check_backend(options["compile"])
    check_replica_group(options["replica_group"], "replica_group")


def _check_backend(backend: Any) -> None:
    if isinstance(backend, bool):
        return
    known = torch.compiler.list_backends(exclude_tags=()) if isinstance(backend, str) else []
    if backend not in known:
        raise ConfigError(f"compile={shown(backend)} must be True, False or the name of a backend of torch.compile: {known}.")


def check_dtype(dtype: Any, what: str, where: str) -> None:
    """Refuses what is neither one of the dtypes that torch computes in nor None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in FLOAT_DTYPES):
        names = ", ".join(map(str, FLOAT_DTYPES))
        raise ConfigError(
            f"{where}: {what}={shown(dtype)} must be a floating point dtype to compute in, which are {names}, or None."
        )


def check_replica_group(group: Any, what: str) -> None:
    """Refuses what is neither a process group nor a mesh."""
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    meshes = sys.modules.get("torch.distributed.device_mesh")  # where it was never loaded there is no mesh
    if meshes is None or not isinstance(group, meshes.DeviceMesh):
        raise ConfigError(
            f"{what}={shown(group)} must be a process group that this rank is in, such as torch.distributed.group.WORLD, a "
            "DeviceMesh, or None."
        )
