"""Checks of single options. A string, a NaN or a number beyond the range of float32 must never reach a step.

The checks are strict about types. A flag is True or False, and nothing that merely counts as true. A number is a real
number or a floating point tensor of one element, never a flag.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..device import known_to_host
from ..dropped import VALUES
from ..errors import ConfigError
from ..errors import shown as shown  # most modules import it from here

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What momentum, products and pieces may be: torch does not compute in the narrower dtypes."""

Check: TypeAlias = Callable[[Mapping[str, Any], str, str], None]
"""Called as ``check(options, name, where)``; raises ConfigError, which names ``where``, if ``options[name]`` cannot
be used.
"""


def refuse_dropped(name: str, value: Any, where: str) -> None:
    """Refuses a value of an option that there is no more, with what to write instead."""
    if (written := f"{name}={value}") in VALUES:
        raise ConfigError(f"{where}: {written} is gone: {VALUES[written]}.")


def nearest(name: str, names: Iterable[str], *, count: int = 3, alike: float = 0.5) -> str:
    """Names that someone who wrote ``name`` may have meant, as errors list them; "" if none is near."""
    return ", ".join(difflib.get_close_matches(name, list(dict.fromkeys(names)), n=count, cutoff=alike))


def refuse_uninitialised(name: str, param: Tensor) -> None:
    if is_lazy(param):
        raise ConfigError(
            f"{name} is not initialised yet: it belongs to a lazy module, such as nn.LazyLinear, whose weights get "
            "shapes in the first forward pass. Run the model once on an example, then build the optimizer."
        )


def number(value: Any, what: str, where: str) -> float:
    """The value as a float. Refuses anything that is not a number, and tensors that the host cannot read without
    waiting.
    """
    if type(value) is float:
        return value
    if isinstance(value, Tensor):
        _check_one_element(value, what, where)
        if not known_to_host(value):
            raise ConfigError(
                f"{where}: {what} is a tensor on {value.device}, and every step would wait for the device to read it. "
                f"Write {what}=float(...); only lr may be a tensor on a device."
            )
        return float(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{where}: {what}={shown(value)} must be a number.")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_one_element(value: Tensor, what: str, where: str) -> None:
    if value.numel() != 1 or not value.is_floating_point():
        raise ConfigError(
            f"{where}: {what} is a tensor of {value.numel()} elements of {value.dtype}; it must have one, of floating "
            "point."
        )


def check_range(value: Any, what: str, where: str, *, low: float, below: float = math.inf) -> None:
    """Refuses anything but a number in [low, below)."""
    if not low <= number(value, what, where) < below:
        bound = f"at least {low:g} and finite" if below == math.inf else f"in [{low:g}, {below:g})"
        raise ConfigError(f"{where}: {what}={value if isinstance(value, Tensor) else shown(value)} must be {bound}.")


def check_replica_group(group: Any, what: str = "replica_group") -> None:
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    meshes = sys.modules.get("torch.distributed.device_mesh")  # if it was never imported, there is no mesh
    if meshes is None or not isinstance(group, meshes.DeviceMesh):
        raise ConfigError(
            f"{what}={shown(group)} must be a process group that this rank is in, such as "
            "torch.distributed.group.WORLD, a DeviceMesh, or None."
        )


def momentum_is_cycled(options: Mapping[str, Any]) -> bool:
    """Whether OneCycleLR or CyclicLR cycles the momentum of a param group: they leave these two keys in it.

    They write ``momentum`` into every group, since an optimizer has either momentum or betas for them.
    """
    return "base_momentum" in options and "max_momentum" in options


def adamw_betas(options: Mapping[str, Any]) -> tuple[float, float]:
    """The betas of a param group; torch's own key ``betas`` comes first, and a cycled momentum takes the place of
    beta1.
    """
    betas = options.get("betas", options["adamw_betas"])
    if not isinstance(betas, Sequence) or isinstance(betas, (str, bytes)) or len(betas) != 2:
        raise ConfigError(f"adamw_betas={shown(betas)} must be a pair of numbers, such as (0.9, 0.95).")
    beta1 = options["momentum"] if momentum_is_cycled(options) else betas[0]
    return number(beta1, "adamw_betas[0]", "AdamW"), number(betas[1], "adamw_betas[1]", "AdamW")


def adamw_eps(options: Mapping[str, Any]) -> float:
    """The epsilon of a param group; torch's own key ``eps`` comes first."""
    return number(options.get("eps", options["adamw_eps"]), "adamw_eps", "AdamW")


# What the table of options is made of: each is a ``Check``, or makes one.


def of_value(check: Callable[[Any], object]) -> Check:
    """A check that looks at the value alone and whose errors name the option themselves."""

    def check_value(options: Mapping[str, Any], name: str, where: str) -> None:
        check(options[name])

    return check_value


def in_range(low: float, below: float = math.inf) -> Check:

    def check(options: Mapping[str, Any], name: str, where: str) -> None:
        value = options[name]
        if type(value) is not float or not low <= value < below:  # a float in range is accepted at once, at every step
            check_range(value, name, where, low=low, below=below)

    return check


def one_of(choices: Sequence[str | None]) -> Check:

    def check(options: Mapping[str, Any], name: str, where: str) -> None:
        value = options[name]
        if not isinstance(value, (str, type(None))) or value not in choices:
            raise ConfigError(f"{name}={shown(value)} is unknown; write one of {tuple(choices)}.")

    return check


def whole_number(
    low: float = -math.inf, high: float = math.inf, why_high: str = "", *, optional: bool = False
) -> Check:
    """An int in [low, high], or None if it is ``optional``; not even 1.0 counts as an int."""

    def check(options: Mapping[str, Any], name: str, where: str) -> None:
        value = options[name]
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name}={shown(value)} must be a whole number (int).")
        if not low <= value <= high:
            bound = f"at least {low:g}" if value < low else f"at most {high:g}{why_high}"
            raise ConfigError(f"{name}={shown(value)} must be {bound}.")

    return check


