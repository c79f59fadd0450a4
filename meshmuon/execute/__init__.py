"""Runs what was planned."""

from .local import LocalExecutor, Work, WorkSettings
from .settings import DEFAULT_MEMORY_BUDGET, ExecutorSettings

__all__ = ["DEFAULT_MEMORY_BUDGET", "ExecutorSettings", "LocalExecutor", "Work", "WorkSettings"]
