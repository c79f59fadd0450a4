"""Checkpoints beyond ``state_dict``: converting the state of torch's own optimizers."""

from typing import Any

from .dropped import refuse_name
from .tools.migrate import convert_torch_state

__all__ = ["convert_torch_state"]


def __getattr__(name: str) -> Any:
    refuse_name(f"checkpoint.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