def dtype_in(dtypes: Sequence[torch.dtype], wrong: str, *, pairs: bool = False) -> Check:
    """One of ``dtypes``, or None; with ``pairs`` also two of them. ``wrong`` says in errors what it must be."""

    def check(options: Mapping[str, Any], name: str, where: str) -> None:
        given = options[name]
        both = given if pairs and isinstance(given, (tuple, list)) and len(given) == 2 else (given,)
        if not all(dtype is None or (isinstance(dtype, torch.dtype) and dtype in dtypes) for dtype in both):
            for dtype in both:
                refuse_dropped(name, dtype, where)
            names = ", ".join(map(str, dtypes)) + (", a pair of them (to the owners, and back)" if pairs else "")
            raise ConfigError(f"{where}: {name}={shown(given)} {wrong}, which are {names}, or None.")

    return check


def check_flag(options: Mapping[str, Any], name: str, where: str) -> None:
    """True or False; the text "False" would count as true."""
    value = options[name]
    if value is not True and value is not False:
        raise ConfigError(f"{where}: {name}={shown(value)} must be True or False.")


def check_lr(options: Mapping[str, Any], name: str, where: str) -> None:
    """A number of at least 0, or a tensor of one element, which may be on a device."""
    lr = options[name]
    if type(lr) is float and 0.0 <= lr < math.inf:
        return
    if isinstance(lr, Tensor) and not known_to_host(lr):  # reading it would wait for the device
        _check_one_element(lr, name, where)
    else:
        check_range(lr, name, where, low=0.0)


def check_optional_lr(options: Mapping[str, Any], name: str, where: str) -> None:
    if options[name] is not None:
        check_lr(options, name, where)


def check_betas(options: Mapping[str, Any], name: str, where: str) -> None:
    for k, beta in enumerate(adamw_betas(options)):
        check_range(beta, f"{name}[{k}]", where, low=0.0, below=1.0)


def check_eps(options: Mapping[str, Any], name: str, where: str) -> None:
    check_range(adamw_eps(options), name, where, low=0.0)
