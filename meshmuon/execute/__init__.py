"""Runs what was planned."""

from .executor import Executor
from .reference import ReferenceExecutor
from .settings import DEFAULT_MEMORY_BUDGET, ExecutorSettings
from .work import Work, WorkSettings, local_part

__all__ = ["DEFAULT_MEMORY_BUDGET", "Executor", "ExecutorSettings", "ReferenceExecutor", "Work", "WorkSettings", "local_part"]
