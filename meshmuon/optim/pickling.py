"""Says which option keeps an optimizer from being pickled. pickle itself names only the function, and not where it
came from.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from ..errors import ConfigError
from ..params.checks import shown
from ..params.option_table import group_options

# picklers that store the code of functions; projects ship copies of them under longer names
_BY_VALUE = ("cloudpickle", "dill")


def refuse_unpicklable(groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first option of a param group, or of the ``defaults``, that pickle cannot store.

    Call it from ``__reduce_ex__``. It does nothing for a copy, or for a pickler that stores the code of functions.
    """
    if not _stores_references():
        return
    places = {f"group {index}": group for index, group in enumerate(groups)} | {"optimizer.defaults": defaults}
    for where, options in places.items():
        for option in group_options():
            value = options.get(option.name)
            try:
                pickle.dumps(value)
            except Exception as error:  # whatever the object's own methods raise
                raise ConfigError(
                    f"{where}: {option.name}={shown(value)} cannot be pickled ({type(error).__name__}: {error}), and "
                    "so neither can the optimizer. Define it at the top level of a module, with def or class, instead "
                    "of as a lambda or inside of a function. Or save optimizer.state_dict(), which needs no "
                    "functions: the optimizer that loads it keeps its own."
                ) from error


def _stores_references() -> bool:
    """Whether an ordinary pickler is at work. ``copy`` asks an object in the same way, and takes functions as they
    are.
    """
    caller: FrameType | None = sys._getframe(3)  # what called ``__reduce_ex__``; a pickler written in C has no frame
    if caller is not None and caller.f_globals.get("__name__") == "copy":
        return False
    while caller is not None:
        if any(name in caller.f_globals.get("__name__", "") for name in _BY_VALUE):
            return False
        caller = caller.f_back
    return True
