"""Health of a run: what measured steps show. ``Muon(metrics=10)`` measures, ``optimizer.metrics()`` returns it."""

from ..params.metrics_option import Metrics
from .alarms import Alarm, Health, Limits
from .report import flat
from .writers import CsvWriter, JsonlWriter, TensorBoardWriter, Writer

__all__ = ["Alarm", "CsvWriter", "Health", "JsonlWriter", "Limits", "Metrics", "TensorBoardWriter", "Writer", "flat"]
