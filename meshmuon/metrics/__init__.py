"""Health of a run: what measured steps show. ``Muon(metrics=10)`` measures, ``optimizer.metrics()`` returns it."""

from ..params.metrics_option import Metrics
from .report import flat

__all__ = ["Metrics", "flat"]
