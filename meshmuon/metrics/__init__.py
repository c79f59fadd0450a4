"""Health of a run: what measured steps show. ``Muon(metrics=10)`` measures, ``optimizer.metrics()`` returns it."""

from typing import Any

from ..dropped import refuse_name
from .report import flat

__all__ = ["flat"]


def __getattr__(name: str) -> Any:
    refuse_name(f"metrics.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
